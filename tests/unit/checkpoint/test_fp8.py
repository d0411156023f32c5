"""Weights in float8 blocks: against a loop over blocks, transformers, and themselves again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from mcore_rl.checkpoint.fp8 import (
    build_quantization_config,
    check_quantization_config,
    dequantize_blocks,
    is_block_quantized,
    quantize_blocks,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.float8 import get_scale_shape

CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DTYPES = (torch.bfloat16, torch.float32)
EVERY_BYTE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


def dequantize_by_definition(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize block by block in float32, by the definition of the format."""
    tensor = torch.empty(quantized.shape)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            tensor[block] = quantized[block].float() * scales[row, column].float()
    return tensor


def random_weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit; NaN equals NaN."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


RAGGED = [(1, 1), (128, 128), (127, 129), (256, 128), (300, 257), (576, 384)]


@pytest.mark.parametrize(("rows", "columns"), RAGGED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_is_divided_by_its_largest_magnitude_over_448(rows, columns, dtype):
    tensor = random_weight(rows, columns, dtype)
    before = tensor.clone()
    quantized, scales = quantize_blocks(tensor)
    assert torch.equal(tensor, before)
    assert (quantized.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (
        tuple(scales.shape)
        == get_scale_shape((rows, columns))
        == (-(-rows // 128), -(-columns // 128))
    )
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            scale = tensor[block].abs().max().bfloat16().float() / 448
            assert scales[row, column] == scale
            assert same(quantized[block], (tensor[block].float() / scale).to(torch.float8_e4m3fn))
            assert quantized[block].float().abs().max() == 448


@pytest.mark.parametrize(("rows", "columns"), RAGGED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_a_weight_is_the_product_of_values_and_scales(rows, columns, dtype, scale_dtype):
    quantized, scales = quantize_blocks(random_weight(rows, columns))
    scales = scales.to(scale_dtype)
    expected = dequantize_by_definition(quantized, scales).to(dtype)
    assert same(dequantize_blocks(quantized, scales, dtype), expected)


def test_every_value_of_e4m3_is_read_as_torch_reads_it():
    """Include subnormals, both zeros, and NaN, which stays NaN."""
    for scale in (1.0, 1e-30, 3.7, 1e30):
        values = dequantize_blocks(EVERY_BYTE[None], torch.tensor([[scale, scale]]), torch.float32)
        expected = EVERY_BYTE[None].float() * torch.tensor(scale)
        assert torch.equal(values.isnan(), expected.isnan())
        assert values.isnan().sum() == 2
        assert same(values.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_transformers_reads_the_same_weight(dtype):
    quantized, scales = quantize_blocks(random_weight(384, 256))
    expected = Fp8Dequantize(None)._dequantize_one(quantized, scales, dtype)
    assert same(dequantize_blocks(quantized, scales, dtype), expected)


def test_transformers_writes_a_bfloat16_weight_the_same_within_rounding():
    """Allow one more rounding: transformers multiplies by the reciprocal of the scale."""
    settings = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    written = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    tensor = random_weight(384, 256, torch.bfloat16)
    expected = written._quantize_one("a.weight", tensor)
    quantized, scales = quantize_blocks(tensor)
    torch.testing.assert_close(expected["a.weight_scale_inv"], scales, rtol=3e-7, atol=0)
    differing = (expected["a.weight"].view(torch.uint8) != quantized.view(torch.uint8)).sum()
    assert differing <= tensor.numel() // 1000


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    exponents=st.tuples(st.integers(-30, 30), st.integers(-30, 30)),
    kind=st.sampled_from(["normal", "wide", "zero", "subnormal", "one"]),
    written_as=st.sampled_from(DTYPES),
    read_as=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 20),
)
def test_what_was_written_and_read_is_written_as_the_same_bytes(
    rows, columns, exponents, kind, written_as, read_as, seed
):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    low, high = sorted(exponents)
    if kind == "wide":  # each value of its own magnitude
        tensor *= 10.0 ** (low + (high - low) * torch.rand(rows, columns, generator=generator))
    elif kind == "subnormal":
        tensor *= 2.0**-130
    else:
        tensor *= 10.0**low
    if kind == "zero":
        tensor[: rows // 2] = 0
        tensor[:128, :128] = 0
    if kind == "one":
        tensor = tensor * 0 + 10.0**high
    first = quantize_blocks(tensor.to(written_as))
    for _ in range(2):
        again = quantize_blocks(dequantize_blocks(*first, read_as))
        assert same(again[0], first[0])
        assert same(again[1], first[1])


@given(exponent=st.integers(-118, 118), seed=st.integers(0, 1 << 20), dtype=st.sampled_from(DTYPES))
def test_a_scale_is_a_fixed_point_whatever_the_largest_value_is(exponent, seed, dtype):
    """Quotient and product round; over many mantissas of the largest value, in 128 blocks."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.zeros(1, 128 * 128)
    tensor[0, ::128] = (1 + torch.rand(128, generator=generator)) * 2.0**exponent
    first = quantize_blocks(tensor)
    again = quantize_blocks(dequantize_blocks(*first, dtype))
    assert same(again[0], first[0])
    assert same(again[1], first[1])


def test_blocks_of_zeros_and_of_next_to_nothing_have_scale_one():
    tensor = torch.zeros(256, 128)
    tensor[128:] = 2.0**-111
    quantized, scales = quantize_blocks(tensor)
    assert scales.tolist() == [[1.0], [1.0]]
    assert not dequantize_blocks(quantized, scales, torch.float32).any()


@given(
    row=st.integers(0, 299), column=st.integers(0, 299),
    height=st.integers(1, 300), width=st.integers(1, 300),
)  # fmt: skip
def test_a_box_is_read_as_the_slice_of_its_weight(row, column, height, width):
    quantized, scales = quantize_blocks(random_weight(300, 300))
    tensor = dequantize_blocks(quantized, scales, torch.bfloat16)
    block = (slice(row, row + height), slice(column, column + width))
    box = quantized[block]
    touched = (
        slice(row // 128, -(-(row + box.shape[0]) // 128)),
        slice(column // 128, -(-(column + box.shape[1]) // 128)),
    )
    values = dequantize_blocks(box, scales[touched], torch.bfloat16, (row, column))
    assert same(values, tensor[block].contiguous())


def test_a_box_is_read_between_other_elements():
    quantized, scales = quantize_blocks(random_weight(200, 200))
    wide = torch.zeros(202, 202)
    dequantize_blocks(quantized, scales, torch.float32, out=wide[1:-1, 1:-1])
    assert torch.equal(wide[1:-1, 1:-1], dequantize_by_definition(quantized, scales))
    assert not wide[0].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_by_place(value):
    tensor = random_weight(200, 300)
    tensor[150, 299] = value
    with pytest.raises(ConfigError, match=rf"tensor w is damaged: it has {value} at \[150, 299\]"):
        quantize_blocks(tensor, "w")


def test_values_that_bfloat16_cannot_hold_are_refused():
    tensor = torch.full((1, 1), torch.finfo(torch.float32).max)
    with pytest.raises(ConfigError, match="tensor w has values that are too large for bfloat16"):
        quantize_blocks(tensor, "w")


# As published: deepseek-ai/DeepSeek-V3 (its layer 61 predicts), Qwen/Qwen3-30B-A3B-FP8.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.q_a_proj.weight", True),
        ("model.layers.0.self_attn.q_b_proj.weight", True),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", True),
        ("model.layers.0.self_attn.kv_b_proj.weight", True),
        ("model.layers.60.self_attn.o_proj.weight", True),
        ("model.layers.0.mlp.gate_proj.weight", True),
        ("model.layers.3.mlp.experts.255.up_proj.weight", True),
        ("model.layers.3.mlp.shared_experts.down_proj.weight", True),
        ("model.layers.61.mlp.experts.0.gate_proj.weight", True),
        ("model.layers.61.self_attn.q_a_proj.weight", True),
        ("model.layers.0.block_sparse_moe.experts.7.w2.weight", True),
        ("model.layers.0.self_attn.indexer.wq_b.weight", True),
        ("model.layers.0.self_attn.indexer.wk.weight", True),
        ("model.layers.0.self_attn.indexer.weights_proj.weight", False),
        ("model.layers.61.eh_proj.weight", False),
        ("model.layers.61.shared_head.head.weight", False),
        ("model.layers.61.embed_tokens.weight", False),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.0.block_sparse_moe.gate.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
        ("score.weight", False),
    ],
)
def test_the_projections_of_decoder_layers_are_in_float8(name, expected):
    assert is_block_quantized(name, (256, 256)) == expected
    assert not is_block_quantized(name, (256,))


def test_the_config_is_the_published_one():
    layer = "model.layers.3.mlp."
    deepseek = [f"{layer}gate.weight", f"{layer}gate.e_score_correction_bias", "lm_head.weight"]
    assert build_quantization_config(deepseek) == CONFIG
    assert build_quantization_config(["model.layers.0.mlp.gate_proj.weight"]) == CONFIG
    routers = {"modules_to_not_convert": ["lm_head", "model.layers.3.mlp.gate"]}
    assert build_quantization_config([f"{layer}gate.weight"]) == CONFIG | routers
    check_quantization_config(build_quantization_config([f"{layer}gate.weight"]))


def test_a_hybrid_model_has_its_projections_in_float8_and_lists_what_stands_beside_them():
    layer = "model.layers.0."
    quantized = [
        f"{layer}linear_attn.in_proj_qkvz.weight", f"{layer}linear_attn.in_proj_qkv.weight",
        f"{layer}linear_attn.in_proj_z.weight", f"{layer}linear_attn.out_proj.weight",
        f"{layer}mlp.shared_expert.up_proj.weight", "mtp.layers.0.self_attn.q_proj.weight",
    ]  # fmt: skip
    plain = [
        "mtp.fc",
        f"{layer}linear_attn.in_proj_ba",
        f"{layer}linear_attn.in_proj_a",
        f"{layer}linear_attn.in_proj_b",
        f"{layer}mlp.shared_expert_gate",
    ]
    plain.append(f"{layer}mlp.gate")
    beside = [f"{layer}linear_attn.conv1d.weight", f"{layer}input_layernorm.weight"]
    assert all(is_block_quantized(name, (256, 128)) for name in quantized)
    assert not any(is_block_quantized(f"{name}.weight", (256, 128)) for name in plain)
    config = build_quantization_config([*quantized, *(f"{n}.weight" for n in plain), *beside])
    assert config["modules_to_not_convert"] == ["lm_head", *sorted(plain)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "awq"}, "quant_method='awq' is not supported; allowed: 'fp8'"),
        ({"quant_method": None}, "quant_method=None is not supported"),
        ({"fmt": "e5m2"}, "fmt='e5m2' is not supported; allowed: 'e4m3'"),
        ({"weight_block_size": [1, 128]}, r"\[1, 128\] is not supported; allowed: \[128, 128\]"),
        ({"weight_block_size": None}, r"weight_block_size=None is not supported"),
    ],
)
def test_other_formats_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_quantization_config(CONFIG | changes)
