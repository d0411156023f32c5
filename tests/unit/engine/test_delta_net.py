"""The gated delta rule of a pack, in plain torch, against the recurrence it stands for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mcore_rl.engine.megatron.delta_net import causal_conv1d, chunk_gated_delta_rule, l2norm

# Of sequences: within a chunk of 64 tokens, a full one, and several; equal ones and neighbours.
PACKS = ([1], [5, 1, 9], [64], [63, 64, 65, 64], [200, 3, 130, 3])
HEADS, KEY, VALUE, WIDTH = 3, 8, 6, 4


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def draw(lengths: list[int], *shape: int) -> torch.Tensor:
    return torch.randn(1, sum(lengths), *shape)


def recur(q, k, v, g, beta) -> torch.Tensor:
    """Apply the gated delta rule token by token [tokens, heads, ...]; arXiv:2412.06464, eq. 10."""
    state = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
    outputs = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t] * KEY**-0.5))
    return torch.stack(outputs)


def build_inputs(lengths: list[int]) -> list[torch.Tensor]:
    torch.manual_seed(len(lengths))
    q, k = (l2norm(draw(lengths, HEADS, KEY)) for _ in range(2))
    g, beta = -F.softplus(draw(lengths, HEADS)), draw(lengths, HEADS).sigmoid()
    return [q, k, draw(lengths, HEADS, VALUE), g, beta]


@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_each_sequence_of_a_pack_equals_the_recurrence_with_its_gradients(lengths):
    inputs = [x.requires_grad_() for x in build_inputs(lengths)]
    out, state = chunk_gated_delta_rule(*inputs, cu_seqlens=starts(lengths))
    assert state is None and out.dtype is torch.float32
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    by_sequence = zip(*(x[0].split(lengths) for x in exact), strict=True)
    expected = torch.cat([recur(*sequence) for sequence in by_sequence])[None]
    (expected * weights).sum().backward()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    for x, reference in zip(inputs, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), reference.grad, rtol=0, atol=1e-5)


def test_a_pack_equals_its_sequences_alone():
    lengths = PACKS[-1]
    inputs = build_inputs(lengths)
    packed, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=starts(lengths))
    parts = zip(*(x.split(lengths, dim=1) for x in inputs), strict=True)
    alone = torch.cat([chunk_gated_delta_rule(*part)[0] for part in parts], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-6)


def test_strong_decay_gives_finite_outputs_and_gradients():
    inputs = build_inputs([130])
    inputs[3] = inputs[3] - 50  # a chunk decays by exp(-3200)
    inputs = [x.detach().requires_grad_() for x in inputs]
    out, _ = chunk_gated_delta_rule(*inputs)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_have_the_dtype_of_the_queries(dtype):
    q, k, v, g, beta = build_inputs([70])
    narrow = [x.to(dtype) for x in (q, k, v)]
    out, _ = chunk_gated_delta_rule(*narrow, g, beta.to(dtype))
    assert out.dtype is dtype and l2norm(narrow[0]).dtype is dtype


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_convolution_stays_inside_each_sequence(lengths, activation):
    torch.manual_seed(0)
    x, weight, bias = draw(lengths, 5), torch.randn(5, WIDTH), torch.randn(5)
    out, state = causal_conv1d(x, weight, bias, activation, cu_seqlens=starts(lengths))
    parts = []
    for sequence in x.split(lengths, dim=1):
        padded = F.pad(sequence.transpose(1, 2), (WIDTH - 1, 0))
        parts.append(F.conv1d(padded, weight[:, None], bias, groups=5).transpose(1, 2))
    expected = torch.cat(parts, dim=1)
    expected = expected if activation is None else F.silu(expected)
    assert state is None
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_l2norm_gives_vectors_of_length_one():
    torch.testing.assert_close(l2norm(torch.randn(3, 7)).norm(dim=-1), torch.ones(3))
    assert l2norm(torch.zeros(1, 4)).eq(0).all()
