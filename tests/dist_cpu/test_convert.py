"""Conversions of every family, and between the command and real engines."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import lora_jobs
import pytest
import ranks
import tiny_families
import tiny_models
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.torch_dist import DistFile, DistReader
from mcore_rl.checkpoint.torch_dist_metadata import write_metadata
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.engine.megatron.conversion import switch_layer_stacking
from mcore_rl.jobs.convert import to_hf, to_megatron
from mcore_rl.jobs.convert.megatron_checkpoint import open_megatron_checkpoint
from mcore_rl.jobs.convert.plan import Resources
from mcore_rl.jobs.convert.verify import compare_folders
from mcore_rl.reshard.rules import LogicalTensor, slice_rows

ONE_WORKER, SINGLE = Resources(workers=1), Layout()
UNEVEN = Layout(pp=2, first_stage_layers=1)
INTERLEAVED = Layout(tp=2, pp=2, vpp=2, first_stage_layers=0)
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FAMILIES = tiny_families.cases()
VARIANTS = (
    "deepseek_v3-mtp", "glm4_moe-mtp", "qwen3_next-mtp", "qwen3_5_moe-mtp", "qwen3_5_moe-stacked"
)  # fmt: skip


def to_mcore(model: Path, output: Path, layout: Layout = SINGLE, dtype: str | None = None) -> Path:
    to_megatron.convert(model, output, layout, dtype, ONE_WORKER)
    return output


def back(
    checkpoint: Path,
    output: Path,
    dtype: str | None = None,
    lora: str = "merge",
    reference: Path | None = None,
    shard_bytes: int = 100_000,
) -> Path:
    to_hf.convert(checkpoint, output, reference, dtype, shard_bytes, lora, ONE_WORKER)
    return output


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """By safetensors itself."""
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def assert_same_bytes(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each family; every second one in bfloat16, with the selection bias left in float32."""
    folder = tmp_path_factory.mktemp("convert")
    paths = {}
    for number, (name, case) in enumerate(FAMILIES.items()):
        paths[name] = tiny_families.save(tiny_models.build_from(case.config), folder / name)
        if number % 2:
            cast_to_bfloat16(paths[name])
    stacked = tiny_models.build_from(FAMILIES["qwen3_5_moe"].config)
    paths["qwen3_5_moe-stacked"] = tiny_families.save_stacked(stacked, folder / "stacked")
    for name in ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe"):
        paths[f"{name}-mtp"] = tiny_families.save_with_mtp(name, folder)
    return paths


def cast_to_bfloat16(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = {
        n: t if n.endswith("correction_bias") else t.bfloat16() for n, t in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))


@pytest.mark.parametrize("which", ["its own", "uneven", "interleaved"])
@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_a_family_comes_back_byte_for_byte(models, tmp_path, name, which):
    family_layout = FAMILIES[name.partition("-")[0]].layout
    layout = {"its own": family_layout, "uneven": UNEVEN, "interleaved": INTERLEAVED}[which]
    checkpoint = to_mcore(models[name], tmp_path / "checkpoint", layout)
    again = back(checkpoint, tmp_path / "again")
    assert_same_bytes(tensors_in(again), tensors_in(models[name]))
    files = ("config.json", "generation_config.json")
    for file in files:
        assert json.loads((again / file).read_text()) == json.loads(
            (models[name] / file).read_text()
        )


def test_ranks_of_the_layout_find_their_shards_as_chunks(models, tmp_path):
    """And the vocabulary is padded for them."""
    model = models["qwen3_moe"]
    reader = DistReader(to_mcore(model, tmp_path / "c", Layout(tp=2, etp=2)))
    embedding = reader.tensors["embedding.word_embeddings.weight"]
    assert embedding.shape == (tiny_models.VOCAB + 1, 64)
    assert [chunk.offsets for chunk in embedding.chunks] == [(0, 0), (66, 0)]
    fc2 = next(t for key, t in reader.tensors.items() if key.endswith("experts.linear_fc2.weight"))
    assert {chunk.sizes[-2:] for chunk in fc2.chunks} == {(64, 20)}


@pytest.mark.parametrize("name", ["deepseek_v3-mtp", "mixtral", "qwen3_next-mtp"])
def test_float8_is_written_read_and_written_as_the_same_bytes(models, tmp_path, name):
    first = back(to_mcore(models[name], tmp_path / "a"), tmp_path / "b", "fp8")
    assert torch.float8_e4m3fn in {t.dtype for t in tensors_in(first).values()}
    checkpoint = to_mcore(first, tmp_path / "c", FAMILIES[name.removesuffix("-mtp")].layout)
    assert_same_bytes(tensors_in(back(checkpoint, tmp_path / "d", "fp8")), tensors_in(first))
    plain = back(checkpoint, tmp_path / "e")
    reader = CheckpointReader(first)
    expected = {
        n: reader.read(slice_rows(LogicalTensor(n, s), 0, s[0], 0))
        for n, s in reader.get_shapes().items()
    }
    assert_same_bytes(tensors_in(plain), expected)
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())


def test_float16_is_read_in_a_requested_dtype_and_comes_back(models, tmp_path):
    model = tiny_models.save("qwen3", tmp_path)
    tensors = {n: t.half() for n, t in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"are in float16, .* --dtype with float32 or bfloat16"):
        to_mcore(model, tmp_path / "refused")
    checkpoint = to_mcore(model, tmp_path / "c", dtype="float32")
    assert_same_bytes(tensors_in(back(checkpoint, tmp_path / "again")), tensors)


def test_a_checkpoint_without_prediction_layers_takes_them_from_the_reference_or_says_0(
    models, tmp_path, capsys
):
    full = models["deepseek_v3-mtp"]
    plain = tmp_path / "plain"
    plain.mkdir()
    expected = {n: t for n, t in tensors_in(full).items() if not n.startswith("model.layers.3.")}
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text((full / "config.json").read_text())
    checkpoint = to_mcore(plain, tmp_path / "c")
    with_reference = back(checkpoint, tmp_path / "with", reference=full)
    assert f"they come from {full}" in capsys.readouterr().out
    assert_same_bytes(tensors_in(with_reference), tensors_in(full))
    without = back(checkpoint, tmp_path / "without")
    assert "config.json will say 0" in capsys.readouterr().out
    assert_same_bytes(tensors_in(without), expected)
    assert json.loads((without / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_a_checkpoint_of_megatron_lm_is_read_with_layers_stacked_or_apart(models, tmp_path, name):
    """The other form than ours, with optimizer state, in a folder of several iterations."""
    model, written = models[name], to_mcore(models[name], tmp_path / "ours", Layout(tp=2))
    folder = open_megatron_checkpoint(written, None)
    iteration, reader = tmp_path / "theirs" / "iter_0000007", DistReader(written)
    iteration.mkdir(parents=True)
    (iteration.parent / "latest_checkpointed_iteration.txt").write_text("7\n")
    with DistFile(iteration / "__0_0.distcp") as file:
        for parameter in folder.parameters:
            [stored] = parameter.location.locate(parameter.box)
            tensor = reader.read(stored.key, stored.box)
            place = switch_layer_stacking(parameter.location, 3) or parameter.location
            [piece] = place.locate(parameter.box)
            values = tensor.view(piece.box.sizes)
            file.add_tensor(piece.key, piece.shape, piece.box.offsets, values)
        for key in ("optimizer.state.exp_avg.x", "chained_1.optimizer.state.exp_avg.x"):
            file.add_tensor(key, (3,), (0,), torch.zeros(3))
    write_metadata(iteration, file.records)
    with pytest.raises(ConfigError, match=r"does not say which model it is of; .* --reference"):
        back(iteration.parent, tmp_path / "refused")
    again = back(iteration.parent, tmp_path / "again", reference=model)
    assert_same_bytes(tensors_in(again), tensors_in(model))


LOADED = {  # written for one layout, read at another
    "qwen3_moe": (Layout(tp=2, ep=2), Layout(pp=2, first_stage_layers=1)),
    "deepseek_v3-mtp": (UNEVEN, Layout(tp=2, ep=2)),
    "qwen3": (Layout(pp=2), Layout(tp=2)),
}
SAVED = {"float32": UNEVEN, "bfloat16": Layout(tp=2, ep=2)}
ADAPTED = {
    "qwen3": Layout(tp=2),
    "qwen3_moe": Layout(tp=2, etp=2),
    "deepseek_v3": Layout(tp=2, ep=2),
}


@ranks.spawn_on_ranks()
def loaded(model: Path, checkpoint: Path, layout: Layout) -> ranks.Result:
    """Export from an engine that has read a checkpoint over other weights."""
    engine = ranks.start_engine(replace(ranks.build_engine_spec(model, layout), total_steps=0))
    engine.load_checkpoint(checkpoint)
    return dict(engine.get_per_tensor_param())


@ranks.spawn_on_ranks()
def trained(model: Path, checkpoint: Path, layout: Layout, dtype: str) -> ranks.Result:
    """Export from an engine after a step; it saves a checkpoint with optimizer state there."""
    engine = ranks.start_engine(ranks.build_engine_spec(model, layout, dtype))
    engine.train_batch(
        tiny_models.make_batch().take(ranks.list_rows(engine, tiny_models.make_batch())), ranks.LOSS
    )
    engine.save_checkpoint(checkpoint)
    return dict(engine.get_per_tensor_param())


@ranks.spawn_on_ranks()
def adapted(model: Path, checkpoint: Path, layout: Layout, dtype: str) -> ranks.Result:
    """Export, merged, from an engine with adapters, which has saved a checkpoint."""
    spec = replace(lora_jobs.lora_spec(model, layout, dtype), total_steps=0)
    engine = ranks.start_engine(spec)
    lora_jobs.set_factors(engine)
    engine.save_checkpoint(checkpoint)
    return dict(engine.get_per_tensor_param())


@dataclass(frozen=True)
class Runs:
    """Checkpoints that engines have written, and what these engines export."""

    models: dict[str, Path]
    folder: Path

    def trained(self, dtype: str) -> tuple[Path, ranks.Result]:
        to = self.folder / dtype
        return to, trained(self.models["qwen3_moe"], to, SAVED[dtype], dtype)[0]

    def adapted(self, name: str, dtype: str) -> tuple[Path, ranks.Result]:
        to = self.folder / f"{name}-{dtype}"
        return to, adapted(self.base(name), to, ADAPTED[name], dtype)[0]

    def base(self, name: str) -> Path:
        """Return the model that adapters are for."""
        model = self.folder / name
        if not model.exists():
            lora_jobs.build(name).save_pretrained(model)
        return model


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(models, tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("name", LOADED)
def test_an_engine_of_another_layout_reads_what_was_converted(models, tmp_path, name):
    written, read = LOADED[name]
    source = models[name] if name != "qwen3" else tiny_models.save(name, tmp_path, seed=0)
    expected, other = tensors_in(source), tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((source / "config.json").read_text())
    noise = {n: torch.rand(t.shape).to(t.dtype) for n, t in expected.items()}
    save_file(noise, other / "model.safetensors", metadata={"format": "pt"})
    checkpoint = to_mcore(source, tmp_path / "checkpoint", written, dtype="float32")
    exported = loaded(other, checkpoint, read)[0]
    # Prediction layers are in no engine that does not train them: see engine.md.
    held = {n: t.float() for n, t in expected.items() if not n.startswith("model.layers.3.")}
    assert_same_bytes({n: exported[n] for n in held}, held)


@pytest.mark.parametrize("dtype", SAVED)
def test_a_checkpoint_of_a_run_converts_to_what_the_engine_exports(runs, tmp_path, dtype):
    checkpoint, exported = runs.trained(dtype)
    again = back(checkpoint, tmp_path / "hf", reference=runs.models["qwen3_moe"])
    assert_same_bytes(tensors_in(again), exported)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ADAPTED)
def test_merged_adapters_are_what_the_engine_exports(runs, tmp_path, name, dtype):
    checkpoint, exported = runs.adapted(name, dtype)
    merged = back(checkpoint, tmp_path / "hf", reference=runs.base(name))
    assert_same_bytes(tensors_in(merged), exported)


@pytest.mark.parametrize("name", ADAPTED)
def test_separate_adapters_by_peft_arithmetic_are_the_merged_weights(runs, tmp_path, name):
    checkpoint, exported = runs.adapted(name, "float32")
    folder = back(checkpoint, tmp_path / "hf", lora="separate", reference=runs.base(name))
    base, factors = tensors_in(folder), load_file(folder / "adapter" / "adapter_model.safetensors")
    assert_same_bytes(base, tensors_in(runs.base(name)))
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    adapted = dict(base)
    for key in (key for key in factors if key.endswith(".lora_A.weight")):
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        product = factors[key.replace("lora_A", "lora_B")].double() @ factors[key].double()
        scale = config["lora_alpha"] / config["r"]
        adapted[f"{module}.weight"] = base[f"{module}.weight"].double() + scale * product
    assert sum(not torch.equal(base[n], t) for n, t in exported.items()) == len(factors) // 2
    for key, tensor in exported.items():
        torch.testing.assert_close(adapted[key].float(), tensor, rtol=0, atol=1e-6)


def test_verify_names_the_first_element_that_differs(models, tmp_path):
    model = models["qwen3_moe"]
    changed = {n: t.clone() for n, t in tensors_in(model).items()}
    name = "model.layers.1.self_attn.k_proj.weight"
    changed[name][3, 5] += 1
    changed[name][4, 5] -= 0.5
    other = tmp_path / "other"
    other.mkdir()
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_text((model / "config.json").read_text())
    checkpoint = to_mcore(model, tmp_path / "checkpoint", Layout(tp=2, ep=2))
    for a, b in ((checkpoint, other), (model, other)):
        comparison = compare_folders(a, b, Console(quiet=True))
        first = comparison.first_difference
        assert (comparison.equal, comparison.num_different, first.name) == (False, 1, name)
        assert (first.index, first.num_elements) == ([3, 5], 2)
        assert first.max_abs == pytest.approx(1, abs=0.01)
    assert compare_folders(checkpoint, model, Console(quiet=True)).equal
