"""Chunked log-prob and entropy equal a plain float64 softmax, gradients too, in bounded memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "dist_cpu"))

from live_bytes import LiveBytes

from mcore_rl.engine.logprob import Tile, VocabShard, choose_tile, compute_log_probs

FULL_VOCAB = VocabShard(start=0, vocab_size=11, group=None)
# Bytes for tiles of 1 token x 1 id, 1 x 4, 2 x 5 and for everything at once; see choose_tile.
BUDGETS = (8, 8 * 4 * 7, 8 * 5 * 256, 1 << 20)


def problem(tokens=13, hidden=7, vocab=11, padded=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=generator, dtype=dtype, requires_grad=True)
    w = torch.randn(padded, hidden, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, generator=generator, dtype=dtype)
    return h, w, targets, weights


def reference(h, w, targets, temperature=1.0, vocab=11):
    scores = (h @ w[:vocab].t() / temperature).log_softmax(-1)
    entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(1, targets[:, None]).squeeze(1), entropy


def test_a_tile_takes_all_tokens_where_it_can_and_stays_within_its_bytes():
    assert choose_tile(8 * 1000 * 512, 1000, 64) == Tile(1000, 512)
    assert choose_tile(8 * 1000 * 512, 10, 64) == Tile(10, 7936)  # bounds the slice of the head
    assert choose_tile(8 * 256 * 40, 1000, 8) == Tile(40, 256)  # too many tokens for 256 ids
    assert choose_tile(1, 1000, 64) == Tile(1, 1)
    assert choose_tile(32 << 20, 6141, 4096) == Tile(6141, 512)  # rows of logits are aligned


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_bytes", BUDGETS)
def test_values_and_gradients_equal_the_plain_softmax(temperature, chunk_bytes):
    h, w, targets, weights = problem()
    scores = compute_log_probs(
        h, w, targets, FULL_VOCAB,
        temperature=temperature, chunk_bytes=chunk_bytes, with_entropy=True, with_squares=True,
    )  # fmt: skip
    expected = reference(h, w, targets, temperature)
    squares = (h @ w[:11].t() / temperature).softmax(-1).square().sum(-1).detach()
    torch.testing.assert_close(scores.sum_pi_squared, squares)
    torch.testing.assert_close(scores.log_probs, expected[0])
    torch.testing.assert_close(scores.entropy, expected[1])
    grads = torch.autograd.grad(
        (scores.log_probs * weights[0] + scores.entropy * weights[1]).sum(), (h, w)
    )
    expected_grads = torch.autograd.grad(
        (expected[0] * weights[0] + expected[1] * weights[1]).sum(), (h, w)
    )
    torch.testing.assert_close(grads, expected_grads)


def test_the_tiles_of_the_test_above_are_uneven_in_both_directions():
    tiles = [choose_tile(budget, 13, 7) for budget in BUDGETS]
    assert tiles == [Tile(1, 1), Tile(1, 4), Tile(5, 176), Tile(13, 9984)]


@pytest.mark.parametrize("chunk_bytes", BUDGETS)
def test_without_entropy_the_gradient_is_that_of_the_log_probs(chunk_bytes):
    h, w, targets, weights = problem()
    scores = compute_log_probs(h, w, targets, FULL_VOCAB, chunk_bytes=chunk_bytes)
    grads = torch.autograd.grad((scores.log_probs * weights[0]).sum(), (h, w))
    expected = torch.autograd.grad((reference(h, w, targets)[0] * weights[0]).sum(), (h, w))
    torch.testing.assert_close(grads, expected)
    assert not scores.entropy.any()
    assert not scores.sum_pi_squared.any()
    # An entropy that no loss reads, as where scores are wanted of an update, changes no bit of it.
    scores = compute_log_probs(
        h, w, targets, FULL_VOCAB, chunk_bytes=chunk_bytes, with_entropy=True
    )
    again = torch.autograd.grad((scores.log_probs * weights[0]).sum(), (h, w))
    assert all(torch.equal(*pair) for pair in zip(again, grads, strict=True))


@pytest.mark.parametrize("chunk_bytes", BUDGETS)
def test_of_a_loss_that_reads_the_entropy_alone_the_gradient_is_that_of_the_entropy(chunk_bytes):
    h, w, targets, weights = problem()
    scores = compute_log_probs(
        h, w, targets, FULL_VOCAB, chunk_bytes=chunk_bytes, with_entropy=True
    )
    grads = torch.autograd.grad((scores.entropy * weights[1]).sum(), (h, w))
    expected = torch.autograd.grad((reference(h, w, targets)[1] * weights[1]).sum(), (h, w))
    torch.testing.assert_close(grads, expected)


def test_a_frozen_head_gets_no_gradient_and_costs_none():
    h, w, targets, _ = problem()
    scores = compute_log_probs(h, w.detach(), targets, FULL_VOCAB)
    (grad,) = torch.autograd.grad(scores.log_probs.sum(), h)
    (expected,) = torch.autograd.grad(reference(h, w, targets)[0].sum(), h)
    torch.testing.assert_close(grad, expected)


def test_padding_rows_of_the_vocabulary_get_no_probability_and_no_gradient():
    h, w, targets, _ = problem()
    with torch.no_grad():
        w[11] = 1e4
    scores = compute_log_probs(h, w, targets, FULL_VOCAB, num_top=11)
    torch.testing.assert_close(scores.log_probs, reference(h, w, targets)[0])
    assert scores.top_ids.max() == 10
    (grad,) = torch.autograd.grad(scores.log_probs.sum(), w)
    assert not grad[11].any()


def test_no_tokens_give_empty_scores_and_zero_gradients():
    h, w, _, _ = problem()
    nothing = torch.empty(0, dtype=torch.long)
    scores = compute_log_probs(h[:0], w, nothing, FULL_VOCAB, with_entropy=True, num_top=3)
    (grad,) = torch.autograd.grad(scores.log_probs.sum() + scores.entropy.sum(), w)
    assert scores.log_probs.shape == (0,)
    assert scores.top_ids.shape == (0, 3)
    assert not grad.any()


@pytest.mark.parametrize("chunk_bytes", BUDGETS)
@pytest.mark.parametrize("k", [1, 4, 11])
def test_the_largest_log_probs_are_those_of_the_plain_softmax(chunk_bytes, k):
    h, w, targets, _ = problem()
    scores = compute_log_probs(
        h, w, targets, FULL_VOCAB, temperature=0.7, chunk_bytes=chunk_bytes, num_top=k
    )
    expected = (h @ w[:11].t() / 0.7).log_softmax(-1).topk(k)
    torch.testing.assert_close(scores.top_log_probs, expected.values.detach())
    assert torch.equal(scores.top_ids, expected.indices)
    assert not scores.top_log_probs.requires_grad
    assert scores.log_probs.requires_grad


@pytest.mark.parametrize("num_top", [-1, 12])
def test_more_of_the_largest_than_there_are_ids_is_refused(num_top):
    h, w, targets, _ = problem()
    with pytest.raises(ValueError, match=rf"num_top={num_top}; allowed: 0 to the 11 token ids"):
        compute_log_probs(h, w, targets, FULL_VOCAB, num_top=num_top)


def test_logits_far_from_zero_and_far_apart_lose_nothing():
    """A float32 softmax of logits around 1e4 equals that of the same logits around 0."""
    h = torch.tensor([[1.0, 1e4], [1.0, -1e4], [1.0, 0.0]], requires_grad=True)
    w = torch.stack([torch.arange(11.0) - 5, torch.ones(11)], dim=1)
    targets = torch.tensor([3, 3, 3])
    scores = compute_log_probs(h, w, targets, FULL_VOCAB, chunk_bytes=BUDGETS[1], with_entropy=True)
    expected = reference(torch.tensor([[1.0, 0.0]]).double(), w.double(), targets[:1])
    torch.testing.assert_close(scores.log_probs.double(), expected[0].expand(3))
    torch.testing.assert_close(scores.entropy.double(), expected[1].expand(3))
    w[10, 0] = 300.0  # all the others have a probability that float32 does not have
    sure = compute_log_probs(h, w, torch.tensor([10, 10, 10]), FULL_VOCAB, with_entropy=True)
    assert sure.log_probs.tolist() == sure.entropy.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("chunk_bytes", [32 << 10, 1 << 20])
def test_bfloat16_inputs_are_summed_in_float32(chunk_bytes):
    """Scores and gradients against float64 arithmetic on the same bfloat16 numbers.

    Scores are as exact as float32. Gradients have the rounding of one bfloat16 factor, not that of
    a sum kept in bfloat16, whose error grows with its length (tested on 600 tokens of one target).
    """
    h, w, targets, _ = problem(tokens=600, hidden=64, vocab=300, padded=300, dtype=torch.bfloat16)
    targets[:] = 7
    shard = VocabShard(0, 300, None)
    exact = [tensor.detach().double().requires_grad_() for tensor in (h, w)]
    expected = reference(*exact, targets, vocab=300)
    scores = compute_log_probs(h, w, targets, shard, chunk_bytes=chunk_bytes, with_entropy=True)
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    torch.testing.assert_close(scores.log_probs.double(), expected[0], rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(scores.entropy.double(), expected[1], rtol=1e-6, atol=2e-5)
    grads = torch.autograd.grad((scores.log_probs + scores.entropy).sum(), (h, w))
    exact_grads = torch.autograd.grad(sum(expected).sum(), exact)
    for grad, exact_grad in zip(grads, exact_grads, strict=True):
        assert grad.dtype == torch.bfloat16
        error = (grad.double() - exact_grad).norm() / exact_grad.norm()
        assert error < 2**-8


def extra_bytes(tokens, vocab, dtype, *, hidden=16, chunk_bytes=256 << 10):
    """Peak of forward and backward, less the gradients of hidden and head, which are results."""
    h, w, targets, _ = problem(tokens, hidden, vocab, vocab, dtype)
    with LiveBytes() as memory:
        scores = compute_log_probs(
            h, w, targets, VocabShard(0, vocab, None), chunk_bytes=chunk_bytes, with_entropy=True
        )
        (scores.log_probs.sum() + scores.entropy.sum()).backward()
    assert memory.peak > h.nbytes + w.nbytes
    return memory.peak - h.nbytes - w.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_doubling_the_vocabulary_leaves_the_peak_of_extra_memory(dtype):
    small, large = (extra_bytes(256, vocab, dtype) for vocab in (4096, 8192))
    assert abs(large - small) <= 0.1 * small
    # Beyond the chunk: float32 numbers a token, and gradients of hidden and of a slice of the head.
    assert large < 256 * 1024 + 256 * 4 * (16 + 20) + 128 * 1024
    assert large < 256 * 8192 * 4 / 4  # the logits alone, and they are not all


def test_more_tokens_cost_only_their_own_few_numbers():
    """4096 more tokens x 4096 ids would be 64 MiB of logits."""
    grown = extra_bytes(4352, 4096, torch.float32) - extra_bytes(256, 4096, torch.float32)
    assert grown < 4096 * 4 * (16 + 20)
