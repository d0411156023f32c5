"""Bad input on the command line: one clear line, exit status 2, nothing started, nothing left."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from safetensors.torch import load_file, save_file

from mcore_rl.cli.main import main
from mcore_rl.config.schema import ModelConfig, RLConfig
from mcore_rl.examples.tasks import last_digit
from mcore_rl.jobs.convert.plan import format_bytes
from mcore_rl.jobs.disk_space import compute_weight_bytes
from mcore_rl.jobs.output import lock_run_dir
from tests.small_disk import build_small_disk_command

DEFAULTS = {
    "model.path": "model",
    "data.train_file": "train.parquet",
    "data.test_file": "test.parquet",
    "data.max_prompt_tokens": "64",
    "rollout.max_response_tokens": "32",
    "output_dir": "out",
}
WARM_START = {"warm_start.num_steps": "1", "warm_start.train_file": "warm_start.parquet"}
NORM = "model.norm.weight"


@dataclass(frozen=True)
class Place:
    """A folder with good inputs, to spoil."""

    folder: Path

    def tensors(self, change: Callable[[dict], None]) -> None:
        file = self.folder / "model" / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    def model_config(self, **fields: object) -> None:
        file = self.folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    def table(self, name: str, change: Callable) -> None:
        file = self.folder / name
        pq.write_table(change(pq.read_table(file)), file)

    def cut(self, name: str, num_bytes: int) -> None:
        file = self.folder / name
        os.truncate(file, file.stat().st_size - num_bytes)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "task"
    last_digit.prepare(folder, seed=0, worked_share=0.35)
    for file in folder.glob("*.parquet"):  # a few rows are as bad as many
        pq.write_table(pq.read_table(file).slice(0, 20), file)
    return folder


@pytest.fixture
def place(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    shutil.copytree(good, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return Place(tmp_path / "here")


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def refusal(
    place: Place,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
) -> str:
    """Return the line that the command prints, after checking that it is all that happened."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", started)
    arguments = [f"{key}={value}" for key, value in settings.items()]
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "rl", *arguments])
    before, children = tree(place.folder), set(psutil.Process().children(recursive=True))
    capfd.readouterr()
    status = main()
    printed = capfd.readouterr()
    assert status == 2, printed.err
    begun = "starting", "checking the inputs"
    assert all(line.startswith(begun) for line in printed.out.splitlines()), printed.out
    assert printed.err.startswith("mcore-rl rl: ")
    assert printed.err.count("\n") == 1 and printed.err.endswith("\n"), printed.err
    assert tree(place.folder) == before
    assert set(psutil.Process().children(recursive=True)) <= children
    return printed.err


BAD_SETTINGS = {
    "unknown key": (
        {"trainer.num_stepps": "3"},
        ["'trainer.num_stepps'", "did you mean trainer.num_steps?"],
    ),
    "group as a key": ({"actor.layout": "3"}, ["actor.layout", "actor.layout.tp"]),
    "added key": ({"+trainer.extra": "3"}, ["+trainer.extra=3", "key=value"]),
    "words for a number": ({"trainer.num_steps": "many"}, ["trainer.num_steps", "'many'"]),
    "unknown recipe": (
        {"recipe": "quickstrat"},
        ["recipe='quickstrat'", "did you mean quickstart"],
    ),
    "no data": ({"data.train_file": ""}, ["data.train_file=''"]),
    "task and own data": ({"task.name": "last_digit"}, ["model.path='model'", "allowed: ''"]),
    "world size": (
        {"actor.layout.ep": "2"},
        ["actor.layout: etp * ep * pp = 1 * 2 * 1 = 2", "world size", "= 1"],
    ),
    "key/value heads": ({"actor.layout.tp": "4"}, ["actor.layout.tp=4", "2 key/value heads"]),
    "heads": ({"actor.layout.tp": "3"}, ["actor.layout.tp=3", "4 attention heads"]),
    "experts": (
        {"actor.layout.dp": "3", "actor.layout.ep": "3", "trainer.prompts_per_step": "48"},
        ["actor.layout.ep=3", "8 experts"],
    ),
    "batch": ({"actor.layout.dp": "3"}, ["actor.layout.dp=3", "512 samples"]),
    "mini-batches": (
        {"algorithm.num_mini_batches": "7"},
        ["algorithm.num_mini_batches=7", "trainer.prompts_per_step=64"],
    ),
    "heads of a server": (
        {"rollout.tp": "3", "weight_sync.method": "full_export"},
        ["rollout.tp=3", "4 attention heads"],
    ),
    "more workers of servers than training ranks": (
        {"rollout.tp": "4"},
        ["rollout.num_servers * rollout.dp * rollout.tp = 4", "weight_sync.method='disaggregated'"],
    ),
    "transport": (
        {"weight_sync.transport": "carrier_pigeon"},
        ["weight_sync.transport='carrier_pigeon'", "'process_group', 'nixl'"],
    ),
    "transport of another method": (
        {"weight_sync.transport": "nixl"},
        ["weight_sync.transport='nixl'", "weight_sync.method='disaggregated'"],
    ),
    "layout of the warm start": (
        WARM_START | {"warm_start.layout.tp": "4"},
        ["warm_start.layout.tp=4", "2 key/value heads"],
    ),
    "batch of the warm start": (
        WARM_START | {"warm_start.layout.dp": "2", "warm_start.batch_size": "9"},
        ["warm_start.layout.dp=2", "warm_start.batch_size=9"],
    ),
    "reward": ({"reward.name": "kindness"}, ["reward.name='kindness'", "final_number"]),
    "advantage": ({"algorithm.advantage": "luck"}, ["algorithm.advantage='luck'", "grpo"]),
    "loss": ({"algorithm.loss": "ppo"}, ["algorithm.loss='ppo'", "ppo_clip", "module:function"]),
    "loss that is not there": (
        {"algorithm.loss": "nowhere.py:mine"},
        ["algorithm.loss='nowhere.py:mine'", "cannot be imported", "nowhere.py"],
    ),
    "setting of a loss": (
        {"algorithm.loss_settings.clip_ratio_low": "1.5"},
        ["algorithm.loss_settings.clip_ratio_low=1.5", "allowed: 0 to 1"],
    ),
    "setting of another loss": (
        {"algorithm.loss_settings.clip": "0.1"},
        ["algorithm.loss_settings.clip is no setting of", "'ppo_clip'", "clip_ratio_low"],
    ),
    "advantage of environments": (
        {"algorithm.advantage": "gigpo"},
        ["algorithm.advantage='gigpo' asks for state_ids, which this run does not have"],
    ),
    "aggregation": (
        {"algorithm.loss_aggregation": "sum_of_squares"},
        ["algorithm.loss_aggregation='sum_of_squares'", "token_mean"],
    ),
    "kl": ({"algorithm.kl_estimator": "k9"}, ["algorithm.kl_estimator='k9'", "k3"]),
    "model folder": ({"model.path": "nowhere"}, ["model.path='nowhere' does not exist"]),
    "train file": ({"data.train_file": "no.parquet"}, ["data.train_file='no.parquet'", "parquet"]),
    "test file": ({"data.test_file": "no.parquet"}, ["data.test_file='no.parquet'", "parquet"]),
    "warm-start file": (
        WARM_START | {"warm_start.train_file": "no.parquet"},
        ["warm_start.train_file='no.parquet'", "parquet"],
    ),
    "not a parquet": (
        {"data.train_file": "model/config.json"},
        ["data.train_file='model/config.json'", "parquet"],
    ),
    "answer column": (
        {"data.answer_column": "truth"},
        ["'train.parquet'", "'truth' (data.answer_column)", "it has: messages, answer"],
    ),
    "response column": (
        WARM_START | {"warm_start.response_column": "reply"},
        ["'warm_start.parquet'", "'reply' (warm_start.response_column)", "messages, response"],
    ),
    "long prompt": (
        {"data.max_prompt_tokens": "20"},
        ["data.train_file='train.parquet'", "row", "tokens", "data.max_prompt_tokens=20"],
    ),
    "longer than the model's positions": (
        {"rollout.max_response_tokens": "449"},
        ["data.max_prompt_tokens=64", "rollout.max_response_tokens=449", "513", "512 positions"],
    ),
    "less cache than one sequence takes": (
        {"rollout.kv_cache_bytes": "20000"},
        ["rollout.kv_cache_bytes=20000", "96 tokens takes 147456 bytes", "allowed: at least"],
    ),
    "more prompts in a step than rows": (
        {"trainer.prompts_per_step": "24"},
        ["trainer.prompts_per_step=24", "data.train_file='train.parquet' has 20 rows"],
    ),
    "no training": (
        WARM_START | {"trainer.num_steps": "0"},
        ["trainer.num_steps=0", "allowed: at least 1"],
    ),
    "recipe of the user's own": (
        {"recipe": "model/config.json"},
        ["model/config.json: unknown setting 'architectures'"],
    ),
    "output folder in use": ({"output_dir": "model"}, ["output_dir='model'", "allowed: a new"]),
    "output folder is a file": (
        {"output_dir": "train.parquet"},
        ["output_dir='train.parquet'", "allowed: a new"],
    ),
}


@pytest.mark.parametrize(("settings", "words"), BAD_SETTINGS.values(), ids=list(BAD_SETTINGS))
def test_a_bad_setting_is_named_with_its_value_and_what_is_allowed(
    place, capfd, monkeypatch, settings, words
):
    line = refusal(place, capfd, monkeypatch, DEFAULTS | settings)
    assert [word for word in words if word not in line] == [], line


def smaller_vocabulary(place: Place) -> None:
    place.model_config(vocab_size=256)

    def cut(tensors: dict) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:256].contiguous()

    place.tensors(cut)


BAD_FILES: dict[str, tuple[Callable[[Place], object], list[str]]] = {
    "no weights": (
        lambda place: (place.folder / "model" / "model.safetensors").unlink(),
        ["model.path='model'", "*.safetensors"],
    ),
    "architecture": (
        lambda place: place.model_config(architectures=["GemmaForCausalLM"]),
        ["architectures=['GemmaForCausalLM']", "Qwen3MoeForCausalLM"],
    ),
    "no JSON": (
        lambda place: (place.folder / "model" / "config.json").write_text("{'vocab_size': 3}"),
        ["model/config.json", "JSON"],
    ),
    "missing tensor": (
        lambda place: place.tensors(lambda tensors: tensors.pop(NORM)),
        ["checkpoint model lacks", NORM],
    ),
    "extra tensor": (
        lambda place: place.tensors(lambda t: t.update({"model.extra.weight": t[NORM].clone()})),
        ["checkpoint model has unexpected", "model.extra.weight"],
    ),
    "misshapen tensor": (
        lambda place: place.tensors(lambda t: t.update({NORM: t[NORM][:100].contiguous()})),
        ["checkpoint model", NORM, "(100,)", "(128,)"],
    ),
    "truncated weights": (
        lambda place: place.cut("model/model.safetensors", 1000),
        ["model/model.safetensors", "safetensors"],
    ),
    "index without its shard": (
        lambda place: (place.folder / "model" / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {NORM: "model-00001-of-00002.safetensors"}})
        ),
        ["model.safetensors.index.json", "model-00001-of-00002.safetensors"],
    ),
    "another tokenizer": (smaller_vocabulary, ["token ids up to", "vocab_size=256"]),
    "no tokenizer": (
        lambda place: [f.unlink() for f in (place.folder / "model").glob("tokenizer*")],
        ["model.path='model'", "tokenizer"],
    ),
    "no prompt column": (
        lambda place: place.table("test.parquet", lambda table: table.drop_columns(["messages"])),
        ["data.test_file='test.parquet'", "'messages' (data.prompt_column)", "it has: answer"],
    ),
    "no answer column": (
        lambda place: place.table("train.parquet", lambda table: table.drop_columns(["answer"])),
        ["data.train_file='train.parquet'", "'answer' (data.answer_column)", "it has: messages"],
    ),
    "a row without an answer": (
        lambda place: place.table(
            "train.parquet",
            lambda table: table.set_column(
                1, "answer", pa.array([*table["answer"].to_pylist()[:-1], None])
            ),
        ),
        ["data.train_file='train.parquet'", "row 19 has no answer", "data.answer_column"],
    ),
    "no rows": (
        lambda place: place.table("train.parquet", lambda table: table.slice(0, 0)),
        ["data.train_file='train.parquet'", "no rows"],
    ),
    "truncated data": (
        lambda place: place.cut("train.parquet", 10),
        ["data.train_file='train.parquet'", "parquet"],
    ),
}


@pytest.mark.parametrize(("spoil", "words"), BAD_FILES.values(), ids=list(BAD_FILES))
def test_a_bad_file_is_named_with_what_is_wrong_and_what_is_allowed(
    place, capfd, monkeypatch, spoil, words
):
    spoil(place)
    line = refusal(place, capfd, monkeypatch, DEFAULTS)
    assert [word for word in words if word not in line] == [], line


def test_an_empty_output_folder_stays_and_folders_made_on_the_way_go(place, capfd, monkeypatch):
    (place.folder / "runs").mkdir()
    bad = DEFAULTS | {"data.max_prompt_tokens": "20"}
    for output_dir in ("runs", "runs/a/b"):
        refusal(place, capfd, monkeypatch, bad | {"output_dir": output_dir})


def test_a_folder_that_another_run_has_is_refused(place, capfd, monkeypatch):
    with lock_run_dir("out") as run_lock:
        line = refusal(place, capfd, monkeypatch, DEFAULTS)
        assert run_lock.folder.exists()
    assert f"output_dir='out' is in use by process {os.getpid()} on host " in line


def test_a_cluster_that_does_not_answer_is_refused_and_leaves_no_folder(place, capfd, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    line = refusal(place, capfd, monkeypatch, DEFAULTS | {"trainer.prompts_per_step": "4"})
    assert "RAY_ADDRESS is '127.0.0.1:1', where no Ray cluster answers" in line


def test_the_weights_of_a_run_take_as_much_room_as_those_it_starts_from(place):
    tensors = load_file(place.folder / "model" / "model.safetensors").values()
    config = RLConfig(model=ModelConfig(path="model", dtype="float32"))
    assert compute_weight_bytes(config) == sum(t.numel() * t.element_size() for t in tensors)


def test_a_disk_without_room_for_the_weights_is_refused(place: Place):
    """Once for the warm start, and once for what comes after it."""
    disk = place.folder / "disk"
    disk.mkdir()
    command = Path(sys.executable).with_name("mcore-rl")
    settings = DEFAULTS | WARM_START | {"output_dir": "disk/out", "trainer.prompts_per_step": "4"}
    settings |= {"warm_start.batch_size": "4"}
    job = [command, "rl", *(f"{key}={value}" for key, value in settings.items())]
    done = subprocess.run(
        build_small_disk_command(disk, "10m", job), capture_output=True, text=True
    )
    needed = 2 * compute_weight_bytes(RLConfig(model=ModelConfig(path="model", dtype="float32")))
    assert needed > 10 << 20
    assert done.returncode == 2, done.stderr
    assert "output_dir='disk/out' has 10.5 MB left; needed are " in done.stderr
    assert f"needed are {format_bytes(needed)} (" in done.stderr
    assert "the checkpoint" in done.stderr and "the warm start's" in done.stderr


def test_the_command_itself_refuses_what_does_not_fit_its_own_task(tmp_path: Path):
    # As a user runs it: libraries print nothing either, and the task it made is gone again.
    command = Path(sys.executable).with_name("mcore-rl")
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [command, "rl", "recipe=quickstart", "data.max_prompt_tokens=30", "output_dir=runs/new"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    assert (lines[0], lines[2:]) == ("starting ...", ["checking the inputs ..."])
    assert done.stderr.startswith("mcore-rl rl: data.train_file='runs/new/task/train.parquet'")
    assert done.stderr.endswith("allowed: up to data.max_prompt_tokens=30\n")
    assert done.stderr.count("\n") == 1
    assert tree(tmp_path) == {"tmp"}
