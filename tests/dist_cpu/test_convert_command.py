"""mcore-rl convert as a user meets it: bad input, and what is told of folders."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_families
import tiny_models
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from mcore_rl.checkpoint.hf import SafetensorsFile
from mcore_rl.cli.main import main
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.convert import to_hf, to_megatron
from mcore_rl.jobs.convert.plan import Resources
from mcore_rl.jobs.convert.run import run

NORM = "model.layers.1.input_layernorm.weight"
WEIGHTS = "model/model.safetensors"


class Place:
    """A folder with a tiny model and a checkpoint of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        tensors = load_file(self.folder / WEIGHTS)
        change(tensors)
        save_file(tensors, self.folder / WEIGHTS, metadata={"format": "pt"})

    def config(self, **fields: object) -> None:
        file = self.folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    def flip(self, name: str, place: int, mask: int = 1) -> None:
        data = bytearray((self.folder / name).read_bytes())
        data[place] ^= mask
        (self.folder / name).write_bytes(data)

    def cut(self, name: str, size: int) -> None:
        os.truncate(self.folder / name, size)

    def where(self, tensor: str) -> int:
        return SafetensorsFile(self.folder / WEIGHTS).entries[tensor].offset


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, by transformers; `checkpoint`; `model-again`, with our checksums."""
    folder = tmp_path_factory.mktemp("original")
    tiny_models.save("qwen3_moe", folder).rename(folder / "model")
    mtp = tiny_families.save_with_mtp("deepseek_v3", folder)
    mtp.rename(folder / "mtp")
    resources, console = Resources(workers=1), Console(quiet=True)
    run(
        to_megatron.plan_conversion(folder / "model", folder / "checkpoint", Layout(), None),
        resources,
        console,
    )
    back = to_hf.plan_conversion(
        folder / "checkpoint", folder / "model-again", None, None, 1 << 30, "merge"
    )
    run(back, resources, console)
    return folder


@pytest.fixture
def place(original: Path, tmp_path: Path) -> Place:
    shutil.copytree(original, tmp_path / "at")
    return Place(tmp_path / "at")


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


TO_MCORE = "hf-to-mcore --model model --output out --layout tp=2,ep=2 --workers 1"
TO_HF = "mcore-to-hf --checkpoint checkpoint --output out --workers 1"


def use_checksums(place: Place) -> None:
    shutil.rmtree(place.folder / "model")
    (place.folder / "model-again").rename(place.folder / "model")


def flip_with_checksums(place: Place) -> None:
    use_checksums(place)
    place.flip(WEIGHTS, place.where(NORM) + 10)


def break_copy(place: Place) -> None:
    tensors = load_file(place.folder / "mtp" / "model.safetensors")
    tensors["model.layers.3.shared_head.head.weight"][5, 7] += 1
    save_file(tensors, place.folder / "mtp" / "model.safetensors", metadata={"format": "pt"})


def index(place: Place, **weight_map: str) -> None:
    file = place.folder / "model" / "model.safetensors.index.json"
    names = dict.fromkeys(load_file(place.folder / WEIGHTS), "model.safetensors")
    file.write_text(json.dumps({"weight_map": {**names, **weight_map}}))


def shards(place: Place) -> list[str]:
    return sorted(p.name for p in (place.folder / "checkpoint").glob("*.distcp"))


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """convert(line) is the exit status of mcore-rl convert with these arguments."""

    def run_command(line: str) -> int:
        monkeypatch.setattr(sys, "argv", ["mcore-rl", "convert", *line.split()])
        return main()

    return run_command


# What is wrong, the command, and what the one line says.
BAD: dict[str, tuple[Callable[[Place], object], str, list[str]]] = {
    "truncated": (lambda place: place.cut(WEIGHTS, 5000), TO_MCORE, [WEIGHTS, "safetensors"]),
    "cut by one byte": (
        lambda place: place.cut(WEIGHTS, (place.folder / WEIGHTS).stat().st_size - 1),
        TO_MCORE,
        [WEIGHTS, "safetensors"],
    ),
    "bit flipped in the length": (lambda place: place.flip(WEIGHTS, 2), TO_MCORE, [WEIGHTS]),
    "bit flipped in the header": (
        lambda place: place.flip(
            WEIGHTS, (place.folder / WEIGHTS).read_bytes().index(b"data_offsets") + 16
        ),
        TO_MCORE,
        [WEIGHTS],
    ),
    "bit flipped in the body": (flip_with_checksums, TO_MCORE, [NORM, "checksum"]),
    "bit flipped in the body, no checksum": (
        # The highest bit of an exponent: 1.xx becomes infinite or NaN.
        lambda place: place.flip(WEIGHTS, place.where(NORM) + 7, 0x40),
        TO_MCORE,
        [NORM, "is damaged"],
    ),
    "index names a missing file": (
        lambda place: index(place, **{NORM: "model-00007-of-00009.safetensors"}),
        TO_MCORE,
        ["index.json", "model-00007-of-00009.safetensors"],
    ),
    "missing tensor": (
        lambda place: place.tensors(lambda t: t.pop(NORM)),
        TO_MCORE,
        ["lacks", NORM],
    ),
    "extra tensor": (
        lambda place: place.tensors(lambda t: t.update(extra=torch.ones(3))),
        TO_MCORE,
        ["unexpected", "extra"],
    ),
    "misshapen tensor": (
        lambda place: place.tensors(lambda t: t.update({NORM: t[NORM][:5].contiguous()})),
        TO_MCORE,
        [NORM, "(5,)", "(64,)"],
    ),
    "integers": (
        lambda place: place.tensors(lambda t: t.update({NORM: t[NORM].int()})),
        TO_MCORE,
        [NORM, "int32"],
    ),
    "copy that differs": (
        break_copy,
        TO_MCORE.replace("model model", "model mtp"),
        ["model.layers.3.shared_head.head.weight", "repeat lm_head.weight"],
    ),
    "unknown architecture": (
        lambda place: place.config(architectures=["GemmaForCausalLM"]),
        TO_MCORE,
        ["GemmaForCausalLM", "Qwen3MoeForCausalLM"],
    ),
    "no config": (
        lambda place: (place.folder / "model" / "config.json").unlink(),
        TO_MCORE,
        ["config.json"],
    ),
    "no folder": (
        lambda place: None,
        TO_MCORE.replace("model model", "model nowhere"),
        ["nowhere"],
    ),
    "tp that does not divide": (
        lambda place: None,
        TO_MCORE.replace("tp=2,ep=2", "tp=3"),
        ["tp=3", "does not divide"],
    ),
    "ep that does not fit": (
        lambda place: None,
        TO_MCORE.replace("ep=2", "ep=16"),
        ["--layout.ep=16 does not divide"],
    ),
    "pp that does not divide": (
        lambda place: None,
        TO_MCORE.replace("tp=2", "pp=2,dp=2,last_stage_layers=5"),
        ["last_stage_layers=5", "allowed"],
    ),
    "unknown axis": (lambda place: None, TO_MCORE.replace("ep=2", "zz=2"), ["'zz'", "vpp"]),
    "output that is not empty": (
        lambda place: (place.folder / "out" / "mine").mkdir(parents=True),
        TO_MCORE,
        ["out is not empty"],
    ),
    "output that is a file": (
        lambda place: (place.folder / "out").touch(),
        TO_HF,
        ["out is not empty"],
    ),
    "unknown dtype": (lambda place: None, TO_MCORE + " --dtype fp4", ["--dtype=fp4", "bfloat16"]),
    "unknown dtype out": (lambda place: None, TO_HF + " --dtype fp4", ["--dtype=fp4", "fp8"]),
    "unknown lora": (lambda place: None, TO_HF + " --lora both", ["--lora='both'", "'separate'"]),
    "no size": (lambda place: None, TO_HF + " --max-shard-size big", ["--max-shard-size='big'"]),
    "too little memory": (lambda place: None, TO_MCORE + " --max-memory 1MB", ["at least"]),
    "unknown option": (lambda place: None, TO_HF + " --fast", ["--fast", "--help"]),
    "unknown bridge": (lambda place: None, TO_MCORE + " --bridge brooklyn", ["megatron-bridge"]),
    "bridge with a layout": (
        lambda place: None,
        TO_MCORE + " --bridge megatron-bridge",
        ["--layout with --bridge"],
    ),
    "damaged metadata": (
        lambda place: place.cut("checkpoint/.metadata", 500),
        TO_HF,
        ["checkpoint/.metadata", "damaged"],
    ),
    "cut checkpoint": (
        lambda place: place.cut(f"checkpoint/{shards(place)[-1]}", 1000),
        TO_HF,
        ["truncated"],
    ),
    "missing file of a checkpoint": (
        lambda place: (place.folder / "checkpoint" / shards(place)[0]).unlink(),
        TO_HF,
        ["has no file __0_0.distcp"],
    ),
    "bit flipped in a checkpoint": (
        lambda place: place.flip(f"checkpoint/{shards(place)[0]}", 30_000),
        TO_HF,
        ["__0_0.distcp", "damaged"],
    ),
    "checkpoint of an unknown model": (
        lambda place: shutil.rmtree(place.folder / "checkpoint" / "hf"),
        TO_HF,
        ["does not say which model", "--reference"],
    ),
    "reference of another model": (
        lambda place: None,
        TO_HF + " --reference mtp",
        ["checkpoint"],
    ),
    "neither kind": (
        lambda place: (place.folder / "empty").mkdir(),
        TO_HF.replace("checkpoint checkpoint", "checkpoint empty"),
        ["empty"],
    ),
}


@pytest.mark.parametrize(("spoil", "command", "words"), BAD.values(), ids=list(BAD))
def test_bad_input_is_one_clear_line_and_nothing_is_written(
    place, capsys, monkeypatch, convert, spoil, command, words
):
    spoil(place)
    monkeypatch.chdir(place.folder)
    before = tree(place.folder)
    status = convert(command)
    [line] = capsys.readouterr().err.splitlines()
    assert (status, line.startswith("mcore-rl convert: ")) == (2, True)
    assert [word for word in words if word not in line] == [], line
    assert len(line) < 600
    assert tree(place.folder) == before


@pytest.mark.parametrize("which", ["header", "body"])
def test_bits_flipped_anywhere_are_refused_or_without_consequence(
    place, monkeypatch, convert, which
):
    """In a file with our checksums. Of the header, spaces and our own notes say nothing."""
    use_checksums(place)
    monkeypatch.chdir(place.folder)
    data = (place.folder / WEIGHTS).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    places = {"header": range(0, start), "body": range(start, len(data))}[which]
    rng = random.Random(4)
    expected = (place.folder / "checkpoint" / "__0_0.distcp").read_bytes()
    refused = 0
    for _ in range(12):
        place.flip(WEIGHTS, rng.choice(places), 1 << rng.randrange(8))
        status = convert("hf-to-mcore --model model --output out")
        if status == 0:
            assert (place.folder / "out" / "__0_0.distcp").read_bytes() == expected
            shutil.rmtree(place.folder / "out")
        else:
            refused += 1
            assert status == 2
        assert not [path for path in place.folder.iterdir() if "out" in path.name]
        (place.folder / WEIGHTS).write_bytes(data)
    assert refused >= (12 if which == "body" else 6)


@pytest.mark.parametrize("kind", ["model", "checkpoint"])
def test_inspect_tells_what_is_there(original, capsys, convert, kind):
    assert convert(f"inspect {original / kind} --json") == 0
    report = json.loads(capsys.readouterr().out)
    tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
    expected = load_file(original / WEIGHTS)
    if kind == "model":
        assert report["num_tensors"] == len(expected)
        assert report["num_bytes"] == sum(t.nbytes for t in expected.values())
        assert report["facts"]["architectures"] == ["Qwen3MoeForCausalLM"]
        assert tensors[NORM]["shape"] == [64]
    else:
        assert report["num_elements"] == sum(t.numel() for t in expected.values())
        assert (report["facts"]["optimizer"], report["facts"]["dtype"]) == (False, "float32")
        assert tensors["embedding.word_embeddings.weight"]["shape"] == [tiny_models.VOCAB, 64]
    assert convert(f"inspect {original / kind}") == 0
    table = capsys.readouterr().out
    assert f"{report['num_tensors']} tensors" in table


@pytest.mark.parametrize("change", ["none", "value", "missing"])
def test_verify_has_an_exit_status_and_one_object(place, capsys, monkeypatch, convert, change):
    monkeypatch.chdir(place.folder)
    if change == "value":
        place.tensors(lambda t: t[NORM].mul_(-1))
    if change == "missing":
        place.tensors(lambda t: t.pop(NORM))
    status = convert("verify checkpoint model --json")
    report = json.loads(capsys.readouterr().out)
    assert (status, report["equal"]) == ((0, True) if change == "none" else (1, False))
    if change == "value":
        assert report["first_difference"]["name"] == NORM
    if change == "missing":
        assert report["only_in_a"] == [NORM]
    assert convert("verify checkpoint model") == status
    assert (
        capsys.readouterr()
        .out.strip()
        .splitlines()[-1]
        .startswith("equal: " if change == "none" else "DIFFERENT: ")
    )


@pytest.mark.parametrize("lora", ["merge", "separate"])
def test_separate_adapters_of_a_checkpoint_without_any_are_warned_of(original, lora):
    checkpoint = original / "checkpoint"
    plan = to_hf.plan_conversion(checkpoint, original / "out", None, None, 1 << 30, lora)
    warning = f"warning: {checkpoint} has no adapters: --lora=separate writes none"
    assert plan.notes == ((warning,) if lora == "separate" else ())


def made_of_run(place: Place, **state: object) -> None:
    """The checkpoint as that of step 12 of a run."""
    step = place.folder / "run" / "checkpoints" / "step_000012"
    step.mkdir(parents=True)
    shutil.copytree(place.folder / "checkpoint", step / "actor")
    shutil.rmtree(step / "actor" / "hf")
    (step / "manifest.json").write_text("{}")
    (step / "state.json").write_text(json.dumps({"step": 12, **state}))


STEP = "run/checkpoints/step_000012"
BEGAN_WITH = {
    "model": {"model": {"path": "model"}},
    "warm_start": {"model": {"path": ""}, "warm_start": {"num_steps": 3}},
    "task/model": {"model": {"path": ""}, "task": {"name": "last_digit"}},
}


@pytest.mark.parametrize("checkpoint", ["run", STEP, f"{STEP}/actor"])
@pytest.mark.parametrize("began_with", ["model", "warm_start", "task/model"])
def test_a_checkpoint_of_a_run_is_of_the_model_that_the_run_began_with(
    place, convert, monkeypatch, checkpoint, began_with
):
    monkeypatch.chdir(place.folder)
    made_of_run(place, settings=BEGAN_WITH[began_with])
    if began_with != "model":
        shutil.move("model", f"run/{began_with}")
    assert convert(f"mcore-to-hf --checkpoint {checkpoint} --output out --workers 1") == 0
    written, given = (load_file(f"{name}/model.safetensors") for name in ("out", "model-again"))
    assert all(torch.equal(written[name], given[name]) for name in given)
    assert json.loads(Path("out/config.json").read_text())["model_type"] == "qwen3_moe"


def test_a_model_of_a_run_that_is_gone_is_named(place, convert, monkeypatch, capsys):
    monkeypatch.chdir(place.folder)
    made_of_run(place, settings={"model": {"path": "gone"}})
    assert convert("mcore-to-hf --checkpoint run --output out --workers 1") == 2
    message = capsys.readouterr().err
    expected = "does not say which model it is of: there is no gone; name a Hugging Face fold"
    assert expected in message
