"""Sampling of a real vLLM server: temperature, top_p, top_k, stop strings and log-probs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mcore_rl.inference.protocol import SamplingParams
from tests.e2e.served import PROMPT

pytestmark = pytest.mark.server


def test_log_probs_are_those_of_the_distribution_sampled_from(server, run, moe):
    sampling = SamplingParams(n=4, temperature=0.5, max_tokens=24)
    for completion in run(server.submit(PROMPT, sampling)):
        assert moe[0].gap(PROMPT, completion, temperature=0.5) < 1e-4


def test_top_p_log_probs_are_renormalised_over_the_selected_tokens(server, run):
    narrow = SamplingParams(n=2, top_p=1e-6, max_tokens=8)  # keeps one token
    for completion in run(server.submit(PROMPT, narrow)):
        assert completion.log_probs == pytest.approx([0.0] * len(completion.token_ids), abs=1e-6)


def test_top_k_samples_from_the_likeliest_tokens_and_their_log_probs_are_of_these(server, run, moe):
    narrow, are_second = SamplingParams(n=4, top_k=2, max_tokens=24, seed=5), []
    for completion in run(server.submit(PROMPT, narrow)):
        ids = torch.tensor([PROMPT + completion.token_ids])
        with torch.no_grad():
            top = moe[0].reference(ids).logits[0, len(PROMPT) - 1 : -1].topk(2)
        is_taken = top.indices == torch.tensor(completion.token_ids)[:, None]
        assert is_taken.any(-1).all()
        expected = top.values.log_softmax(-1)[is_taken].tolist()
        assert completion.log_probs == pytest.approx(expected, abs=1e-4)
        are_second += is_taken[:, 1].tolist()
    assert {*are_second} == {False, True}


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(server, run):
    sampling = SamplingParams(max_tokens=24, seed=5)
    [complete] = run(server.submit(PROMPT, sampling))
    token = next(t for t in complete.token_ids[2:] if 14 <= t < 100)  # no word begins with its word
    [cut] = run(server.submit(PROMPT, replace(sampling, stop=("never", f"w{token}"))))
    num = complete.token_ids.index(token) + 1
    assert cut.token_ids == complete.token_ids[:num] and num < len(complete.token_ids)
    assert cut.log_probs == pytest.approx(complete.log_probs[:num], abs=1e-5)
    assert (cut.finish_reason, cut.stop_string) == ("stop", f"w{token}")
