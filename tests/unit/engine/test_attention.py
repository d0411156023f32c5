"""Packed attention and rotary embedding against plain ones, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.engine.attention import attend_pack
from mcore_rl.engine.megatron.attention import PackedAttention, rotate_pack
from mcore_rl.engine.packing import get_zigzag_rows

pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")

HEADS = 4


def attention(softmax_scale: float | None = None, dim: int = 8, **config: Any) -> PackedAttention:
    settings = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": HEADS}
    return PackedAttention(
        TransformerConfig(**settings, attention_dropout=0.0, kv_channels=dim, **config),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=softmax_scale,
    )


def packed(lengths: list[int]) -> PackedSeqParams:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)


def tensors(lengths, groups=HEADS, dim=8, value_dim=8, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, dim), (groups, dim), (groups, value_dim)]
    made = [torch.randn(sum(lengths), *s, generator=generator, dtype=dtype) for s in shapes]
    return [x.requires_grad_() for x in made]


def reference(query, key, value, lengths, scale, window=None, sinks=None) -> torch.Tensor:
    """softmax(q k^T * scale + causal mask) v, written out; the last column is the sink's."""
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        hidden = torch.ones(scores.shape[1:]).triu(1)
        if window is not None:
            hidden += torch.ones_like(hidden).tril(-window)
        scores = scores.masked_fill(hidden.bool(), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
        outputs.append(
            torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v).flatten(1)
        )
    return torch.cat(outputs)


LENGTHS = {
    "one_token": [1],
    "one_sequence": [37],
    "equal": [5, 5, 5],
    "uneven": [9, 1, 1, 30, 2, 7],
    "far_apart": [300, 1, 2, 250, 3],  # more than one run, of one sequence and of several
}
SHAPES = {
    "plain": {},
    "grouped_queries": {"groups": 2},
    "one_group": {"groups": 1},
    "small_values": {"dim": 12, "value_dim": 8},
    "large_values": {"groups": 2, "dim": 6, "value_dim": 10},
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_outputs_and_gradients_equal_plain_attention(lengths, shape):
    scale = 0.3
    inputs, plain = tensors(lengths, **shape), tensors(lengths, **shape)
    actual = attention(scale)(*inputs, packed_seq_params=packed(lengths))
    expected = reference(*plain, lengths, scale)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for output in (actual, expected):
        (output * weights).sum().backward()
    for tensor, other in zip(inputs, plain, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("window", [None, 1, 3, 64])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("shape", ["grouped_queries", "small_values"])
@pytest.mark.parametrize("block", [7, 1024])
def test_windows_and_sinks_equal_plain_attention(window, has_sinks, shape, block, monkeypatch):
    monkeypatch.setattr("mcore_rl.engine.attention._QUERIES_PER_BLOCK", block)
    lengths = [9, 1, 1, 30, 2, 7]
    options = {"window_size": None if window is None else (window - 1, 0)}
    module = attention(
        0.3,
        softmax_type="learnable" if has_sinks else "vanilla",
        params_dtype=torch.float64,
        **options,
    )
    inputs, plain = tensors(lengths, **SHAPES[shape]), tensors(lengths, **SHAPES[shape])
    sinks = None
    if has_sinks:
        sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64).requires_grad_()
        module.softmax_offset.data.copy_(sinks.detach())
        inputs, plain = [*inputs, module.softmax_offset], [*plain, sinks]
    actual = module(*inputs[:3], packed_seq_params=packed(lengths))
    expected = reference(*plain[:3], lengths, 0.3, window, sinks)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for output in (actual, expected):
        (output * weights).sum().backward()
    for tensor, other in zip(inputs, plain, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad, rtol=0, atol=1e-11)


def test_layers_without_a_window_are_those_that_the_frequency_skips():
    module = attention(window_size=(3, 0), window_attn_skip_freq=[0])
    assert module.window is None
    assert attention(window_size=(3, 0), window_attn_skip_freq=[1]).window == 4


def test_the_scale_is_that_of_the_key_size_unless_given():
    lengths = [4, 9]
    qkv = tensors(lengths)
    actual = attention(dim=8)(*qkv, packed_seq_params=packed(lengths))
    torch.testing.assert_close(actual, reference(*qkv, lengths, 8**-0.5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_without_a_mask_or_a_square_of_weights_serves_every_shape(shape, dtype):
    """torch raises when only the flash kernel is allowed and the inputs do not suit it."""
    qkv = tensors([40, 3, 2], **shape, dtype=dtype)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attention()(*qkv, packed_seq_params=packed([40, 3, 2])).float().sum().backward()


def test_what_it_cannot_do_is_refused_by_name():
    with pytest.raises(ValueError, match="window_size"):
        attention(window_size=(128, 128))
    with pytest.raises(ValueError, match="softmax_type=off-by-one"):
        attention(softmax_type="off-by-one")
    qkv, params = tensors([3]), packed([3])
    with pytest.raises(ValueError, match="mask no_mask; only causal"):
        attention()(*qkv, attn_mask_type=AttnMaskType.no_mask, packed_seq_params=params)
    with pytest.raises(ValueError, match="takes no bias"):
        attention()(*qkv, attention_bias=torch.zeros(1), packed_seq_params=params)
    with pytest.raises(ValueError, match="needs packed"):
        attention()(*qkv, packed_seq_params=None)
    with pytest.raises(ValueError, match="needs packed"):
        attention()(*qkv, packed_seq_params=SimpleNamespace(qkv_format="sbhd"))


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [
        ([5, 5, 5], [(3, 5)]),
        ([9, 9, 8, 8, 8, 1], [(2, 9), (3, 8), (1, 1)]),
        ([4, 3, 4], [(1, 4), (1, 3), (1, 4)]),
        ([7], [(1, 7)]),
    ],
)
def test_neighbours_of_equal_length_are_attended_to_in_one_call_without_padding(lengths, calls):
    shapes = []

    def record(query, key, value):
        assert query.data_ptr() in range(qkv[0].data_ptr(), qkv[0].data_ptr() + qkv[0].nbytes)
        shapes.append(tuple(query.shape[:2]))
        return value

    qkv = [x.detach() for x in tensors(lengths)]
    outputs = attend_pack(*qkv, lengths, record)
    assert shapes == calls
    torch.testing.assert_close(outputs, qkv[2], rtol=0, atol=0)


ROTARY = {
    "plain": {},
    "interleaved": {"rotary_interleaved": True},
    "latent": {"mla_rotary_interleaved": True},
    "scaled": {"mscale": 1.3},
    "bfloat16": {"dtype": torch.bfloat16},
    "part_of_a_head": {"rotated": 4},
}


def group(size: int = 1, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def rotary_inputs(lengths: list[int], rotated: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    """Return x [tokens, heads, 8], starts and angles [longest, 1, 1, rotated]."""
    [x, *_] = tensors(lengths, dtype=dtype)
    halves = torch.outer(torch.arange(max(lengths)), 0.5 ** torch.arange(rotated // 2))
    angles = torch.cat((halves, halves), dim=-1)[:, None, None]
    return x, packed(lengths).cu_seqlens_q, angles


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("options", ROTARY.values(), ids=ROTARY.keys())
def test_rotary_embedding_of_a_pack_is_that_of_each_sequence_to_the_bit(lengths, options):
    names = "rotated", "dtype"
    x, starts, angles = rotary_inputs(lengths, **{n: options[n] for n in names if n in options})
    options = {name: value for name, value in options.items() if name not in names}
    expected = torch.cat(
        [
            _apply_rotary_pos_emb_bshd(part[:, None], angles[: len(part)], **options)[:, 0]
            for part in x.split(lengths)
        ]
    )
    rotated = rotate_pack(x, starts, angles, **options, cp_group=group())
    torch.testing.assert_close(rotated, expected, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(rotated.float().square().sum(), x)
    (expected_gradient,) = torch.autograd.grad(expected.float().square().sum(), x)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=0)


@pytest.mark.parametrize("cp", [2, 4])
def test_rotary_embedding_of_a_context_parallel_rank_is_its_rows_of_the_pack(cp):
    lengths = [2 * cp * n for n in (3, 1, 1, 5)]
    x, starts, angles = rotary_inputs(lengths)
    full = rotate_pack(x, starts, angles, cp_group=group())
    for rank in range(cp):
        rows = torch.from_numpy(get_zigzag_rows(lengths, cp, rank))
        part = rotate_pack(x[rows], starts, angles, cp_group=group(cp, rank))
        torch.testing.assert_close(part, full[rows], rtol=0, atol=0)


class OperationCounter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_rotary_embedding_takes_as_many_operations_for_many_sequences_as_for_few():
    counts = []
    for number in (2, 200):
        x, starts, angles = rotary_inputs([3] * number)
        with OperationCounter() as counter:
            rotate_pack(x.detach(), starts, angles, cp_group=group())
        counts.append(counter.count)
    assert counts[0] == counts[1]
