"""Router replay at every layout: recorded experts come back, and others are taken as given."""

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
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.megatron.engine import MegatronEngine
from tests.nightly import all_but

EXPERTS = {"recompute.granularity": "selective", "recompute.modules": ["moe"]}
FULL = {"recompute.granularity": "full"}
NUM_MOE_LAYERS = {"moe": 4, "deepseek": 3}  # of golden_models's models

ONE_RANK, PP2, CP2, VPP = Layout(), Layout(pp=2), Layout(cp=2), Layout(pp=2, vpp=2)
TP2EP2, TP2CP2, TP2PP2 = Layout(tp=2, ep=2), Layout(tp=2, cp=2), Layout(tp=2, pp=2)
TP2EP4 = Layout(tp=2, dp=2, ep=4)

# (model, layout, settings) by name.
REPLAY = {
    "moe/one": ("moe", ONE_RANK, {}),
    "moe/one full": ("moe", ONE_RANK, FULL),
    "moe/one experts": ("moe", ONE_RANK, EXPERTS),
    "deepseek/one": ("deepseek", ONE_RANK, {}),
    "moe/pp2 vpp2 full": ("moe", VPP, FULL),
    "moe/cp2": ("moe", CP2, {}),
    "deepseek/tp2 ep2": ("deepseek", TP2EP2, {}),
    "deepseek/pp2": ("deepseek", PP2, {}),
    "deepseek/tp2 cp2 full": ("deepseek", TP2CP2, FULL),
    "moe/tp2 pp2": ("moe", TP2PP2, {}),
    "moe/tp2 dp2 ep4": ("moe", TP2EP4, {}),
}
# Under `nightly`: more layouts, most of them on four ranks.
REPLAY_CASES = all_but(
    ("moe/one", "moe/one full", "moe/one experts", "deepseek/one", "moe/pp2 vpp2 full", "moe/cp2",
     "deepseek/tp2 ep2", "deepseek/pp2", "moe/tp2 dp2 ep4"),
    REPLAY,
)  # fmt: skip


@ranks.spawn_on_ranks()
def replay_recorded(
    path: Path, layout: Layout, batch: Batch, settings: ranks.Settings
) -> ranks.Result:
    """A log-prob pass that records, two steps that replay it, a log-prob pass on the same ids."""
    engine = ranks.start_engine_with(path, layout, {**settings, "moe.router_replay": "record"})
    rows = ranks.list_rows(engine, batch)
    share = batch.take(rows)
    scored = engine.infer_batch(share)
    share = share.with_columns(routed_experts=shared_over_stages(engine, scored))
    engine.spec.engine.moe.router_replay = "rollout"
    again = engine.infer_batch(share)
    engine.spec.engine.moe.router_replay = "record"
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    result: ranks.Result = {"steps": steps, "held": held_by_slots(engine)}
    if scored is None or again is None:
        return result
    result |= {n: index_by_row(rows, scored.jagged(n)) for n in ("log_probs", "routed_experts")}
    micros = engine._build_micro_batches(share, is_training=False)
    result["padding"] = sum(int((micro.token_indices < 0).sum()) for micro in micros)
    return result | {"replayed_log_probs": index_by_row(rows, again.jagged("log_probs"))}


@ranks.spawn_on_ranks()
def replay_forced(
    path: Path, layout: Layout, batch: Batch, settings: ranks.Settings
) -> ranks.Result:
    """Log-probs and two steps with the experts of this rank's layers that the batch brings along.

    Then log-probs with those that routers choose, as if nothing had been recorded.
    """
    engine = ranks.start_engine_with(path, layout, {**settings, "moe.router_replay": "rollout"})
    rows = ranks.list_rows(engine, batch)
    share = select_local_layers(engine, batch.take(rows))
    free = engine.infer_batch(share.select("prompt_ids", "response_ids"), replay=False)
    scored = engine.infer_batch(share)
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    result: ranks.Result = {"steps": steps, "held": held_by_slots(engine)}
    if scored is None or free is None:
        return result
    assert "routed_experts" not in free
    result |= {"free_log_probs": index_by_row(rows, free.jagged("log_probs"))}
    return result | {"log_probs": index_by_row(rows, scored.jagged("log_probs"))}


@ranks.spawn_on_ranks()
def two_steps(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """Take two steps without replay."""
    engine = ranks.start_engine(ranks.build_engine_spec(path, layout))
    share = batch.take(ranks.list_rows(engine, batch))
    return {"steps": [engine.train_batch(share, ranks.LOSS) for _ in range(2)]}


@ranks.spawn_on_ranks()
def replay_errors(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """Return the errors of routers that do not follow the replay; and see the engine recover."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    engine = ranks.start_engine_with(path, layout, {"moe.router_replay": "rollout"})
    bare = batch.select("prompt_ids", "response_ids")
    messages = {"missing": message_of(engine.infer_batch, bare)}
    before = engine.infer_batch(batch)
    assert before is not None
    router = engine.chunks[0].decoder.layers[2].mlp.router
    routing = router.routing

    def deaf(logits: torch.Tensor, padding_mask: torch.Tensor) -> Any:
        return topk_routing_with_score_function(logits.view(-1, logits.shape[-1]), router.topk)

    def twice(logits: torch.Tensor, padding_mask: torch.Tensor) -> Any:
        routing(logits, padding_mask)
        return routing(logits, padding_mask)

    for name, wrong in (("deaf", deaf), ("twice", twice)):
        router.routing = wrong
        messages[name] = message_of(engine.infer_batch, batch)
    router.routing = routing
    after = engine.infer_batch(batch)
    assert after is not None
    same = np.array_equal(before.jagged("log_probs").values, after.jagged("log_probs").values)
    return {"messages": messages, "recovers": same, "held": held_by_slots(engine)}


def message_of(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except RuntimeError as error:
        return str(error)
    return "no error"


def shared_over_stages(engine: MegatronEngine, scored: Batch | None) -> Jagged:
    """The recorded column on every stage, as a controller would send it."""
    from megatron.core import parallel_state

    box = [None if scored is None else scored.jagged("routed_experts")]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    group = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.broadcast_object_list(box, src=last, group=group)
    assert box[0] is not None
    return box[0]


def select_local_layers(engine: MegatronEngine, batch: Batch) -> Batch:
    """Select what a worker hands over: a byte an id, of the layers of this pipeline rank alone."""
    from mcore_rl.engine.megatron.moe import list_moe_layers

    experts, layers = batch.jagged("routed_experts"), list_moe_layers(engine.chunks[0].config)
    assert engine.layout.pp == 1 or 0 < len(engine.expert_layers) < len(layers)
    places = [layers.index(layer) for layer in engine.expert_layers]
    local_experts = experts.with_values(experts.values[:, places].astype(np.uint8))
    columns = {name: column for name, column in batch.columns.items() if name != "routed_experts"}
    return Batch({**columns, "stage_routed_experts": local_experts})


def index_by_row(rows: list[int], column: Jagged) -> dict[int, torch.Tensor]:
    return {row: torch.from_numpy(column[place].copy()) for place, row in enumerate(rows)}


def held_by_slots(engine: MegatronEngine) -> int:
    """Tensors that the routers hold on to, and what Megatron's class-wide list holds."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    from mcore_rl.engine.megatron.moe import iter_routers

    slots = [router.router_replay for chunk in engine.chunks for _, router in iter_routers(chunk)]
    held = [
        value
        for slot in slots
        for value in (slot.target_topk_idx, slot.recorded_topk_idx, *slot.replay_backward_list)
        if value is not None
    ]
    return len(held) + len(RouterReplay.global_router_replay_instances)


@dataclass(frozen=True)
class Runs:
    batch: Batch
    forced: dict[str, Batch]  # by model: with a column of experts drawn at random
    paths: dict[str, Path]
    models: dict[str, Any]  # transformers'

    def recorded(self, name: str) -> list[ranks.Result]:
        model, layout, settings = REPLAY[name]
        return replay_recorded(self.paths[model], layout, self.batch, settings)

    def given(self, name: str) -> list[ranks.Result]:
        model, layout, settings = REPLAY[name]
        return replay_forced(self.paths[model], layout, self.forced[model], settings)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder, batch = tmp_path_factory.mktemp("replay"), tiny_models.make_batch()
    paths = {model: golden_models.save(model, folder) for model in NUM_MOE_LAYERS}
    forced = {m: with_random_experts(batch, layers) for m, layers in NUM_MOE_LAYERS.items()}
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = {model: load(path).float().eval() for model, path in paths.items()}
    return Runs(batch, forced, paths, models)


def with_random_experts(batch: Batch, num_layers: int) -> Batch:
    rng = np.random.default_rng(5)
    num_tokens = int(batch.num_tokens.sum())
    chosen = rng.permuted(np.tile(np.arange(8), (num_tokens, num_layers, 1)), axis=-1)[..., :2]
    offsets = np.concatenate([[0], np.cumsum(batch.num_tokens)])
    return batch.with_columns(routed_experts=Jagged(chosen.astype(np.int16), offsets))


@pytest.mark.parametrize("name", REPLAY_CASES)
def test_the_recorded_experts_are_those_of_transformers(runs, name):
    model, layout, _ = REPLAY[name]
    rows = rows_of(last_stages(runs.recorded(name), layout), "routed_experts")
    assert set(rows) == set(range(len(runs.batch)))
    for row, recorded in rows.items():
        with torch.no_grad():
            _, seen = moe_reference.run(runs.models[model], runs.batch, row)
        chosen = torch.stack([ids for _, ids in seen.values()], dim=1)
        assert recorded.dtype == torch.uint8
        assert torch.equal(recorded.long().sort(-1).values, chosen.sort(-1).values)


def rows_of(results: list[dict[str, Any]], name: str) -> dict[int, torch.Tensor]:
    """By row of the batch; ranks that have the same row must agree on it."""
    rows: dict[int, torch.Tensor] = {}
    for result in results:
        for row, value in result[name].items():
            assert torch.equal(rows.setdefault(row, value), value)
    return rows


@pytest.mark.parametrize("name", REPLAY_CASES)
def test_replaying_what_was_recorded_changes_no_bit_without_padding(runs, name):
    """Padding goes to other experts, whose products then have other shapes and may round otherwise.

    With context parallelism the padding may be on another rank, whose experts are used here, too.
    """
    by_rank = runs.recorded(name)
    results = last_stages(by_rank, REPLAY[name][1])
    bound = 2e-6 if any(result["padding"] for result in results) else 0.0
    assert bound == 0.0 or REPLAY[name][1].world_size > 1
    for result in results:
        for row, log_probs in result["log_probs"].items():
            assert (log_probs - result["replayed_log_probs"][row]).abs().max() <= bound


@pytest.mark.parametrize("name", REPLAY_CASES)
def test_forced_experts_give_the_log_probs_of_transformers_with_those_experts(runs, name):
    model, layout, _ = REPLAY[name]
    batch = runs.forced[model]
    actual = rows_of(last_stages(runs.given(name), layout), "log_probs")
    assert set(actual) == set(range(len(batch)))
    free = rows_of(runs.recorded(f"{model}/one"), "log_probs")
    without = rows_of(last_stages(runs.given(name), layout), "free_log_probs")
    for row, log_probs in actual.items():
        experts = batch.jagged("routed_experts")[row]
        with torch.no_grad():
            expected, _ = moe_reference.run(runs.models[model], batch, row, experts)
        assert (log_probs - expected).abs().max() < 1e-5
        assert (log_probs - free[row]).abs().max() > 1e-3
        assert (without[row] - free[row]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["recorded", "forced"])
@pytest.mark.parametrize("name", REPLAY_CASES)
def test_steps_with_replay_equal_one_rank_without_recompute(runs, name, kind):
    model, layout, _ = REPLAY[name]
    run = runs.recorded if kind == "recorded" else runs.given
    by_rank = run(name)
    same_steps(by_rank, run(f"{model}/one")[0], layout)
    assert all(result["held"] == 0 for result in by_rank)


def test_replay_changes_the_second_step(runs):
    """Guards the test above: after a step the router alone would choose otherwise."""
    [replayed] = runs.recorded("moe/one")
    [free] = two_steps(runs.paths["moe"], ONE_RANK, runs.batch)
    assert replayed["steps"][0]["grad_norm"] == free["steps"][0]["grad_norm"]
    assert replayed["steps"][1]["grad_norm"] != free["steps"][1]["grad_norm"]


def test_routers_that_do_not_obey_are_reported(runs):
    [result] = replay_errors(runs.paths["moe"], ONE_RANK, runs.forced["moe"])
    assert "no column 'routed_experts'" in result["messages"]["missing"]
    assert "live router of layer 2 did not consume its targets" in result["messages"]["deaf"]
    assert "layer 2 routes more often than it has targets" in result["messages"]["twice"]
    assert result["recovers"]
    assert result["held"] == 0
