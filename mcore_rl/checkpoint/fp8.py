"""Weights in float8 (e4m3) with one scale for each block of 128 x 128: DeepSeek-V3's format.

A weight `NAME` [rows, columns] in float8 comes with `NAME_scale_inv` [ceil(rows / 128),
ceil(columns / 128)]; the weight is their product (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md and
inference/kernel.py, weight_quant_kernel and weight_dequant_kernel).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mcore_rl.checkpoint.integrity import require_finite
from mcore_rl.config.errors import ConfigError

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
QUANTIZED, SCALE_DTYPES = torch.float8_e4m3fn, (torch.float32, torch.bfloat16)
_LARGEST = 448.0  # of e4m3
# Blocks without a larger value become zeros: below, bfloat16 cannot represent what e4m3 can.
_SMALLEST = 2.0**-110

# The projections of decoder layers. Not those of embeddings, heads, norms and routers, nor the one
# in front of a layer for multi-token prediction (eh_proj).
_PROJECTIONS = re.compile(
    r"model\.layers\.\d+\.(self_attn|mlp|block_sparse_moe)\."
    r"(.+\.)?(\w+_proj|kv_a_proj_with_mqa|w[123])\.weight"
)
_ROUTER, _SELECTION_BIAS = ".gate.weight", ".gate.e_score_correction_bias"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def scratch_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """What it takes to go from or to this dtype, beside the tensor: rows of blocks in float32."""
    return BLOCK * shape[1] * 4 * torch.float32.itemsize if dtype == QUANTIZED else 0


def is_block_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a float8 checkpoint stores this tensor in float8."""
    return len(shape) == 2 and _PROJECTIONS.fullmatch(name) is not None


def quantization_config(names: Iterable[str]) -> dict[str, Any]:
    """What config.json says of a float8 checkpoint with tensors of these names.

    Routers are named as those that stay as they are, as in published Qwen3 models: vLLM looks for
    their scales otherwise (model_executor/models/qwen3_moe.py:170). It does not for routers with a
    selection bias, and the config of DeepSeek-V3 does not name them.
    """
    known = set(names)
    routers = {name.removesuffix(_ROUTER) for name in known if name.endswith(_ROUTER)}
    kept = sorted(f"{at}.gate" for at in routers if at + _SELECTION_BIAS not in known)
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        **({"modules_to_not_convert": ["lm_head", *kept]} if kept else {}),
    }


def is_block_format(found: Any) -> bool:
    """Whether a config.json's quantization_config is of this format."""
    try:
        check_quantization_config(found)
    except ConfigError:
        return False
    return True


def check_quantization_config(found: Any) -> None:
    """Raise ConfigError unless a config.json's quantization_config is of this format."""
    allowed = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    if not isinstance(found, dict):
        raise ConfigError(f"config.json: quantization_config={found!r} is not an object")
    for name, value in allowed.items():
        if found.get(name, "e4m3" if name == "fmt" else None) != value:
            raise ConfigError(
                f"config.json: quantization_config with {name}={found.get(name)!r} is not "
                f"supported; allowed: {value!r}"
            )


def quantize_blocks(
    weight: torch.Tensor, name: str = "a weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 [rows, columns], scales [ceil(rows / 128), ceil(columns / 128)]) of a weight.

    The largest magnitude of a block becomes 448. It is taken as bfloat16 has it, so that what was
    read from a float8 checkpoint, in bfloat16 or float32, is written as the same bytes.

    Raises:
        ConfigError: a value is NaN or infinite, or too large for bfloat16.
    """
    quantized = torch.empty(weight.shape, dtype=QUANTIZED)
    scales = torch.empty(scale_shape(tuple(weight.shape)))
    for number, rows in _bands(weight.shape[0]):
        band = weight[rows].float()
        columns = torch.nn.functional.pad(band.abs().amax(0), (0, -band.shape[1] % BLOCK))
        largest = columns.view(-1, BLOCK).amax(1).bfloat16().float()
        if not largest.isfinite().all():
            require_finite(name, weight)
            raise ConfigError(f"tensor {name} has values that are too large for bfloat16")
        scales[number] = torch.where(largest < _SMALLEST, 1.0, largest / _LARGEST)
        # Not in place: the band of a float32 weight is the weight itself.
        quantized[rows] = (band / _by_column(scales[number], 0, band.shape[1])).to(QUANTIZED)
    return quantized, scales


def dequantize_blocks(
    quantized: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: torch.dtype,
    origin: tuple[int, int] = (0, 0),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weight [rows, columns] of a box of float8 values, as `dtype` (or in `out`).

    `origin` is the place of the box's first element in the whole weight, and `scale_inv` has the
    scales of the blocks that the box touches. The product is taken in float32.
    """
    if out is None:
        out = torch.empty(quantized.shape, dtype=dtype)
    row, column = (start % BLOCK for start in origin)
    for number, rows in _bands(quantized.shape[0], row):
        scales = _by_column(scale_inv[number].float(), column, quantized.shape[1])
        out[rows] = _float32(quantized[rows]).mul_(scales)
    return out


def _bands(num_rows: int, first: int = 0) -> Iterator[tuple[int, slice]]:
    """(number, rows) of each row of blocks, where the first begins `first` rows before row 0."""
    for number in range(-(-(first + num_rows) // BLOCK)):
        start = number * BLOCK - first
        yield number, slice(max(start, 0), min(start + BLOCK, num_rows))


def _by_column(scales: torch.Tensor, first: int, num_columns: int) -> torch.Tensor:
    return scales.repeat_interleave(BLOCK)[first : first + num_columns]


def _float32(quantized: torch.Tensor) -> torch.Tensor:
    """float8 as float32, ten times as fast as torch converts it on a CPU.

    The bits seeeemmm of e4m3, put into a float16 as s0eeeemmm0000000, are the same number divided
    by 2**8 (exponents count from 7 in e4m3 and from 15 in float16), but for the two that say NaN.
    """
    bits = quantized.view(torch.int8).to(torch.int16)
    halves = bits.bitwise_left_shift_(7).bitwise_and_(-0x4080).view(torch.float16)
    smallest, largest = torch.aminmax(halves)
    found = halves.float().mul_(256.0)
    if max(-smallest, largest) * 256 > _LARGEST:
        found[found.abs() > _LARGEST] = torch.nan
    return found
