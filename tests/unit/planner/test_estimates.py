"""Estimates of the search of layouts, and tables of plans, by hand."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from mcore_rl.config.schema import Layout
from mcore_rl.planner.flops import ModelWork
from mcore_rl.planner.layout import estimate_training_bytes, search_layouts
from mcore_rl.planner.memory import CachePlan, Conditions, MemoryPlan, Moment
from mcore_rl.planner.report import describe_cache, print_memory
from tests.unit.planner import test_step, test_training

HIDDEN, FFN = test_training.HIDDEN, test_training.FFN
# Of a layer for a token: inputs and outputs, heads twice, and gate, up and product.
ELEMENTS = 5 * HIDDEN + 2 * 3 * HIDDEN + 3 * FFN
TILES = 2 * (512 << 20)


def estimate(
    layout: Layout, granularity: str = "none", work: ModelWork | None = None
) -> dict[str, float]:
    model = test_training.build_model(work or test_training.build_work(8), layout=layout)
    model.engine.recompute.granularity = granularity
    model.engine.recompute.modules = ["layernorm", "mlp"]
    return estimate_training_bytes(model)


@pytest.mark.parametrize(
    ("layout", "granularity", "elements"),
    [
        # Two micro-batches of four layers, and twice a layer while gradients are in it.
        (Layout(tp=2, pp=2), "none", 4 * 2 * ELEMENTS + 2 * ELEMENTS),
        # 1 + 1 / 4 times as many: (pp - 1) / (pp vpp)
        (Layout(tp=2, pp=2, vpp=2), "none", 4 * 2.5 * ELEMENTS + 2 * ELEMENTS),
        (Layout(tp=2, pp=2), "full", 4 * 2 * HIDDEN + 2 * ELEMENTS),
        (
            Layout(tp=2, pp=2),
            "selective",
            4 * 2 * (ELEMENTS - 2 * HIDDEN - 3 * FFN) + 2 * ELEMENTS,
        ),
    ],
)
def test_activations_of_a_layout(layout: Layout, granularity: str, elements: float) -> None:
    kinds = estimate(layout, granularity)
    assert kinds["activations"] == pytest.approx(elements * 1000 / 2 * 2 + TILES)


def test_tokens_of_experts_are_on_one_tensor_parallel_rank() -> None:
    work = test_training.build_work(8, num_experts=8)
    layer = ELEMENTS + 2 * 2 * HIDDEN * 2  # two copies of a token, before and after
    kinds = estimate(Layout(tp=2), work=work)
    assert kinds["activations"] == pytest.approx((8 + 2) * layer * 1000 / 2 * 2 + TILES)


def test_states_of_a_layout() -> None:
    parameters = 8 * HIDDEN * (HIDDEN + FFN) + HIDDEN
    kinds = estimate(Layout())
    sizes = kinds["weights"], kinds["gradients"], kinds["optimizer"], kinds["reserved"]
    assert sizes == (2 * parameters, 4 * parameters, 12 * parameters, 6e9)


@pytest.mark.parametrize("rollout", ["shared", "own"])
def test_a_reference_on_its_own_pool_is_within_the_devices_of_a_search(rollout: str) -> None:
    """The reference takes as many devices as the actor, and the servers share the actor's."""
    config = test_step.build_config("Qwen3-8B", "sync", rollout)
    config.algorithm.kl_coef, config.placement.reference = 0.01, "own"
    model = test_step.read_model({"model": "Qwen3-8B"})
    result = search_layouts(config, model, test_step.H100, 16, test_step.LENGTHS)
    for candidate in result.best:
        assert candidate.step.num_devices <= 16
        servers = candidate.rollout.num_servers * candidate.rollout.num_workers
        training = candidate.engine.layout.world_size
        pools = (training, max(training, servers)) if rollout == "shared" else (
            training, training, servers
        )  # fmt: skip
        assert candidate.step.num_devices == sum(pools)


def test_a_table_has_the_kinds_of_its_columns_together() -> None:
    kinds = {"weights": 1, "gradients": 2, "optimizer": 3, "activations": 4, "logits": 5}
    kinds |= {"MoE dispatch": 6, "KV cache": 7, "buffers": 8, "NCCL": 9}
    sizes = {kind: size * 100_000_000 for kind, size in kinds.items()}
    moment = Moment("actor: update", "actor", (0, 1, 3), sizes)
    cache = CachePlan(800_000, 1234, 2, 1000, is_set=True)
    plan = MemoryPlan(
        (), (moment,), {"object store": 2_500_000_000, "offloaded weights": 500_000_000}, cache
    )
    console = Console(file=io.StringIO(), width=200)
    print_memory(plan, Conditions(), console)
    text = console.file.getvalue()
    [row] = [line for line in text.splitlines() if line.startswith("actor: update")]
    columns = "actor: update * 0-1, 3 0.100 0.200 0.300 0.900 0.600 0.700 1.700 4.500"
    assert row.split() == columns.split()
    assert "host of a node: 3.000 GB (2.500 object store, 0.500 offloaded weights)" in text
    line = "KV cache of a server: 1,234 tokens, 800,000 bytes a worker, for 2 sequences of 1,000 "
    assert f"{line}tokens, which wait for a place where they are longer than 617\n" in text
    assert describe_cache(replace(cache, num_tokens=8000)) == [
        f"{line}tokens".replace("1,234", "8,000")
    ]
    assert describe_cache(replace(cache, num_tokens=9000))[1] == (
        "wasteful: rollout.kv_cache_bytes=800000 is 4.5 times what these sequences need; allowed, "
        "but null takes as much as they need"
    )
    assert len(describe_cache(replace(cache, num_tokens=9000, is_set=False))) == 1
    larger = replace(plan, moments=(replace(moment, kinds={"weights": 10_060_000_000}),))
    print_memory(larger, Conditions(), console)
    assert "10.1" in console.file.getvalue()  # one digit is enough above ten
