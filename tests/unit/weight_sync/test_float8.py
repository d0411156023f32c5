"""Servers in float8 receive the codes and scales of the full tensors, from trainers of any layout.

The reference is DeepSeek's formula in plain torch, on the tensors of the checkpoint.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "dist_cpu"))
sys.path.insert(0, str(Path(__file__).parent))

import reshard_jobs
import routes
import tiny_families
import tiny_models

from mcore_rl.config.schema import Layout
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.float8 import SCALE_SUFFIX
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.reshard.rules import Block
from tests.nightly import all_but

FAMILIES = ("qwen2", "qwen3", "llama", "mixtral", "qwen3_moe", "qwen3_next", "deepseek_v3",
            "deepseek_v3_plain", "glm4_moe", "glm4_moe_lite")  # fmt: skip
LAYOUTS = {
    "one": Layout(),
    "pp2": Layout(pp=2, first_stage_layers=1),
    "tp2ep2": Layout(tp=2, ep=2),
    "tp2etp2": Layout(tp=2, etp=2),
}
SERVERS = {"tp1": (1, 1), "tp2": (2, 1), "ep2": (2, 2)}
MOE = {"mixtral", "qwen3_moe", "qwen3_next", "deepseek_v3", "deepseek_v3_plain", "glm4_moe",
       "glm4_moe_lite"}  # fmt: skip


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales: x / s with s = amax / 448 of a block of 128 x 128."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            box = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scales[row, column] = weight[box].abs().amax() / 448
            codes[box] = (weight[box] / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


class Reference:
    """Blocks of a checkpoint with the codes in place of quantised tensors, and their scales."""

    def __init__(self, route: routes.Route) -> None:
        self._read, self._pairs = route.reader.read_tensor, {}
        self._codes = {
            tensor.name
            for weight in route.served[1]
            for tensor in weight.rule.tensors
            if weight.float8
        }

    def read(self, block: Block) -> torch.Tensor:
        name = block.tensor.name
        base = name.removesuffix(SCALE_SUFFIX)
        if base in self._codes and base not in self._pairs:
            self._pairs[base] = quantize(self._read(base))
        if base not in self._codes:
            return self._read(base)[block.box.slices]
        return self._pairs[base][name != base][block.box.slices]


def check(route: routes.Route) -> None:
    """Compare all parameters of all servers with the reference, bit for bit."""
    reference = Reference(route)
    for rank, (received,) in enumerate(route.sync((1,))):
        expected = reshard_jobs.filled(route.served, rank, reference.read)
        assert received.keys() == expected.keys()
        assert any(name.endswith(SCALE_SUFFIX) for name in expected)
        for name, tensor in expected.items():
            same = tensor.view(torch.int32) == received[name].view(torch.int32)
            assert bool((same | tensor.isnan()).all()), name


# Trainer and servers; the last two of families with experts alone.
PAIRS = [("pp2", "tp1"), ("one", "tp2"), ("tp2ep2", "tp2"), ("tp2etp2", "ep2")]
CASES = [(family, *pair) for family in FAMILIES for pair in PAIRS[: 4 if family in MOE else 2]]


def build_route(folder: Path, family: str, layout: str, server: str) -> routes.Route:
    config = tiny_families.quantizable_config(family)
    model = tiny_models.build_from(config).bfloat16().float()
    tp, ep = SERVERS[server]
    return routes.Route(
        tiny_families.save_served(model, folder),
        "process_group",
        60.0,
        LAYOUTS[layout],
        GenerationLayout(tp=tp, ep=ep),
        bucket_bytes=200 << 10,  # which cuts blocks
        quantization="fp8_block",
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("family", "layout", "server"),
    all_but([("deepseek_v3", "tp2ep2", "tp2"), ("qwen3_moe", "tp2etp2", "ep2")], CASES),
)
def test_servers_receive_codes_and_scales_of_the_full_tensors(tmp_path, family, layout, server):
    check(build_route(tmp_path, family, layout, server))


def test_weights_computed_on_demand_are_quantised_and_a_nan_ends_the_update(tmp_path):
    route = build_route(tmp_path, "qwen3", "one", "tp1")
    [weights] = route.weights
    stored = weights.stored
    computed = {name: partial(torch.clone, stored[name]) for name in stored}
    route.weights = [LocalWeights({}, computed)]
    check(route)
    route.weights = [weights]
    stored["0:decoder.layers.1.mlp.linear_fc2.weight"][-1, -1] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.linear_fc2.* has a NaN"):
        route.sync((2,))
