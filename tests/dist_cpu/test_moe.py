"""Experts at every layout: balance, loads, selection bias and dispatchers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import golden_models
import moe_reference
import numpy as np
import pytest
import ranks
import tiny_models
import torch
import transformers
from moe_reference import last_stages, same_steps

from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from mcore_rl.engine.megatron.engine import MegatronEngine
from tests.nightly import all_but

COEF, RATE = 0.5, 0.01
MICRO = {"moe.aux_loss_coef": COEF, "max_tokens_per_micro_batch": 96}  # some packs are padded
GLOBAL = {**MICRO, "moe.aux_loss": "global_aux_loss"}
BIAS = {"moe.bias_update_rate": RATE}
FULL = {"recompute.granularity": "full"}
ALLGATHER = {"moe.dispatcher": "allgather"}

ONE_RANK, TP2, CP2, DP2 = Layout(), Layout(tp=2), Layout(cp=2), Layout(dp=2)
VPP, TP2EP2, EP2 = Layout(pp=2, vpp=2), Layout(tp=2, ep=2), Layout(dp=2, ep=2)
TP2PP2, TP2EP4 = Layout(tp=2, pp=2), Layout(tp=2, dp=2, ep=4)

# (model, layout, settings) by name.
BALANCE = {
    "one": ("moe", ONE_RANK, MICRO),
    "one global": ("moe", ONE_RANK, GLOBAL),
    "one sigmoid full": ("deepseek", ONE_RANK, MICRO | FULL),
    "tp2": ("moe", TP2, MICRO),
    "cp2 global": ("moe", CP2, GLOBAL),
    "cp2 sigmoid": ("deepseek", CP2, MICRO),
    "dp2": ("moe", DP2, MICRO),
    "dp2 global": ("moe", DP2, GLOBAL),
    "pp2 vpp2": ("moe", VPP, MICRO),
    "tp2 pp2": ("moe", TP2PP2, MICRO),
}
TRAINING = {
    "moe/one": ("moe", ONE_RANK, {}),
    "deepseek/one": ("deepseek", ONE_RANK, BIAS),
    "deepseek/tp2": ("deepseek", TP2, BIAS),
    "deepseek/cp2 full": ("deepseek", CP2, BIAS | FULL),
    "deepseek/dp2 ep2": ("deepseek", EP2, BIAS),
    "moe/pp2 vpp2": ("moe", VPP, {}),
    "moe/tp2 ep2 allgather": ("moe", TP2EP2, ALLGATHER),
    "moe/dp2 ep2 allgather": ("moe", EP2, ALLGATHER),
    "moe/dp2 etp2 allgather": ("moe", Layout(dp=2, etp=2), ALLGATHER),
    "deepseek/tp2 pp2": ("deepseek", TP2PP2, BIAS),
    "moe/tp2 dp2 ep4 allgather": ("moe", TP2EP4, ALLGATHER),
}
FROZEN = {"one": ("deepseek", ONE_RANK, {}), "tp2 ep2": ("deepseek", TP2EP2, {})}
WITH_BIAS = [name for name, (model, *_) in TRAINING.items() if model == "deepseek"]
# Under `nightly`: more layouts of what others here have, most of them on four ranks.
BALANCE_CASES = all_but(
    ("one", "one global", "one sigmoid full", "tp2", "cp2 global", "dp2", "pp2 vpp2", "dp2 empty"),
    [*BALANCE, "dp2 empty"],
)
DAILY_TRAINING = (
    "moe/one", "deepseek/one", "deepseek/cp2 full", "deepseek/dp2 ep2", "moe/pp2 vpp2",
    "moe/tp2 ep2 allgather",
)  # fmt: skip
TRAINING_CASES = all_but(DAILY_TRAINING, TRAINING)


@ranks.spawn_on_ranks()
def training(path: Path, layout: Layout, batch: Batch, settings: ranks.Settings) -> ranks.Result:
    """Two optimizer steps, and what they did to the experts; passes between them must not count."""
    engine = ranks.start_engine_with(path, layout, settings)
    share = batch.take(ranks.list_rows(engine, batch))
    steps, loads, biases = [], [], [expert_biases(engine)]
    for _ in range(2):
        engine.infer_batch(share)
        engine.forward_backward_batch(share, ranks.LOSS, forward_only=True)
        steps.append(engine.train_batch(share, ranks.LOSS))
        loads.append(engine.expert_load)
        biases.append(expert_biases(engine))
    return {"steps": steps, "loads": loads, "biases": biases}


def expert_biases(engine: MegatronEngine) -> dict[int, torch.Tensor]:
    """By decoder layer, those of this rank's stages."""
    from mcore_rl.engine.megatron.moe import iter_routers

    return {
        layer: router.expert_bias.clone()
        for chunk in engine.chunks
        for layer, router in iter_routers(chunk)
        if router.expert_bias is not None
    }


@ranks.spawn_on_ranks()
def balance_gradients(
    path: Path, layout: Layout, batch: Batch, settings: ranks.Settings
) -> ranks.Result:
    """Gradients of the load-balancing loss alone: the weights of the policy loss are all zero."""
    engine = ranks.start_engine_with(path, layout, settings)
    return gradients_of(engine, batch, ranks.list_rows(engine, batch))


@ranks.spawn_on_ranks()
def balance_with_an_empty_rank(
    path: Path, layout: Layout, batch: Batch, settings: ranks.Settings
) -> ranks.Result:
    """The same when one data-parallel rank has all samples and the other packs of padding."""
    engine = ranks.start_engine_with(path, layout, settings)
    has_samples = engine.mesh.get_coordinate(engine.world_rank).dp_rank == 0
    return gradients_of(engine, batch, list(range(len(batch))) if has_samples else [])


def gradients_of(engine: MegatronEngine, batch: Batch, rows: list[int]) -> ranks.Result:
    from mcore_rl.engine.megatron.moe import measure_balance

    share = batch.take(rows)
    nothing = share.jagged("loss_weights")
    nothing = nothing.with_values(np.zeros_like(nothing.values))
    share = share.with_columns(loss_weights=nothing, kl_weights=nothing)
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(share, ranks.LOSS, forward_only=False)
    micros = engine._build_micro_batches(share, is_training=True)
    balance, _ = measure_balance(engine.chunks)  # collective over all ranks
    return {
        "packs": [[rows[row] for row in micro.rows] for micro in micros],
        "padding": sum(int((micro.token_indices < 0).sum()) for micro in micros),
        "metrics": balance if engine._has_head else {},
        "gradients": router_gradients(engine),
    }


def router_gradients(engine: MegatronEngine) -> dict[int, torch.Tensor]:
    """By decoder layer, [experts, hidden], those of this rank's stages."""
    from mcore_rl.engine.megatron.moe import iter_routers

    return {
        layer: router.weight.main_grad.clone()
        for chunk in engine.chunks
        for layer, router in iter_routers(chunk)
    }


@ranks.spawn_on_ranks()
def router_precision(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """A router of a bfloat16 model: types, and its logits against the product in float32."""
    spec = ranks.build_engine_spec(path, layout, "bfloat16")
    router = ranks.start_engine(spec).chunks[0].decoder.layers[1].mlp.router
    hidden = torch.randn(7, 1, router.weight.shape[1]).bfloat16()
    logits = router.gating(hidden)
    return {
        "types": [str(router.weight.dtype), str(logits.dtype)],
        "equal": torch.equal(logits, hidden.float() @ router.weight.float().t()),
    }


@dataclass(frozen=True)
class Runs:
    batch: Batch
    paths: dict[str, Path]
    models: dict[str, Any]  # transformers'

    def balance(self, name: str) -> list[ranks.Result]:
        model, layout, settings = BALANCE.get(name, ("moe", DP2, MICRO))
        run = balance_with_an_empty_rank if name == "dp2 empty" else balance_gradients
        return run(self.paths[model], layout, self.batch, settings)

    def training(self, name: str, cases: Any = TRAINING) -> list[ranks.Result]:
        model, layout, settings = cases[name]
        return training(self.paths[model], layout, self.batch, settings)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("moe")
    paths = {model: golden_models.save(model, folder) for model in ("moe", "deepseek")}
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = {model: load(path).float().eval() for model, path in paths.items()}
    return Runs(tiny_models.make_batch(), paths, models)


def one_share_each(by_rank: list[dict[str, Any]], layout: Layout) -> list[dict[str, Any]]:
    """The first rank of each data-parallel share."""
    return by_rank[:: len(by_rank) // layout.dp]


@pytest.mark.parametrize("name", BALANCE_CASES)
def test_the_gradient_of_the_balance_loss_is_that_of_its_mean_over_tokens(runs, name):
    model, layout, settings = BALANCE.get(name, ("moe", DP2, MICRO))
    by_rank = runs.balance(name)
    shares = one_share_each(by_rank, layout)
    packs = list(zip(*[share["packs"] for share in shares], strict=True))
    mean, gradients = moe_reference.balance(
        runs.models[model], runs.batch, packs, is_global="moe.aux_loss" in settings
    )
    seen = set()
    for result in by_rank:
        for layer, gradient in result["gradients"].items():
            seen.add(layer)
            expected = COEF * gradients[layer]
            assert (gradient - expected).norm() < 2e-6 * expected.norm()
    assert seen == set(gradients)
    reported = [result["metrics"]["moe/aux_loss"] for result in by_rank if result["metrics"]]
    assert reported == pytest.approx([float(mean) / len(gradients)] * len(reported), rel=1e-6)
    assert len(reported) == layout.world_size // layout.pp


def test_some_packs_of_those_tests_have_padding(runs):
    for name in ("tp2", "cp2 global", "dp2 empty"):
        assert sum(result["padding"] for result in runs.balance(name)) > 0


@pytest.mark.parametrize("name", TRAINING_CASES)
def test_loads_are_those_of_one_rank_and_of_transformers(runs, name):
    model = TRAINING[name][0]
    [one_rank] = runs.training(f"{model}/one")
    reference = moe_reference.loads(runs.models[model], runs.batch)
    for result in runs.training(name):
        assert list(result["loads"][0]) == list(reference)
        for layer, load in reference.items():
            assert torch.equal(result["loads"][0][layer], load)
            assert torch.equal(result["loads"][1][layer], one_rank["loads"][1][layer])


@pytest.mark.parametrize("name", TRAINING_CASES)
def test_loads_are_summed_up_in_metrics_of_the_last_stage(runs, name):
    by_rank = runs.training(name)
    layers = list(by_rank[0]["loads"][0])
    loads = torch.stack(list(by_rank[0]["loads"][0].values()))
    relative = loads / loads.mean(1, keepdim=True)
    for result in last_stages(by_rank, TRAINING[name][1]):
        step = result["steps"][0]
        assert step["moe/max_expert_load"] == pytest.approx(float(relative.max()), rel=1e-12)
        assert step["moe/min_expert_load"] == pytest.approx(float(relative.min()), rel=1e-12)
        assert step["moe/dead_experts"] == int((loads == 0).sum())
        for layer, load in zip(layers, relative.amax(1).tolist(), strict=True):
            assert step[f"moe/max_expert_load/layer_{layer}"] == pytest.approx(load, rel=1e-12)
        assert "moe/aux_loss" not in step


@pytest.mark.parametrize("name", TRAINING_CASES)
def test_two_steps_equal_one_rank(runs, name):
    model, layout, _ = TRAINING[name]
    same_steps(runs.training(name), runs.training(f"{model}/one")[0], layout)


@pytest.mark.parametrize(
    "name",
    all_but([name for name in DAILY_TRAINING if name in WITH_BIAS], WITH_BIAS),
)
def test_a_selection_bias_moves_against_the_load(runs, name):
    seen = set()
    for result in runs.training(name):
        for step, loads in enumerate(result["loads"]):
            before, after = result["biases"][step], result["biases"][step + 1]
            for layer in before:
                seen.add(layer)
                load = loads[layer]
                expected = before[layer] + RATE * torch.sign(load.mean() - load).float()
                assert torch.equal(after[layer], expected)
                assert not torch.equal(after[layer], before[layer])
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("name", FROZEN)
def test_a_selection_bias_stays_as_it_was_by_default(runs, name):
    for result in runs.training(name, FROZEN):
        first, _, last = result["biases"]
        assert first
        for layer in first:
            assert torch.equal(first[layer], last[layer])


def test_a_router_of_a_bfloat16_model_multiplies_in_float32(runs):
    [result] = router_precision(runs.paths["moe"], ONE_RANK, runs.batch)
    assert result["types"] == ["torch.bfloat16", "torch.float32"]
    assert result["equal"]


@ranks.spawn_on_ranks()
def odd_experts(path: Path, layout: Layout, batch: Batch, dtype: str) -> ranks.Result:
    engine = ranks.start_engine(ranks.build_engine_spec(path, layout, dtype))
    before = engine.infer_batch(batch).jagged("log_probs").values.copy()
    step = engine.train_batch(batch, ranks.LOSS)
    return {"log_probs": torch.from_numpy(before), "grad_norm": step["grad_norm"]}


@pytest.mark.parametrize(("dtype", "nats"), [("float32", 1e-5), ("bfloat16", 0.3)])
def test_experts_whose_rows_are_no_multiple_of_16_bytes_are_those_of_transformers(
    tmp_path, dtype, nats
):
    config = tiny_models.configs()["qwen3_moe"]
    config.moe_intermediate_size = 22
    model = tiny_models.build_from(config)
    model.set_experts_implementation("eager")  # transformers' default has the same limit
    model.save_pretrained(tmp_path)
    batch = tiny_models.make_batch()
    [result] = odd_experts(tmp_path, ONE_RANK, batch, dtype)
    _, expected, _ = tiny_models.reference_scores(model, batch)
    assert np.abs(result["log_probs"].numpy() - expected).max() < nats
    _, norm = tiny_models.reference_step(model, batch)
    assert result["grad_norm"] == pytest.approx(norm, rel=1e-5 if dtype == "float32" else 0.1)
