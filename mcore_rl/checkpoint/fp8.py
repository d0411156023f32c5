"""Weights in float8 (e4m3) with a scale per block of 128 x 128: DeepSeek-V3's format.

A weight `NAME` [rows, columns] in float8 comes with `NAME_scale_inv` [ceil(rows / 128),
ceil(columns / 128)]; the weight is their product (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md and
inference/kernel.py, weight_quant_kernel and weight_dequant_kernel).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mcore_rl.checkpoint.files import require_finite
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.float8 import BLOCK, get_scale_shape

QUANTIZED, SCALE_DTYPES = torch.float8_e4m3fn, (torch.float32, torch.bfloat16)
_LARGEST = 448.0  # of e4m3
# Blocks whose values are all smaller become zero: bfloat16 could not represent them all.
_SMALLEST = 2.0**-110

# The projections of decoder layers; not embeddings, heads, norms, routers, nor the projection
# before a layer for multi-token prediction (eh_proj, mtp.fc), nor those with few rows (_PLAIN, and
# weights_proj of an indexer).
_PROJECTIONS = re.compile(
    r"(model|mtp)\.layers\.\d+\.(self_attn|linear_attn|mlp|block_sparse_moe)\."
    r"(.+\.)?((?!weights_proj)\w+_proj|in_proj_(qkvz|qkv|z)|kv_a_proj_with_mqa|w[123]|indexer\.w(q_b|k))"
    r"\.weight"
)
_PLAIN = re.compile(r"mtp\.fc|.+\.(linear_attn\.in_proj_(ba|b|a)|mlp\.shared_expert_gate)")
_ROUTER, _SELECTION_BIAS = ".gate.weight", ".gate.e_score_correction_bias"


def compute_buffer_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the memory for converting from or to a dtype: rows of blocks in float32."""
    return BLOCK * shape[1] * 4 * torch.float32.itemsize if dtype == QUANTIZED else 0


def is_block_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a float8 checkpoint stores this tensor in float8."""
    return len(shape) == 2 and _PROJECTIONS.fullmatch(name) is not None


def build_quantization_config(names: Iterable[str]) -> dict[str, Any]:
    """Return quantization_config of a float8 checkpoint with tensors of these names.

    Routers, and what stands beside projections of Qwen3-Next, are listed as not converted, as in
    published Qwen3 models: otherwise vLLM expects their scales (models/qwen3_moe.py:170). It does
    not for routers with a selection bias, and the config of DeepSeek-V3 does not list them.
    """
    known = set(names)
    modules = {name.removesuffix(_ROUTER) for name in known if name.endswith(_ROUTER)}
    plain = {f"{m}.gate" for m in modules if m + _SELECTION_BIAS not in known}
    names = (name.removesuffix(".weight") for name in known)
    plain |= {name for name in names if _PLAIN.fullmatch(name)}
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        **({"modules_to_not_convert": ["lm_head", *sorted(plain)]} if plain else {}),
    }


def check_quantization_config(quantization: dict[str, Any]) -> None:
    """Raise ConfigError unless a quantization_config of config.json has this format."""
    allowed = {
        "quant_method": ("fp8",),
        "fmt": (None, "e4m3", "float8_e4m3fn"),  # the last: MiniMax-M2
        "weight_block_size": ([BLOCK, BLOCK],),
    }
    for name, values in allowed.items():
        if (value := quantization.get(name)) not in values:
            raise ConfigError(
                f"config.json: quantization_config with {name}={value!r} is not supported; "
                f"allowed: {' or '.join(repr(v) for v in values if v is not None)}"
            )


def quantize_blocks(
    weight: torch.Tensor, name: str = "a weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight [rows, columns]; `name` is for messages.

    The largest magnitude of a block becomes 448. It is rounded to bfloat16 first, so that a weight
    that was read from a float8 checkpoint, in bfloat16 or float32, is written as the same bytes.

    Returns:
        float8 [rows, columns], and scales [ceil(rows / 128), ceil(columns / 128)].

    Raises:
        ConfigError: A value is NaN or infinite, or too large for bfloat16.
    """
    quantized = torch.empty(weight.shape, dtype=QUANTIZED)
    scales = torch.empty(get_scale_shape(tuple(weight.shape)))
    for number, rows in _split_rows(weight.shape[0]):
        band = weight[rows].float()
        columns = torch.nn.functional.pad(band.abs().amax(0), (0, -band.shape[1] % BLOCK))
        largest = columns.view(-1, BLOCK).amax(1).bfloat16().float()
        if not largest.isfinite().all():
            require_finite(name, weight)
            raise ConfigError(f"tensor {name} has values that are too large for bfloat16")
        scales[number] = torch.where(largest < _SMALLEST, 1.0, largest / _LARGEST)
        # Not in place: the band of a float32 weight is a view of the weight.
        quantized[rows] = (band / _expand_scales(scales[number], 0, band.shape[1])).to(QUANTIZED)
    return quantized, scales


def dequantize_blocks(
    quantized: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: torch.dtype,
    origin: tuple[int, int] = (0, 0),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize a box of a weight, into `out` or a new tensor of `dtype`. Computed in float32.

    Args:
        scale_inv: Scales of the blocks that the box overlaps.
        origin: Row and column of the box's first element in the weight.
    """
    if out is None:
        out = torch.empty(quantized.shape, dtype=dtype)
    row, column = (start % BLOCK for start in origin)
    for number, rows in _split_rows(quantized.shape[0], row):
        scales = _expand_scales(scale_inv[number].float(), column, quantized.shape[1])
        out[rows] = _to_float32(quantized[rows]).mul_(scales)
    return out


def _split_rows(num_rows: int, first: int = 0) -> Iterator[tuple[int, slice]]:
    """Yield index and rows of each row of blocks; the first block begins `first` rows before 0."""
    for number in range(-(-(first + num_rows) // BLOCK)):
        start = number * BLOCK - first
        yield number, slice(max(start, 0), min(start + BLOCK, num_rows))


def _expand_scales(scales: torch.Tensor, first: int, num_columns: int) -> torch.Tensor:
    return scales.repeat_interleave(BLOCK)[first : first + num_columns]


def _to_float32(quantized: torch.Tensor) -> torch.Tensor:
    """Convert float8 to float32, ten times as fast as torch on a CPU.

    The bits seeeemmm of e4m3, put into a float16 as s0eeeemmm0000000, are the same number divided
    by 2**8 (exponent biases are 7 and 15), except for the two NaNs.
    """
    bits = quantized.view(torch.int8).to(torch.int16)
    halves = bits.bitwise_left_shift_(7).bitwise_and_(-0x4080).view(torch.float16)
    smallest, largest = torch.aminmax(halves)
    values = halves.float().mul_(256.0)
    if max(-smallest, largest) * 256 > _LARGEST:
        values[values.abs() > _LARGEST] = torch.nan
    return values
