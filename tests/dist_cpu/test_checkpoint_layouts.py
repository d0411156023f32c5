"""Training state from any layout into any other: the same bits, and the same steps afterwards.

A checkpoint keeps every parameter, and each of Adam's moments, whole. So what one layout has saved
and another has loaded and saved again is compared tensor by tensor, by a reader that knows no
layout.
"""

from __future__ import annotations

import json
import random
import resource
import tarfile
import time
import zlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import meta_model_jobs
import numpy as np
import optimizer_jobs as jobs
import pytest
import ranks
import tiny_models
import torch
import torch.distributed as dist
import transformers

from mcore_rl.checkpoint import files
from mcore_rl.checkpoint.files import check_checkpoint, read_checkpoint_info
from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from mcore_rl.reshard.rules import Box
from tests.nightly import all_but

LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "vpp2": Layout(pp=2, vpp=2),
    "cp2": Layout(cp=2),
    "dp2": Layout(dp=2),
    "ep2": Layout(dp=2, ep=2),
    "etp2": Layout(tp=2, etp=2),
    "tp2ep2": Layout(tp=2, ep=2),
    "tp2cp2": Layout(tp=2, cp=2),
    "tp2pp2ep2": Layout(tp=2, pp=2, ep=2),
    "vpp2dp2": Layout(pp=2, vpp=2, dp=2),
    "etp2dp2ep2": Layout(tp=2, dp=2, ep=2, etp=2),
}
# (optimizer.distributed, from, to)
PAIRS = [
    *((False, *pair.split(">")) for pair in (
        "tp1>tp2", "tp2>tp1", "tp2>pp2", "pp2>vpp2", "vpp2>cp2", "cp2>etp2", "etp2>ep2",
        "ep2>tp2ep2", "tp2ep2>tp2cp2", "tp2cp2>tp2pp2ep2", "tp2pp2ep2>vpp2dp2", "vpp2dp2>tp1",
        "etp2dp2ep2>dp2", "dp2>etp2dp2ep2", "etp2dp2ep2>vpp2",
    )),
    *((True, *pair.split(">")) for pair in (
        "dp2>tp1", "tp1>dp2", "dp2>cp2", "cp2>ep2", "ep2>tp2", "ep2>pp2", "pp2>etp2",
        "etp2>tp2ep2", "tp2ep2>vpp2dp2", "vpp2dp2>tp2cp2", "tp2cp2>etp2dp2ep2",
        "etp2dp2ep2>tp2pp2ep2", "tp2pp2ep2>ep2", "vpp2>dp2", "vpp2dp2>vpp2",
    )),
]  # fmt: skip
CASES = all_but(
    [(False, "pp2", "vpp2"), (False, "ep2", "tp2ep2"), (True, "dp2", "cp2"), (True, "ep2", "pp2"),
     (True, "pp2", "etp2")],
    PAIRS,
)  # fmt: skip
# (dtype, optimizer.distributed of the layout that saves, from, to)
CROSSED = [
    ("float32", False, "tp2ep2", "dp2"), ("float32", True, "ep2", "vpp2"),
    ("bfloat16", False, "etp2", "ep2"), ("bfloat16", True, "vpp2dp2", "tp2"),
    ("float32", False, "pp2", "tp1"), ("float32", True, "dp2", "tp1"),
]  # fmt: skip
CROSSED_CASES = all_but([CROSSED[1], CROSSED[3]], CROSSED)
SHARDED, REPLICATED = "optimizer.state.param.", "optimizer.state.fp32_param."
VOCAB = 131  # rows behind it are padding, as many as the layout needs


@ranks.spawn_on_ranks()
def saved(
    path: Path, layout: Layout, batch: Batch, to: Path, distributed: bool, dtype: str = "float32"
) -> ranks.Result:
    """Two steps, a checkpoint, two steps more."""
    engine = jobs.engine_of(path, layout, dtype, distributed=distributed)
    share = jobs.take_share(engine, batch)
    before = random_states()
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    engine.save_checkpoint(to)
    steps += [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    return {"steps": steps, "has_drawn": random_states() != before}


def random_states() -> list[Any]:
    """Return the states of a rank's generators: Python's, numpy's, torch's and Megatron's."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracked = get_cuda_rng_tracker().get_states()
    return [
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        {name: torch.as_tensor(state).tolist() for name, state in tracked.items()},
    ]


def test_training_draws_no_random_numbers(folder, model, batch):
    """So a checkpoint has no random states."""
    written = saved(model, LAYOUTS["ep2"], batch, folder / "ep2-True", True)
    assert [result["has_drawn"] for result in written] == [False, False]


@ranks.spawn_on_ranks()
def loaded(
    path: Path,
    layout: Layout,
    batch: Batch,
    source: Path,
    to: Path,
    distributed: bool,
    dtype: str = "float32",
) -> ranks.Result:
    """The state of `source`, saved again; two steps, and two of what was saved again."""
    engine = jobs.engine_of(path, layout, dtype, distributed=distributed)
    share = jobs.take_share(engine, batch)
    engine.train_batch(share, ranks.LOSS)  # is forgotten
    actual: dict[str, Any] = {"steps": [], "trained": []}
    for checkpoint in (source, to):
        engine.load_checkpoint(checkpoint)
        if checkpoint == source:
            engine.save_checkpoint(to)
        actual["steps"].append([engine.train_batch(share, ranks.LOSS) for _ in range(2)])
        actual["trained"].append(dict(engine.get_per_tensor_param()))
    return actual


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """Four layers, the first of them dense, and tied embeddings."""
    return jobs.save_model(folder)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return tiny_models.make_batch()


@pytest.mark.parametrize(("distributed", "source", "target"), CASES)
def test_the_state_is_the_same_in_another_layout_and_so_are_the_steps_after_it(
    folder, model, batch, distributed, source, target
):
    first = folder / f"{source}-{distributed}"
    written = saved(model, LAYOUTS[source], batch, first, distributed)
    again = folder / f"{source}-{target}-{distributed}"
    actual = loaded(model, LAYOUTS[target], batch, first, again, distributed)

    assert_same_state(first, again)
    assert_same_steps(steps_of(written)[2:], actual, loss=1e-6, grad_norm=1e-4)


@pytest.mark.parametrize(("dtype", "distributed", "source", "target"), CROSSED_CASES)
def test_a_sharded_optimizer_goes_on_from_a_replicated_one_and_the_other_way_round(
    folder, model, batch, dtype, distributed, source, target
):
    first = folder / f"{source}-{distributed}-{dtype}"
    written = saved(model, LAYOUTS[source], batch, first, distributed, dtype)
    again = folder / f"{source}-{target}-{not distributed}-{dtype}"
    actual = loaded(model, LAYOUTS[target], batch, first, again, not distributed, dtype)
    assert_same_state(first, again)
    loss, grad_norm = (1e-6, 1e-4) if dtype == "float32" else (0.02, 0.05)
    assert_same_steps(steps_of(written)[2:], actual, loss, grad_norm)


def assert_same_steps(
    expected: Sequence[Any], actual: Sequence[Any], loss: float, grad_norm: float
) -> None:
    for result in actual:
        first, second = result["steps"]
        assert first == second
        for name, tensor in result["trained"][0].items():
            assert torch.equal(tensor, result["trained"][1][name]), name
    for step, reference in zip(steps_of(actual, 0), expected, strict=True):
        assert step["loss"] == pytest.approx(reference["loss"], rel=loss)
        assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=grad_norm)
        assert step["lr"] == reference["lr"]


# Checkpoints of megatron-core 0.16.1, in an archive: of a tiny model of a dense layer and one with
# experts, written by this project after two steps with a sharded optimizer (float32, dp=2, ep=2)
# and a replicated one (bfloat16, tp=2); and of a model of two layers with experts, written by
# Megatron itself (meta_model_jobs.megatron_saves), with stacked layers and with separate ones. Also
# in it: configs of the models, CRC32 of the weights, and the two steps that followed.
OLDER = Path(__file__).with_name("checkpoints_0_16_1.tar.xz")
OLDER_VOCAB = 21
DTYPES = {"sharded": "float32", "replicated": "bfloat16"}
OLDER_CASES = [
    ("sharded", True, "pp2"), ("sharded", True, "tp2"), ("sharded", False, "cp2"),
    ("sharded", False, "tp2ep2"), ("replicated", False, "ep2"), ("replicated", False, "tp2pp2ep2"),
    ("replicated", True, "dp2"), ("replicated", True, "tp2"),
]  # fmt: skip


@pytest.fixture(scope="module")
def older(folder: Path) -> Path:
    """The archive, and models of the configs with other weights."""
    path = folder / "older"
    with tarfile.open(OLDER) as archive:
        archive.extractall(path, filter="data")
    for name in ("mixed", "moe"):
        config = transformers.Qwen3MoeConfig.from_json_file(path / f"{name}.json")
        tiny_models.build_from(config, seed=5).save_pretrained(path / name)
    return path


def read_expected(older: Path, name: str) -> dict[str, Any]:
    """CRC32 of the weights by name, and the steps that followed."""
    expected: dict[str, Any] = json.loads((older / "expected.json").read_text())[name]
    return expected


def assert_weights(results: Sequence[Any], expected: dict[str, int]) -> None:
    actual = {
        name: zlib.crc32(files.view_bytes(tensor.contiguous()))
        for result in results
        for name, tensor in result["weights"].items()
    }
    assert actual == expected


@ranks.spawn_on_ranks()
def weights_loaded(
    path: Path, layout: Layout, source: Path, distributed: bool, dtype: str
) -> ranks.Result:
    engine = jobs.engine_of(path, layout, dtype, distributed=distributed)
    engine.load_checkpoint(source)
    return {"weights": dict(engine.get_per_tensor_param())}


@pytest.mark.parametrize(("source", "distributed", "target"), OLDER_CASES)
def test_a_checkpoint_of_megatron_0_16_1_goes_on_in_another_layout(
    folder, older, batch, source, distributed, target
):
    path, dtype, expected = older / source, DTYPES[source], read_expected(older, source)
    check_checkpoint(path)
    model, again = older / "mixed", folder / f"{source}-{distributed}-{target}-again"
    vocab_ids = {
        name: batch.jagged(name).with_values(batch.jagged(name).values % OLDER_VOCAB)
        for name in ("prompt_ids", "response_ids")
    }
    small_batch = batch.with_columns(**vocab_ids)
    actual = loaded(model, LAYOUTS[target], small_batch, path, again, distributed, dtype)
    assert_same_state(path, again, OLDER_VOCAB)
    loss, grad_norm = (1e-6, 1e-4) if dtype == "float32" else (0.02, 0.05)
    assert_same_steps(expected["steps"], actual, loss, grad_norm)
    results = weights_loaded(model, LAYOUTS[target], path, distributed, dtype)
    assert_weights(results, expected["weights"])
    assert read_checkpoint_info(again)["megatron_core"] == metadata.version("megatron-core")


@ranks.spawn_on_ranks()
def weights_of_megatron(path: Path, layout: Layout, source: Path) -> ranks.Result:
    return meta_model_jobs.load(path, layout, source)


@pytest.mark.parametrize("target", ["tp1", "tp2", "pp2", "ep2", "etp2"])
@pytest.mark.parametrize("form", ["stacked", "apart"])
def test_weights_that_megatron_0_16_1_saved_are_loaded(older, form, target):
    results = weights_of_megatron(older / "moe", LAYOUTS[target], older / form)
    assert all(result["is_finite"] for result in results)
    assert_weights(results, read_expected(older, form)["weights"])


@ranks.spawn_on_ranks()
def refused_by_the_disk(
    path: Path, layout: Layout, batch: Batch, to: Path, rank: int, when: str
) -> ranks.Result:
    """A save whose files on one rank may not grow, from its start on or when the data are written.

    Then what is left of it, a save without that, and the same bits as those that were saved.
    """
    engine = jobs.engine_of(path, layout, distributed=True)
    share = jobs.take_share(engine, batch)
    engine.train_batch(share, ranks.LOSS)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = ""
    try:
        if when == "start" and engine.world_rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        saving = engine.begin_save(to)
        while not saving.is_written:
            time.sleep(0.01)
        dist.barrier()
        if when == "end" and engine.world_rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        saving.finish()
    except OSError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    left = [entry.name for entry in to.parent.iterdir()]
    dist.barrier()
    before = dict(engine.get_per_tensor_param())
    saving = engine.begin_save(to)
    engine.train_batch(share, ranks.LOSS)  # what was copied does not change with it
    saving.finish()
    engine.load_checkpoint(to)
    after = dict(engine.get_per_tensor_param())
    same = all(torch.equal(before[name], after[name]) for name in before)
    return {"message": message, "left": left, "same": same}


@pytest.mark.parametrize(("rank", "when"), [(1, "start"), (0, "start"), (0, "end")])
def test_a_disk_that_refuses_one_rank_fails_all_and_the_next_save_is_complete(
    folder, model, batch, rank, when
):
    to = folder / f"refused-{rank}-{when}" / "checkpoint"
    actual = refused_by_the_disk(model, LAYOUTS["tp2"], batch, to, rank, when)
    assert len({result["message"] for result in actual}) == 1
    message = actual[0]["message"]
    assert message.startswith(f"{to} cannot be written: ") and "File too large" in message
    for result in actual:
        assert (result["left"], result["same"]) == ([], True)
    check_checkpoint(to)


def steps_of(results: Sequence[Any], index: int | None = None) -> list[dict[str, float]]:
    """Return the steps of a rank of the last pipeline stage, which knows the loss."""
    steps = [r["steps"] if index is None else r["steps"][index] for r in results]
    return next(of_rank for of_rank in steps if "loss" in of_rank[0])


def assert_same_state(left: Path, right: Path, vocab_size: int = VOCAB) -> None:
    """Float32 weights have another name in a sharded optimizer, or are the model's."""
    states = [state_in(path, vocab_size) for path in (left, right)]
    assert states[0].keys() == states[1].keys()
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]), key
        assert tensor.count_nonzero() or "norm" in key, key
    counts = [DistReader(path).load_common()["optimizer_steps"] for path in (left, right)]
    assert counts == [2, 2]


def state_in(path: Path, vocab_size: int) -> dict[str, torch.Tensor]:
    reader, actual = DistReader(path), {}
    for key, tensor in reader.tensors.items():
        actual[key] = reader.read(key, make_full_box(key, tensor.shape, vocab_size))
    for sharded in [key for key in actual if key.startswith(SHARDED)]:
        tensor, name = actual.pop(sharded), sharded.removeprefix(SHARDED)
        if actual[name].dtype == torch.float32:
            assert torch.equal(tensor, actual[name]), name
        else:
            actual[REPLICATED + name] = tensor
    kinds = {key.split("decoder.")[0] for key in actual}
    assert {"optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", ""} <= kinds
    return actual


def make_full_box(key: str, shape: tuple[int, ...], vocab_size: int) -> Box:
    is_padded = "word_embeddings" in key or "output_layer" in key
    rows = vocab_size if is_padded else shape[0]
    return Box((0,) * len(shape), (rows, *shape[1:]))
