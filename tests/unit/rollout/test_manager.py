"""Requests of a RolloutPool: sampling settings, and seeds that no two samples share."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mcore_rl.agents.single_turn import Prompt, SingleTurnLoop
from mcore_rl.config.allowed import MAX_SEED
from mcore_rl.config.schema import EvaluationConfig, RolloutConfig, SpeculativeConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.datasets import PromptRow as Row
from mcore_rl.data.prompt_batches import PromptBatches, build_held_out_batch
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import Completion, DraftCounts, SamplingParams
from mcore_rl.observability.activity import ACTIVITY
from mcore_rl.rollout.manager import RolloutPool, draw_first_seed
from tests.unit.rollout.answering import Answering

SAMPLE = Sample([5], [1], [1], [0.0], [0], "stop", 0)
DATASET = PromptDataset([Row([1, row], {}) for row in range(50)])


class Generator:
    """Answers with one token, and records sampling parameters."""

    def __init__(self):
        self.requests: list[SamplingParams] = []

    @asynccontextmanager
    async def start_together(self):
        yield

    async def submit(self, prompt_ids, sampling):
        self.requests.append(sampling)
        return [Completion([1], [-1.0], "length", [0])] * sampling.n

    @property
    def seeds(self) -> list[int]:
        """Seeds of all samples: as in vLLM, sample i of a request has its seed + i."""
        return [request.seed + i for request in self.requests for i in range(request.n)]


class Tokenizer:
    def decode(self, token_ids):
        return ""


async def skip_rewards(samples, texts, max_tokens, where):
    """Leave rewards at 0."""


class Servers(Answering):
    """One server: the agent loop over a generator."""

    def __init__(self, generator):
        self._loop = SingleTurnLoop(generator, Tokenizer(), skip_rewards)

    def answers(self, prompts, sampling):
        rows = [Prompt([1], group) for group in prompts.array("group_ids").tolist()]
        return [Batch.collate(asyncio.run(self._loop.run_all(rows, sampling)))]


def make_pool(seed: int = 0, **settings) -> tuple[RolloutPool, Generator]:
    generator = Generator()
    return RolloutPool(Servers(generator), RolloutConfig(**settings), seed), generator


def test_a_request_carries_the_settings_of_sampling():
    pool, generator = make_pool(temperature=0.6, max_response_tokens=77)
    pool.generate(build_held_out_batch(DATASET, 2), n=3)
    expected = {"n": 3, "temperature": 0.6, "top_p": 1.0, "max_tokens": 77}
    assert len(generator.requests) == 2
    for request in generator.requests:
        assert {name: getattr(request, name) for name in expected} == expected


def test_no_two_samples_of_training_and_evaluation_share_a_seed():
    # Nor the lower 32 bits: torch's CPU generator reads no more.
    pool, generator = make_pool()
    for batch in itertools.islice(PromptBatches(DATASET, 10, seed=0), 20):
        pool.generate(batch, n=8)
    pool.generate(build_held_out_batch(DATASET, 50), n=1)
    assert len(generator.seeds) == 20 * 10 * 8 + 50
    assert len({seed % 2**32 for seed in generator.seeds}) == len(generator.seeds)


def test_evaluations_repeat_their_seeds():
    pool, generator = make_pool()
    for _ in range(2):
        pool.generate(build_held_out_batch(DATASET, 5), n=1)
    assert generator.seeds[:5] == generator.seeds[5:]


def test_an_evaluation_has_its_own_sampling_and_a_cache_apart():
    pool, generator = make_pool(temperature=0.6, stop=["</s>"], max_response_tokens=9)
    pool.generate(build_held_out_batch(DATASET, 1), n=1)
    pool.evaluate(build_held_out_batch(DATASET, 1), EvaluationConfig(num_samples=2, top_k=5))
    pool.evaluate(build_held_out_batch(DATASET, 1), EvaluationConfig(temperature=0.0, top_p=0.9))
    pool.evaluate(
        build_held_out_batch(DATASET, 1), EvaluationConfig(stop=[], max_response_tokens=7)
    )
    training, sampled, greedy, short = generator.requests
    assert (greedy.max_tokens, short.max_tokens, short.stop) == (9, 7, ())
    assert (training.cache, training.stop) == ("", ("</s>",))
    assert sampled.cache == greedy.cache != ""
    assert (sampled.n, sampled.temperature, sampled.top_k, sampled.top_p) == (2, 0.6, 5, 1.0)
    assert (greedy.temperature, greedy.top_p, greedy.stop) == (0.0, 0.9, ("</s>",))


def test_experts_are_requested_for_samples_of_training():
    pool, generator = make_pool()
    pool.generate(build_held_out_batch(DATASET, 1), n=1)
    pool = replace(pool, records_experts=True)
    pool.generate(build_held_out_batch(DATASET, 1), n=1)
    pool.generate(build_held_out_batch(DATASET, 1), n=1, is_greedy=True)  # a baseline
    pool.begin(build_held_out_batch(DATASET, 1), n=1)
    pool.evaluate(build_held_out_batch(DATASET, 1), EvaluationConfig())
    assert [request.experts_from for request in generator.requests] == [None, 0, 0, 0, None]


def test_a_long_run_does_not_reach_the_seeds_of_the_next_run():
    # Group 2**21 of 8 samples once had the seeds of group 0 under the next seed.
    late = build_held_out_batch(DATASET, 1).with_columns(group_ids=np.array([2**21]))
    first = next(PromptBatches(DATASET, 1, seed=0))
    (old, old_generator), (new, new_generator) = make_pool(seed=6), make_pool(seed=7)
    old.generate(late, n=8)
    new.generate(first, n=8)
    old_seeds, new_seeds = old_generator.seeds, new_generator.seeds
    assert not {s % 2**32 for s in old_seeds} & {s % 2**32 for s in new_seeds}


def test_runs_begin_far_from_each_other():
    # A hundred runs of 16,384 samples each: no two share a seed, nor its lower 32 bits.
    starts = sorted(draw_first_seed(seed) % 2**32 for seed in range(100))
    gaps = np.diff([*starts, starts[0] + 2**32])
    assert gaps.min() > 16_384


def test_seeds_are_taken_by_torch_whatever_the_run():
    for seed in (0, 1, MAX_SEED):
        for end in (draw_first_seed(seed) - 2**32, draw_first_seed(seed) + 2**32):
            assert 0 <= end < 2**63  # vLLM's GPU worker keeps them as int64
            torch.Generator().manual_seed(end)


def test_reward_parts_of_other_servers_are_nan_for_a_server_without_rewards():
    failed = replace(SAMPLE, reward_error="raised")
    scored = replace(SAMPLE, group_id=1, reward=0.5, reward_parts={"format": 1.0})

    class Two(Answering):
        def answers(self, prompts, sampling):
            return [Batch.collate([scored]), Batch.collate([failed])]

    prompts = Batch({"group_ids": np.array([0, 1])})
    batch = RolloutPool(Two(), RolloutConfig(), 0).generate(prompts, 1)
    assert batch.array("reward_errors").tolist() == ["raised", ""]
    np.testing.assert_array_equal(batch.array("reward/format"), [np.nan, 1.0])


def test_generate_returns_samples_in_the_order_of_their_prompts():
    class InAnotherOrder(Answering):
        def answers(self, prompts, sampling):
            batches = [[9], [7, 4], [2]]  # group ids
            return [Batch.collate([s for i in ids for s in self._make_group(i)]) for ids in batches]

        def _make_group(self, group_id):
            return [replace(SAMPLE, group_id=group_id, trajectory=number) for number in range(2)]

    prompts = Batch({"group_ids": np.array([7, 2, 9, 4])})
    batch = RolloutPool(InAnotherOrder(), RolloutConfig(), 0).generate(prompts, 2)
    assert batch.array("group_ids").tolist() == [7, 7, 2, 2, 9, 9, 4, 4]
    assert batch.array("trajectories").tolist() == [0, 1] * 4


def test_progress_and_on_samples_follow_new_samples():
    progress, num_new = [], []

    class OneByOne(Answering):
        def answers(self, prompts, sampling):
            return [Batch.collate([replace(SAMPLE, group_id=i)] * sampling.n) for i in range(3)]

        def collect(self, stream, wait_s, at_least=1):
            progress.append(str(ACTIVITY).partition(",")[0])
            first, *self.batches = self.batches
            return [first]

    prompts = Batch({"group_ids": np.arange(3)})
    with ACTIVITY.enter_phase("generate"):
        RolloutPool(OneByOne(), RolloutConfig(), 0).generate(
            prompts, 2, on_samples=lambda batches: num_new.append(sum(map(len, batches)))
        )
    assert progress == [f"generate {num}/6 samples" for num in (0, 2, 4)]
    assert num_new == [2, 2, 2]


def test_draft_metrics_are_of_all_drafts_since_the_last_call_and_missing_without():
    counts = [DraftCounts(10, 20, 5), DraftCounts()]
    servers: Any = SimpleNamespace(take_draft_counts=lambda: counts.pop(0))
    pool = RolloutPool(servers, RolloutConfig(speculative=SpeculativeConfig(2)), 0)
    assert pool.compute_draft_metrics() == {"drafts/acceptance": 0.25, "drafts/step_tokens": 1.5}
    assert pool.compute_draft_metrics() == {}
    assert RolloutPool(servers, RolloutConfig(), 0).compute_draft_metrics() == {}
