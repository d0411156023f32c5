"""Files that data names: what is none is refused without a wait, wherever it is read."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.agents.tools.built_in import SearchTool
from mcore_rl.agents.tools.sources import load_tool_file
from mcore_rl.checkpoint.files import build_manifest, check_files
from mcore_rl.checkpoint.hf import SafetensorsFile
from mcore_rl.cli.compose import compose_config
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.regular_file import find_below, read_regular
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.files import open_rows
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.examples.tasks import tiny_model
from mcore_rl.jobs.convert.megatron_checkpoint import find_checkpoint
from mcore_rl.jobs.make_data import make_published
from tests.odd_files import ODD_KINDS, make_odd_file

SAVED = Path(__file__).parents[1] / "data" / "saved_by_datasets" / "seven"


def convert(path: Path) -> None:
    make_published("hh", [path], path.parent / "out.parquet", None)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "rows.parquet": ("train", lambda path: open_rows(path, "train")),
    "rows.jsonl": ("train", lambda path: open_rows(path, "train")),
    "rows.jsonl.gz": ("--input", convert),
    "config.json": ("config", read_json_object),
    "model.safetensors": ("model", SafetensorsFile),
    "recipe.yaml": ("recipe", lambda path: compose_config(RLConfig, [f"recipe={path}"])),
    "tools.yaml": ("tools", load_tool_file),
    "texts.jsonl": ("texts", SearchTool),
}


@pytest.mark.parametrize("kind", ODD_KINDS)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_named_without_a_wait(name, kind, tmp_path):
    word, read = READERS[name]
    make_odd_file(tmp_path / name, kind)
    start_s = time.process_time()
    with pytest.raises(ConfigError, match=word):
        read(tmp_path / name)
    assert time.process_time() - start_s < 10


@pytest.mark.parametrize("name", ["rows.jsonl", "config.json", "recipe.yaml", "tools.yaml"])
def test_file_that_does_not_fit_into_memory_is_not_read(name, tmp_path):
    make_odd_file(tmp_path / name, "huge")
    with pytest.raises(ConfigError, match=r"more than \d+ bytes"):
        READERS[name][1](tmp_path / name)


@pytest.mark.parametrize("kind", ODD_KINDS)
@pytest.mark.parametrize("name", ["data-00000-of-00002.arrow", "state.json"])
def test_saved_data_set_with_another_kind_of_file_is_refused(name, kind, tmp_path):
    folder = shutil.copytree(SAVED, tmp_path / "saved")
    make_odd_file(folder / name, kind)
    with pytest.raises(ConfigError, match=r"data-00000|state\.json"):
        open_rows(folder, "data.train_file")


@pytest.mark.parametrize("name", ["../rows.arrow", "/dev/zero", "link.arrow", "a\0.arrow", 3])
def test_files_that_a_data_set_names_are_in_its_folder(name, tmp_path):
    folder = shutil.copytree(SAVED, tmp_path / "saved")
    shutil.copy(next(folder.glob("*.arrow")), tmp_path / "rows.arrow")
    (folder / "link.arrow").symlink_to(tmp_path / "rows.arrow")
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"] = [{"filename": name}]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"its state\.json (names .*outside|does not name)"):
        open_rows(folder, "data.train_file")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.train_tokenizer(["user\nA", "assistant\nB"] * 9).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "pipe behind a link"])
@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
     "generation_config.json", "vocab.json", "model.safetensors",
     "additional_chat_templates/tool.jinja"],
)  # fmt: skip
def test_model_folder_with_another_kind_of_file_is_refused(name, kind, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / name).parent.mkdir(exist_ok=True)
    make_odd_file(folder / name, kind)
    with pytest.raises(ConfigError, match=rf"{Path(name).name}\S* cannot be read: a \w+, no "):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_text_of_a_model_that_does_not_fit_into_memory_is_refused(name, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    make_odd_file(folder / name, "huge")
    with pytest.raises(ConfigError, match=rf"{name} cannot be read: it has more than 1073741824 b"):
        load_tokenizer(folder)


def test_model_folder_may_have_folders_links_and_links_to_nothing(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "original").mkdir()
    (folder / "gone.json").symlink_to("nothing")
    (folder / "tokenizer.json").rename(tmp_path / "blob")  # as in the cache of huggingface_hub
    (folder / "tokenizer.json").symlink_to(tmp_path / "blob")
    assert load_tokenizer(folder).eos_token_id is not None


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_checksum_of_another_kind_of_file_is_not_computed(kind, tmp_path):
    (tmp_path / "a").touch()
    listed = build_manifest([tmp_path / "a"])
    make_odd_file(tmp_path / "a", kind)
    with pytest.raises(ConfigError, match=r"a cannot be read: a \w+, no regular file"):
        check_files(tmp_path, listed)


def test_tensor_is_not_read_from_what_took_the_place_of_its_file(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    make_odd_file(tmp_path / "model.safetensors", "pipe")
    with pytest.raises(ConfigError, match="cannot be read: a pipe, no regular file"):
        file.read_into("w", None, torch.zeros(2))


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp", "..", "sub/deep"])
def test_checkpoint_that_a_tracker_names_is_in_its_folder(name, tmp_path):
    for folder in (tmp_path / "elsewhere", tmp_path / "run" / "sub" / "deep"):
        folder.mkdir(parents=True)
        (folder / "metadata.json").touch()
    (tmp_path / "metadata.json").touch()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text(name)
    with pytest.raises(ConfigError, match="is no distributed checkpoint"):
        find_checkpoint(tmp_path / "run")


def test_path_below_a_folder_may_go_through_its_own_links(tmp_path):
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a").write_text("x")
    (folder / "link").symlink_to(folder / "deep")
    (tmp_path / "outer").symlink_to(folder)
    for root in (folder, tmp_path / "outer", os.path.relpath(folder)):
        for name in ("deep/a", "link/a", folder / "deep" / "a", "deep/../deep/a"):
            assert read_regular(find_below(root, name), 1) == b"x"
    for name in ("..", "../data_beside", tmp_path / "a", "link/../../a"):
        with pytest.raises(OSError, match="outside of the folder"):
            find_below(folder, name)
