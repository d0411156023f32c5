"""Chunked log-prob and entropy equal a plain float64 softmax, gradients too, in bounded memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mcore_rl.engine.megatron.logprob import VocabShard, token_scores


def problem(tokens=13, hidden=7, vocab=11, padded=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=generator, dtype=dtype, requires_grad=True)
    w = torch.randn(padded, hidden, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, generator=generator, dtype=dtype)
    return h, w, targets, weights


def reference(h, w, targets, vocab, temperature):
    scores = (h @ w[:vocab].t() / temperature).log_softmax(-1)
    entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(1, targets[:, None]).squeeze(1), entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_values_and_gradients_equal_the_plain_softmax(temperature, chunk):
    h, w, targets, weights = problem()
    scores = token_scores(
        h, w, targets, VocabShard(0, 11, None),
        temperature=temperature, chunk_tokens=chunk, with_entropy=True,
    )  # fmt: skip
    expected = reference(h, w, targets, 11, temperature)
    torch.testing.assert_close(scores.log_probs, expected[0])
    torch.testing.assert_close(scores.entropy, expected[1])
    grads = torch.autograd.grad(
        (scores.log_probs * weights[0] + scores.entropy * weights[1]).sum(), (h, w)
    )
    wanted = torch.autograd.grad(
        (expected[0] * weights[0] + expected[1] * weights[1]).sum(), (h, w)
    )
    torch.testing.assert_close(grads, wanted)


def test_without_entropy_the_gradient_is_that_of_the_log_probs():
    h, w, targets, weights = problem()
    scores = token_scores(h, w, targets, VocabShard(0, 11, None), chunk_tokens=4)
    grads = torch.autograd.grad((scores.log_probs * weights[0]).sum(), (h, w))
    wanted = torch.autograd.grad((reference(h, w, targets, 11, 1.0)[0] * weights[0]).sum(), (h, w))
    torch.testing.assert_close(grads, wanted)
    assert not scores.entropy.any()


def test_padding_rows_of_the_vocabulary_get_no_probability_and_no_gradient():
    h, w, targets, _ = problem()
    with torch.no_grad():
        w[11] = 1e4
    scores = token_scores(h, w, targets, VocabShard(0, 11, None))
    torch.testing.assert_close(scores.log_probs, reference(h, w, targets, 11, 1.0)[0])
    (grad,) = torch.autograd.grad(scores.log_probs.sum(), w)
    assert not grad[11].any()


def test_no_tokens_give_empty_scores_and_zero_gradients():
    h, w, _, _ = problem()
    scores = token_scores(h[:0], w, torch.empty(0, dtype=torch.long), VocabShard(0, 11, None))
    (grad,) = torch.autograd.grad(scores.log_probs.sum(), w)
    assert scores.log_probs.shape == (0,)
    assert not grad.any()


_MEMORY = """
import resource, sys, torch
from mcore_rl.engine.megatron.logprob import VocabShard, token_scores
torch.set_num_threads(1)
tokens, vocab = int(sys.argv[1]), 16384
h, w = torch.randn(tokens, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
t = torch.randint(vocab, (tokens,))
def run(n):
    shard = VocabShard(0, vocab, None)
    s = token_scores(h[:n], w, t[:n], shard, chunk_tokens=128, with_entropy=True)
    s.log_probs.sum().backward()
run(256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(tokens)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    """4096 tokens x 16384 ids are 256 MiB in float32; a chunk of 128 tokens is 8 MiB."""
    command = [sys.executable, "-c", _MEMORY, "4096"]
    grown_kib = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown_kib < 48 * 1024
