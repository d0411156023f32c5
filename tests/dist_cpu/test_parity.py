"""The Megatron engine against transformers and against itself on one rank, at every layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import ranks
import tiny_models
import torch
from safetensors.torch import load_file

from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from tests.nightly import all_but

DENSE = {"tp1": Layout(), "tp2": Layout(tp=2), "dp2": Layout(dp=2)}
MOE = DENSE | {
    "ep2": Layout(dp=2, ep=2),
    "tp2ep2": Layout(tp=2, ep=2),
    "tp2etp2": Layout(tp=2, etp=2),
    "tp2dp2ep2etp2": Layout(tp=2, dp=2, ep=2, etp=2),
}
LAYOUTS = {"qwen3": DENSE, "qwen3_moe": MOE, "qwen3_moe_mixed": MOE}
CASES = [(model, name) for model, layouts in LAYOUTS.items() for name in layouts]
# Of the model with a dense layer before experts: one layout of experts over ranks each time.
MORE = [("qwen3_moe_mixed", name) for name in MOE if name not in ("tp1", "tp2etp2")]
DAILY = [case for case in CASES if case not in MORE]
PARALLEL = [case for case in CASES if case[1] != "tp1"]
DAILY_PARALLEL = [case for case in DAILY if case in PARALLEL]


@dataclass(frozen=True)
class Runs:
    batch: Batch
    checkpoints: dict[str, Path]

    def parity(self, model: str, layout: str, dtype: str = "float32") -> list[ranks.Result]:
        parallel_layout = LAYOUTS[model][layout]
        return ranks.run_parity(self.checkpoints[model], parallel_layout, self.batch, dtype)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("models")
    checkpoints = {name: tiny_models.save(name, folder) for name in LAYOUTS}
    return Runs(tiny_models.make_batch(), checkpoints)


@ranks.spawn_on_ranks()
def distributed_optimizer(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """Two steps with the optimizer state sharded over data-parallel ranks."""
    spec = ranks.build_engine_spec(path, layout)
    spec.engine.optimizer.distributed = True
    engine = ranks.start_engine(spec)
    share = batch.take(ranks.list_rows(engine, batch))
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    return {"steps": steps, "trained": dict(engine.get_per_tensor_param())}


@ranks.spawn_on_ranks()
def fewer_samples_than_ranks(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """One sample on DP rank 0 and none elsewhere: two steps."""
    engine = ranks.start_engine(ranks.build_engine_spec(path, layout))
    share = batch.take([0] if engine.mesh.get_coordinate(engine.world_rank).dp_rank == 0 else [])
    engine.infer_batch(share)
    return {"steps": [engine.train_batch(share, ranks.LOSS) for _ in range(2)]}


@pytest.fixture(scope="module")
def references(runs):
    return {
        model: tiny_models.reference_scores(tiny_models.build(model), runs.batch)
        for model in LAYOUTS
    }


def split_by_sample(reference: np.ndarray, runs) -> list[torch.Tensor]:
    lengths = runs.batch.jagged("response_ids").lengths.tolist()
    return list(torch.from_numpy(reference).split(lengths))


@pytest.mark.parametrize(("model", "layout"), all_but(DAILY, CASES))
def test_logits_log_probs_and_entropy_equal_transformers(runs, references, model, layout):
    logits, log_probs, entropy = (split_by_sample(part, runs) for part in references[model])
    for result in runs.parity(model, layout):  # every rank, also inside a TP group
        rows = result["rows"]
        expected = torch.cat([logits[row] for row in rows])
        torch.testing.assert_close(result["logits"], expected, rtol=0, atol=1e-5)
        for place, row in enumerate(rows):
            for name, reference in (("log_probs", log_probs), ("entropy", entropy)):
                actual = result[name][place].double()
                torch.testing.assert_close(actual, reference[row], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("model", "layout"), all_but(DAILY, CASES))
def test_export_gives_back_each_tensor_bit_for_bit(runs, model, layout):
    original = load_file(runs.checkpoints[model] / "model.safetensors")
    first, *other_ranks = runs.parity(model, layout)
    assert first["exported"].keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(first["exported"][name], tensor), name
    assert all(result["exported"] == {} for result in other_ranks)


@pytest.mark.parametrize(("model", "layout"), all_but(DAILY_PARALLEL, PARALLEL))
def test_two_training_steps_equal_one_rank(runs, model, layout):
    single = runs.parity(model, "tp1")[0]
    for result in runs.parity(model, layout):
        for step, expected in zip(result["steps"], single["steps"], strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            assert step["approx_kl"] == pytest.approx(expected["approx_kl"], rel=1e-4)
            assert step["lr"] == expected["lr"]
    trained = runs.parity(model, layout)[0]["trained"]
    for name, tensor in single["trained"].items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=2e-4, msg=name)


def test_the_steps_do_train(runs):
    """Guards the test above: two steps at this rate move weights far beyond its tolerance."""
    result = runs.parity("qwen3_moe", "tp1")[0]
    for name, tensor in result["exported"].items():
        assert (result["trained"][name] - tensor).abs().max() > 5e-4, name
    assert [step["lr"] for step in result["steps"]] == [5e-4, 1e-3]


def test_the_loss_equals_a_plain_torch_step_on_transformers(runs):
    """Loss and gradient norm of the first step against autograd through the transformers model."""
    model = tiny_models.build("qwen3_moe")
    loss, grad_norm = tiny_models.reference_step(model, runs.batch)
    step = runs.parity("qwen3_moe", "tp1")[0]["steps"][0]
    assert step["loss"] == pytest.approx(loss, rel=1e-5)
    assert step["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)


@pytest.mark.parametrize("layout", ["tp1", "tp2ep2"])
def test_bfloat16_stays_close_to_float32(runs, references, layout):
    """Log-probs on average within 0.02 nats, the first step within 2%, the weights in bfloat16."""
    result = runs.parity("qwen3_moe", layout, "bfloat16")[0]
    expected = torch.from_numpy(references["qwen3_moe"][1])
    assert (torch.cat(result["log_probs"]) - expected).abs().mean() < 0.02
    actual, exact = result["steps"][0], runs.parity("qwen3_moe", "tp1")[0]["steps"][0]
    assert actual["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert actual["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.02)
    assert {tensor.dtype for tensor in result["trained"].values()} == {torch.bfloat16}


@pytest.mark.parametrize("layout", ["dp2", "ep2"])
def test_a_distributed_optimizer_takes_the_same_steps(runs, layout):
    single = runs.parity("qwen3_moe", "tp1")[0]
    by_rank = distributed_optimizer(runs.checkpoints["qwen3_moe"], MOE[layout], runs.batch)
    for result in by_rank:
        for step, expected in zip(result["steps"], single["steps"], strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    trained = by_rank[0]["trained"]
    for name, tensor in single["trained"].items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=2e-4, msg=name)


def test_a_data_parallel_rank_without_samples_joins_the_step(runs):
    tp1, ep2 = (
        fewer_samples_than_ranks(runs.checkpoints["qwen3_moe"], MOE[name], runs.batch)
        for name in ("tp1", "ep2")
    )
    single = tp1[0]["steps"]
    for result in ep2:
        for step, expected in zip(result["steps"], single, strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_two_steps_after_a_resume_equal_those_without_a_stop(runs, tmp_path):
    path = runs.checkpoints["qwen3_moe"]
    for result in ranks.resume(path, MOE["tp2ep2"], runs.batch, tmp_path):
        for actual, expected in zip(result["resumed"], result["steps"][2:], strict=True):
            assert actual == expected
        for name, tensor in result["trained"].items():
            assert torch.equal(result["trained_after_resume"][name], tensor), name
