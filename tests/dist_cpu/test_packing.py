"""Packing and context parallelism change how a batch is computed, never what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ranks
import tiny_families
import tiny_models
import torch

from mcore_rl.algorithms.losses import negative_log_likelihood
from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from mcore_rl.engine.megatron import device
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.parallel.groups import initialize_groups
from tests.nightly import all_but

# Sequences are longer than the window of gpt-oss.
MODELS = ("qwen3", "qwen3_moe", "qwen3_next", "gpt_oss")
FAMILIES = ("qwen3_5_moe", "deepseek_v32", "glm_moe_dsa", "minimax_m2")  # of tiny_families.py
MODEL_CASES = all_but(MODELS, MODELS + FAMILIES)
SINGLE = {"tp1": Layout()}
PACKED = SINGLE | {"dp2": Layout(dp=2), "cp2": Layout(cp=2)}
CONTEXT = {
    "qwen3": {"cp2": Layout(cp=2), "cp4": Layout(cp=4), "tp2cp2": Layout(tp=2, cp=2)},
    "qwen3_moe": {
        "cp2": Layout(cp=2),
        "cp2ep2": Layout(cp=2, ep=2),  # experts over the context-parallel ranks
        "tp2cp2": Layout(tp=2, cp=2),
        "tp2cp2ep4": Layout(tp=2, cp=2, ep=4),
        "cp2dp2ep2": Layout(cp=2, dp=2, ep=2),
    },
    "gpt_oss": {"cp2": Layout(cp=2), "tp2cp2": Layout(tp=2, cp=2)},
}
PARITY = [(model, name) for model, layouts in CONTEXT.items() for name in layouts]
PARITY_CASES = all_but(
    [
        ("qwen3", "cp4"),
        ("qwen3_moe", "cp2ep2"),
        ("qwen3_moe", "tp2cp2ep4"),
        ("gpt_oss", "tp2cp2"),
    ],
    PARITY,
)


ONE_PACK = 10_000  # tokens: all samples of a test in one micro-batch
# (seed of a permutation or None, budget in tokens). The last budget is below many samples.
PACKINGS = ((None, ONE_PACK), (1, ONE_PACK), (2, 96), (3, 64), (4, 40), (None, 16))


@ranks.spawn_on_ranks()
def packings(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """Loss, metrics and gradients of this rank for each packing of the same batch."""
    engine = ranks.start_engine(ranks.build_engine_spec(path, layout))
    return {str(packing): _one_packing(engine, batch, *packing) for packing in PACKINGS}


def _one_packing(
    engine: MegatronEngine, batch: Batch, seed: int | None, budget: int
) -> dict[str, Any]:
    order = np.arange(len(batch)) if seed is None else _permutation(len(batch), seed)
    shuffled = batch.take(order.tolist())
    share = shuffled.take(ranks.list_rows(engine, shuffled))
    engine.spec.engine.max_tokens_per_micro_batch = budget
    engine.optimizer_zero_grad()
    results = engine.forward_backward_batch(share, negative_log_likelihood, forward_only=False)
    parameters = [p for chunk in engine.chunks for p in chunk.parameters() if p.requires_grad]
    return {
        "num_micro_batches": len(results),
        "metrics": engine._reduce_metrics(results),
        "gradients": torch.cat([p.main_grad.flatten() for p in parameters]),
    }


def _permutation(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size)


ATTENTION_SHAPES = {  # heads, groups, key dim, value dim
    "grouped_queries": (4, 2, 8, 8),
    "latent": (4, 4, 12, 8),
}
# Windows inside a chunk, and over several.
ATTENTION_CASES = [
    *((shape, None, "vanilla") for shape in ATTENTION_SHAPES.items()),
    *(
        (("grouped_queries", ATTENTION_SHAPES["grouped_queries"]), window, softmax)
        for window in (None, 9, 100)
        for softmax in ("vanilla", "learnable")
        if window or softmax == "learnable"
    ),
]
ATTENTION_NAMES = [
    f"{name}, window {window}, {kind}" for (name, _), window, kind in ATTENTION_CASES
]


@ranks.spawn_on_ranks()
def attention(layout: Layout) -> ranks.Result:
    """Attention of this CP rank's tokens, and of the whole pack, with gradients; in float64."""
    device.install(1)
    from megatron.core import parallel_state

    initialize_groups(layout, "gloo", seed=0)
    group = parallel_state.get_context_parallel_group()
    return {
        name: _attention(group, *shape, window, softmax)
        for name, ((_, shape), window, softmax) in zip(
            ATTENTION_NAMES, ATTENTION_CASES, strict=True
        )
    }


def _attention(
    group: Any,
    heads: int,
    groups: int,
    dim: int,
    value_dim: int,
    window: int | None,
    softmax: str,
) -> dict[str, Any]:
    from mcore_rl.engine.packing import get_zigzag_rows

    cp, rank = group.size(), group.rank()
    # Padded as packs are. Some share a call of the kernel, and the long ones have their own.
    lengths = [2 * cp * chunks for chunks in (70, 1, 3, 3, 50, 2, 1)]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(sum(lengths), *shape, generator=generator, dtype=torch.float64)

    full = [random(heads, dim), random(groups, dim), random(groups, value_dim)]
    weights = random(heads * value_dim)
    rows = torch.from_numpy(get_zigzag_rows(lengths, cp, rank))
    local = [x[rows].requires_grad_() for x in full]
    full = [x.requires_grad_() for x in full]
    actual = _attend(group, local, lengths, window, softmax)
    (actual * weights[rows]).sum().backward()
    expected = _attend(None, full, lengths, window, softmax)
    (expected * weights).sum().backward()
    return {
        "actual": [actual.detach(), *(x.grad for x in local)],
        "expected": [expected.detach()[rows], *(x.grad[rows] for x in full)],
    }


def _attend(
    group: Any, qkv: list[torch.Tensor], lengths: list[int], window: int | None, softmax: str
) -> torch.Tensor:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from mcore_rl.engine.megatron.attention import PackedAttention

    module = PackedAttention(
        TransformerConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=4,
            attention_dropout=0.0,
            window_size=None if window is None else (window - 1, 0),
            softmax_type=softmax,
            params_dtype=torch.float64,
        ),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=0.3,
        pg_collection=None if group is None else SimpleNamespace(cp=group),
    )
    if module.softmax_offset is not None:
        module.softmax_offset.data.copy_(torch.linspace(-1, 2, 4))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return module(*qkv, packed_seq_params=PackedSeqParams("thd", starts, starts))


@dataclass(frozen=True)
class Runs:
    batch: Batch
    paths: dict[str, Path]

    def packings(self, model: str, layout: str) -> list[ranks.Result]:
        return packings(self.paths[model], PACKED[layout], self.batch)

    def parity(self, model: str, layout: str) -> list[ranks.Result]:
        return ranks.run_parity(self.paths[model], (SINGLE | CONTEXT[model])[layout], self.batch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("models")
    paths = {model: tiny_models.save(model, folder) for model in MODELS}
    cases = tiny_families.cases()
    for family in FAMILIES:
        model = tiny_models.build_from(cases[family].config)
        paths[family] = tiny_families.save_served(model, folder / family)
    return Runs(tiny_models.make_batch(), paths)


def assert_same_step(actual, expected, tolerance=1e-6):
    """float32 rounding alone leaves up to 6e-7 of the norm."""
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    difference = (actual["gradients"] - expected["gradients"]).norm() / expected["gradients"].norm()
    assert difference < tolerance


@pytest.mark.parametrize("packing", PACKINGS[1:], ids=str)
@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("model", MODEL_CASES)
def test_loss_and_gradients_do_not_depend_on_the_packing(runs, model, layout, packing):
    for rank in runs.packings(model, layout):
        first, *_ = rank.values()
        assert_same_step(rank[str(packing)], first)


@pytest.mark.parametrize("layout", ["dp2", "cp2"])
@pytest.mark.parametrize("model", MODEL_CASES)
def test_gradients_are_those_of_one_rank(runs, model, layout):
    [single] = runs.packings(model, "tp1")
    for rank in runs.packings(model, layout):
        for packing, expected in single.items():
            assert_same_step(rank[packing], expected, tolerance=2e-6)


@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("model", MODEL_CASES)
def test_the_packings_differ_and_every_rank_has_as_many_micro_batches(runs, model, layout):
    """One sample in 11 tokens has more than 40: the smallest budgets leave few together."""
    by_rank = runs.packings(model, layout)
    counts = [[case["num_micro_batches"] for case in rank.values()] for rank in by_rank]
    assert all(other == counts[0] for other in counts)
    assert counts[0][:2] == [1, 1]
    assert counts[0][1] < counts[0][2] < counts[0][4] < counts[0][5]


@pytest.mark.parametrize(("model", "layout"), PARITY_CASES)
def test_context_parallel_scores_equal_one_rank(runs, model, layout):
    [single] = runs.parity(model, "tp1")
    for actual in runs.parity(model, layout):
        assert actual["rows"]
        for name in ("log_probs", "entropy"):
            for place, row in enumerate(actual["rows"]):
                torch.testing.assert_close(
                    actual[name][place], single[name][row], rtol=0, atol=1e-5
                )


@pytest.mark.parametrize(("model", "layout"), PARITY_CASES)
def test_two_context_parallel_steps_equal_one_rank(runs, model, layout):
    [single] = runs.parity(model, "tp1")
    for actual in runs.parity(model, layout):
        for step, expected in zip(actual["steps"], single["steps"], strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    trained = runs.parity(model, layout)[0]["trained"]
    for name, tensor in single["trained"].items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("name", ATTENTION_NAMES)
@pytest.mark.parametrize("cp", [2, 4])
def test_attention_over_ranks_equals_attention_of_one_with_its_gradients(cp, name):
    for rank in attention(Layout(cp=cp)):
        for actual, expected in zip(rank[name]["actual"], rank[name]["expected"], strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
