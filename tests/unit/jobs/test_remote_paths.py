"""Models by name and by URL, data by URL: what is fetched, where it is, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest

from mcore_rl.cli.main import run_command
from mcore_rl.config.checks import check_model_exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import DataConfig, EvalConfig, ModelConfig, RLConfig, SetsConfig
from mcore_rl.data.files import open_rows
from mcore_rl.examples.tasks import last_digit
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.jobs.remote_paths import (
    CACHE,
    check_export,
    check_is_local,
    export_checkpoint,
    fetch_inputs,
    fetch_model,
)
from mcore_rl.models.base import read_config
from tests.hub import COMMIT, Hub, serve_hub

FETCH = """
import sys
from mcore_rl.jobs.remote_paths import fetch_model
print(fetch_model(*sys.argv[1:]))
"""
SETTINGS = (
    "data.max_prompt_tokens=64", "rollout.max_response_tokens=32", "trainer.prompts_per_step=20",
)  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its tokenizer and 20 prompts; beside the model a pickle, code and a folder."""
    folder = tmp_path_factory.mktemp("task") / "task"
    last_digit.prepare(folder, seed=0, worked_share=0.35)
    for file in folder.glob("*.parquet"):
        pq.write_table(pq.read_table(file).slice(0, 20), file)
    model = folder / "model"
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": 1}))
    (model / "modeling_tiny.py").write_text("raise SystemExit('code ran')\n")
    (model / "tokenizer_tiny.model").write_bytes(pickle.dumps({}))
    (model / "original").mkdir()
    shutil.copy(model / "model.safetensors", model / "original" / "consolidated.safetensors")
    return folder


@pytest.fixture
def hub(task: Path, tmp_path: Path) -> Iterator[Hub]:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(task / "model" / "config.json", pickled)
    shutil.copy(task / "model" / "pytorch_model.bin", pickled)
    repositories = {"org/tiny": task / "model", "org/pickled": pickled}
    with serve_hub({**repositories, "org/gated": pickled}) as hub:
        hub.gated.add("org/gated")
        yield hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(task: Path) -> Iterator[str]:
    """The task's folder in fsspec's memory."""
    memory = fsspec.filesystem("memory")
    memory.put(str(task), "/bucket/task", recursive=True)
    yield "memory://bucket/task"
    memory.rm("/bucket", recursive=True)


def run_python(hub: Hub, home: Path, *arguments: str, offline: str = "0") -> str:
    """Run Python with a cache in `home`; return what it prints, the error of a failure included."""
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline,
        "HF_HUB_ETAG_TIMEOUT": "5",
    }  # fmt: skip
    command = [sys.executable, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return result.stdout.strip() if not result.returncode else result.stderr


def test_model_of_a_hub_is_fetched_without_pickles_and_code(hub, tmp_path):
    home = tmp_path / "home"
    folder = Path(run_python(hub, home, "-c", FETCH, "model.path", "hf:org/tiny"))
    assert folder.is_relative_to(home) and folder.name == COMMIT
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {name.rpartition(".")[2] for name in names} <= {"json", "safetensors", "jinja"}
    assert "consolidated.safetensors" not in hub.downloads
    assert not any(name.endswith((".bin", ".py", ".model")) for name in hub.downloads)


def test_second_start_downloads_nothing_and_neither_does_one_without_network(hub, tmp_path):
    def fetch(name: str = "hf:org/tiny", offline: str = "0") -> str:
        return run_python(hub, tmp_path / "home", "-c", FETCH, "m", name, offline=offline)

    first = fetch()
    assert hub.downloads
    hub.requests.clear()
    assert fetch() == first
    assert hub.downloads == []
    hub.requests.clear()
    assert fetch(f"hf:org/tiny@{COMMIT}") == first  # a commit needs no look-up
    assert fetch(offline="1") == first
    assert hub.requests == []
    hub.url = "http://127.0.0.1:9"  # nothing listens
    assert fetch() == first


@pytest.mark.parametrize(
    ("name", "offline", "reason"),
    [
        ("hf:org/absent", "0", "has no such repository, or it is private (HF_TOKEN)"),
        ("hf:org/gated", "0", "asks to accept its terms there, and to log in (HF_TOKEN)"),
        ("hf:org/tiny@v9", "0", "the repository has no revision 'v9'"),
        ("hf:org/pickled", "0", "has no *.safetensors file; allowed: a repository with"),
        ("hf:org/tiny", "1", "HF_HUB_OFFLINE is set, and "),
        ("hf:tiny", "0", "allowed: hf:ORG/NAME or hf:ORG/NAME@REVISION"),
        ("ms:org/tiny", "0", "needs the package modelscope"),
    ],
)
def test_error_names_setting_name_and_reason(hub, tmp_path, name, offline, reason):
    setting = "critic.model_path"
    error = run_python(hub, tmp_path / "home", "-c", FETCH, setting, name, offline=offline)
    last = error.strip().splitlines()[-1]
    assert f"ConfigError: {setting}={name!r}" in last and reason in last


def test_error_of_a_hub_that_does_not_answer_says_so(hub, tmp_path):
    hub.url = "http://127.0.0.1:9"
    error = run_python(hub, tmp_path / "home", "-c", FETCH, "model.path", "hf:org/tiny")
    assert "http://127.0.0.1:9 does not answer, and " in error.splitlines()[-1]


@pytest.mark.job
def test_dry_run_takes_a_model_by_name_without_its_weights(hub, task, tmp_path):
    output = run_python(
        hub, tmp_path / "home", "-m", "mcore_rl.cli.main", "rl", "--dry-run",
        "model.path=hf:org/tiny", f"data.train_file=file://{task}/train.parquet",
        f"data.test_file={task}/test.parquet", f"output_dir={tmp_path / 'out'}", *SETTINGS,
    )  # fmt: skip
    assert "not checked: weights" in output and "20 prompts to train" in output, output
    assert "tokenizer.json" in hub.downloads and "model.safetensors" not in hub.downloads


def test_settings_get_local_copies_of_models_and_data(store, task, cache):
    config = RLConfig(
        model=ModelConfig(path=f"{store}/model"),
        data=DataConfig(
            train_files=[f"{store}/train.parquet", str(task / "test.parquet")],
            test_files={"more": f"{store}/test.parquet"},
        ),
        models={"judge": {"path": f"{store}/model", "num_servers": 2}},
    )
    config.teacher.models = {"math": {"model_path": f"{store}/model/"}}
    config.agent.settings = {"url": "memory://bucket/task/model"}  # of the user's own: left alone
    fsspec.filesystem("memory").pipe("/bucket/task/earlier/adapter_config.json", b"{}")
    config.models["user"] = {"adapter": f"{store}/earlier"}
    local = fetch_inputs(config)
    model = Path(local.model.path)
    assert Path(local.models["user"]["adapter"], "adapter_config.json").read_text() == "{}"
    assert local.models["judge"] == {"path": str(model), "num_servers": 2}
    assert Path(local.teacher.models["math"]["model_path"]).name == "model"
    assert local.agent == config.agent
    assert model.is_relative_to(cache / "memory" / "bucket" / "task") and model.name == "model"
    assert (model / "model.safetensors").read_bytes() == (
        task / "model" / "model.safetensors"
    ).read_bytes()
    assert not (model / "pytorch_model.bin").exists() and not (model / "modeling_tiny.py").exists()
    train, test = local.data.train_files
    assert Path(train).name == "train.parquet" and test == str(task / "test.parquet")
    rows = [row.values for row in open_rows(train, "data.train_files")]
    assert rows == [row.values for row in open_rows(task / "train.parquet", "data.train_files")]
    assert Path(local.data.test_files["more"]).read_bytes() == (task / "test.parquet").read_bytes()
    assert fetch_inputs(replace(config)) == local


@pytest.mark.parametrize("path", ["hf:org/model", "ms:org/model", "s3://bucket/model"])
def test_models_that_would_be_fetched_are_not_local(path):
    check_is_local(RLConfig(model=ModelConfig(path="models/a")))
    with pytest.raises(ConfigError, match=r"model\.path=.*; allowed: a local path"):
        check_is_local(RLConfig(model=ModelConfig(path=path)))


def test_settings_without_names_and_urls_are_the_same_object(task):
    config = EvalConfig(
        model=ModelConfig(path="hf"), data=SetsConfig(sets={"a": "own.py:rows", "b": "b.parquet"})
    )
    assert fetch_inputs(config) is config


@pytest.mark.parametrize("name", ["DeepSeek-V3", "deepseek-ai/DeepSeek-V3"])
def test_published_name_is_its_config_without_weights(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path(fetch_model("model.path", name, with_weights=False))
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert read_config(folder)["hidden_size"] == 7168
    notice = f"model.path={name}: config.json of deepseek-ai/DeepSeek-V3, from this package\n"
    assert capsys.readouterr().err == notice
    with pytest.raises(ConfigError, match=r"no weights of .*; allowed: .*, or hf:deepseek-ai/D"):
        fetch_model("model.path", name)
    (tmp_path / name).mkdir(parents=True)  # a folder of the user's goes first
    assert fetch_model("model.path", name) == fetch_model("model.path", name, with_weights=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen3-30B", "'Qwen3-30B' does not exist; did you mean Qwen3-8B or Qwen3-30B-A3B"),
        ("Qwen/Qwen3-9B", "does not exist; did you mean Qwen/Qwen3-8B"),
        ("mine", "does not exist; published: .*, DeepSeek-V3, .*"),
    ],
)
def test_unknown_name_without_weights_lists_published_ones(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        fetch_model("model.path", name, with_weights=False)
    assert fetch_model("model.path", name) == name  # what reads it refuses it


def test_folder_of_datasets_is_copied_whole(cache):
    saved = Path(__file__).parents[1] / "data" / "saved_by_datasets" / "seven"
    config = EvalConfig(data=SetsConfig(sets={"seven": f"file://{saved}"}))
    local = fetch_inputs(config).data.sets["seven"]
    assert Path(local).is_relative_to(cache)
    assert len(open_rows(local, "data.sets.seven")) == len(open_rows(saved, "data.sets.seven")) == 7


def test_copy_is_made_again_only_after_the_store_has_changed(store, cache, capsys):
    memory, name = fsspec.filesystem("memory"), f"{store}/rows.jsonl"
    config = EvalConfig(data=SetsConfig(sets={"rows": name}))
    memory.pipe("/bucket/task/rows.jsonl", b'{"a": 1}\n')
    first = fetch_inputs(config).data.sets["rows"]
    assert fetch_inputs(config).data.sets["rows"] == first
    assert capsys.readouterr().err.count(f"fetching {name}\n") == 1
    memory.pipe("/bucket/task/rows.jsonl", b'{"a": 22}\n')
    second = fetch_inputs(config).data.sets["rows"]
    assert Path(first).read_text() == '{"a": 1}\n'  # of a run that goes on
    assert Path(second).read_text() == '{"a": 22}\n'


def test_interrupted_copy_goes_on_with_what_is_missing(store, cache, monkeypatch):
    memory = fsspec.filesystem("memory")
    get_file, copied = type(memory).get_file, []

    def stop_at_weights(self, remote, local, **options):
        if remote.endswith(".safetensors") and copied.count(remote) == 0:
            copied.append(remote)
            raise OSError("the line is dead")
        copied.append(remote)
        return get_file(self, remote, local, **options)

    monkeypatch.setattr(type(memory), "get_file", stop_at_weights)
    with pytest.raises(ConfigError, match=r"model\.path='memory://.*the line is dead"):
        fetch_model("model.path", f"{store}/model")
    folder = Path(fetch_model("model.path", f"{store}/model"))
    assert (folder / "model.safetensors").is_file()
    assert copied.count("/bucket/task/model/config.json") == 1
    assert not list(cache.rglob("*.partial"))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://bucket/model", "needs a package that is missing: Install s3fs"),
        ("gs://bucket/model", "needs a package that is missing: Please install gcsfs"),
        ("nowhere://bucket/model", "cannot be opened: ValueError: Protocol not known: nowhere"),
        ("memory://bucket/absent", "does not exist"),
        ("memory://bucket/task/model/config.json", "is a file; allowed: the folder of a"),
        ("memory://bucket/task/model/original", "has no file of: "),
    ],
)
def test_url_that_cannot_be_fetched_is_one_error(store, cache, url, reason):
    with pytest.raises(ConfigError) as error:
        fetch_inputs(RLConfig(model=ModelConfig(path=url)))
    assert str(error.value).startswith(f"model.path={url!r}") and reason in str(error.value)


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_export_is_the_checkpoint_with_its_config_last(task, tmp_path, monkeypatch, protocol):
    url, names = f"{protocol}://{tmp_path}/deep/export", []
    store = fsspec.filesystem(protocol)
    put_file = type(store).put_file

    def record_name(self, local, remote, **options):
        names.append(remote.removeprefix(f"{tmp_path}/deep/export/"))
        put_file(self, local, remote, **options)

    monkeypatch.setattr(type(store), "put_file", record_name)
    check_export(url)
    export_checkpoint(task / "model", url)
    written = [path for path in (task / "model").rglob("*") if path.is_file()]
    assert sorted(names) == sorted(str(path.relative_to(task / "model")) for path in written)
    assert names[-1] == "config.json" and "original/consolidated.safetensors" in names
    for path, name in zip(sorted(written), sorted(names), strict=True):
        assert store.cat_file(f"{tmp_path}/deep/export/{name}") == path.read_bytes()
    with pytest.raises(ConfigError, match=r"export_to='.*' has a config\.json; allowed: a folder"):
        check_export(url)


def test_failed_export_has_no_config_and_can_be_repeated(task, store, monkeypatch):
    memory, url = fsspec.filesystem("memory"), "memory://bucket/export"
    put_file = type(memory).put_file

    def fail_at_tokenizer(self, local, remote, **options):
        if remote.endswith("tokenizer.json"):
            raise OSError("no room")
        put_file(self, local, remote, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", fail_at_tokenizer)
        with pytest.raises(RunFailed, match=f"no room; the weights are in {task / 'model'}"):
            export_checkpoint(task / "model", url)
    assert not memory.exists("/bucket/export/config.json")
    check_export(url)
    export_checkpoint(task / "model", url)
    assert memory.exists("/bucket/export/config.json")


def test_export_without_its_package_is_refused_before_the_run(tmp_path, capsys, task):
    chat = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}))
    words = (f"model.path={task / 'model'}", f"data.train_file={tmp_path / 'chats.jsonl'}")
    url = "checkpoint.export_to=s3://bucket/run"
    assert run_command("sft", ["--dry-run", *words, url, f"output_dir={tmp_path / 'o'}"]) == 2
    error = capsys.readouterr().err
    assert "checkpoint.export_to='s3://bucket/run' needs a package that is missing" in error
    assert run_command("sft", ["--dry-run", *words, "checkpoint.export_to=/local/run"]) == 2
    assert "checkpoint.export_to='/local/run'; allowed: a URL" in capsys.readouterr().err


def test_missing_folder_like_a_hub_name_has_a_hint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("outputs").mkdir()

    def get_error(path: str) -> str:
        with pytest.raises(ConfigError) as error:
            check_model_exists("model.path", path)
        return str(error.value)

    assert get_error("Qwen/Qwen3-0.6B").endswith("; did you mean hf:Qwen/Qwen3-0.6B?")
    for path in ("outputs/run", "/Qwen/Qwen3-0.6B", "a/b/c", "Qwen3", "./Qwen3"):
        assert get_error(path).endswith("does not exist")
    assert "HF_HOME" in get_error("/home/.cache/hub/models--org--tiny/snapshots/1")


@pytest.mark.parametrize(
    "words",
    [
        ("rl", "--dry-run", "model.path=Org/tiny", "data.train_file=a", "data.test_file=b"),
        ("sft", "--dry-run", "model.path=Org/tiny", "data.train_file=a"),
        ("eval", "--dry-run", "model.path=Org/tiny", "data.sets.a=a"),
        ("convert", "inspect", "Org/tiny"),
        ("chat", "Org/tiny"),
    ],
)
def test_commands_give_the_hint(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command(words[0], [*words[1:]]) == 2
    assert "did you mean hf:Org/tiny?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("convert", "inspect", "{0}"),
        ("convert", "verify", "{0}", "{1}"),
        ("plan", "reshard", "--model", "{0}", "--train", "tp=2", "--generate", "tp=1"),
    ],
)
def test_commands_take_a_model_at_a_url(words, store, task, cache, capsys):
    words = [word.format(f"{store}/model", task / "model") for word in words]
    assert run_command(words[0], words[1:]) == 0, capsys.readouterr().err
    has_weights = any(cache.rglob("model.safetensors"))
    assert has_weights == (words[0] == "convert")  # a plan reads config.json alone


@pytest.mark.parametrize("key", ["output_dir", "resume"])
def test_url_in_place_of_a_local_folder_is_refused(key, capsys):
    words = ["model.path=x", "data.train_file=a", f"{key}=s3://bucket/run"]
    assert run_command("rl", words) == 2
    assert f"{key}='s3://bucket/run' is a URL; allowed: a local folder" in capsys.readouterr().err
