"""Packed attention against plain attention in float64, one sequence at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch.nn.attention import SDPBackend, sdpa_kernel

from mcore_rl.engine.megatron.attention import PackedAttention

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


def reference(query, key, value, lengths, scale) -> torch.Tensor:
    """softmax(q k^T * scale + causal mask) v, written out."""
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
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
    mine, plain = tensors(lengths, **shape), tensors(lengths, **shape)
    found = attention(scale)(*mine, packed_seq_params=packed(lengths))
    wanted = reference(*plain, lengths, scale)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    for output in (found, wanted):
        (output * weights).sum().backward()
    for tensor, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad, rtol=0, atol=1e-11)


def test_the_scale_is_that_of_the_key_size_unless_given():
    lengths = [4, 9]
    qkv = tensors(lengths)
    found = attention(dim=8)(*qkv, packed_seq_params=packed(lengths))
    torch.testing.assert_close(found, reference(*qkv, lengths, 8**-0.5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_without_a_mask_or_a_square_of_weights_serves_every_shape(shape, dtype):
    """torch raises when only the flash kernel is allowed and the inputs do not suit it."""
    qkv = tensors([40, 3, 2], **shape, dtype=dtype)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attention()(*qkv, packed_seq_params=packed([40, 3, 2])).float().sum().backward()


def test_what_it_cannot_do_is_refused_by_name():
    with pytest.raises(ValueError, match="window_size"):
        attention(window_size=(128, 0))
    with pytest.raises(ValueError, match="softmax_type=learnable"):
        attention(softmax_type="learnable")
    qkv, params = tensors([3]), packed([3])
    with pytest.raises(ValueError, match="mask no_mask; only causal"):
        attention()(*qkv, attn_mask_type=AttnMaskType.no_mask, packed_seq_params=params)
    with pytest.raises(ValueError, match="takes no bias"):
        attention()(*qkv, attention_bias=torch.zeros(1), packed_seq_params=params)
    with pytest.raises(ValueError, match="needs packed"):
        attention()(*qkv, packed_seq_params=None)
    with pytest.raises(ValueError, match="needs packed"):
        attention()(*qkv, packed_seq_params=SimpleNamespace(qkv_format="sbhd"))
