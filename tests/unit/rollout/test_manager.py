"""What the pool asks of its servers: the settings of sampling, and seeds that nobody shares."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import torch

from mcore_rl.agents.single_turn import Prompt, SingleTurnLoop
from mcore_rl.config.resolve import MAX_SEED
from mcore_rl.config.schema import EvaluationConfig, RolloutConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.datasets import PromptRow as Row
from mcore_rl.data.prompt_batches import PromptBatches, held_out_batch
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.observability.activity import ACTIVITY
from mcore_rl.rollout.manager import RolloutPool, first_seed
from tests.unit.rollout.answering import Answering

SAMPLE = Sample([5], [1], [1], [0.0], [0], "stop", 0)
DATASET = PromptDataset([Row([1, row], {}) for row in range(50)])


class Generator:
    """Answers with one token, and keeps what it was asked."""

    def __init__(self):
        self.asked: list[SamplingParams] = []

    @asynccontextmanager
    async def held(self):
        yield

    async def submit(self, prompt_ids, sampling):
        self.asked.append(sampling)
        return [Completion([1], [-1.0], "length", [0])] * sampling.n

    @property
    def seeds(self) -> list[int]:
        """Of all samples, as vLLM makes them: sample i of a request has its seed + i."""
        return [asked.seed + i for asked in self.asked for i in range(asked.n)]


class Tokenizer:
    def decode(self, token_ids):
        return ""


async def no_reward(samples, texts, max_tokens, where):
    """Leaves it at 0."""


class Servers(Answering):
    """One server: the agent loop over a generator."""

    def __init__(self, generator):
        self._loop = SingleTurnLoop(generator, Tokenizer(), no_reward)

    def answers(self, prompts, sampling):
        asked = [Prompt([1], group) for group in prompts.array("group_ids").tolist()]
        return [Batch.of(asyncio.run(self._loop.run_all(asked, sampling)))]


def pool(seed: int = 0, **settings) -> tuple[RolloutPool, Generator]:
    generator = Generator()
    return RolloutPool(Servers(generator), RolloutConfig(**settings), seed), generator


def test_a_request_carries_the_settings_of_sampling():
    made, generator = pool(temperature=0.6, max_response_tokens=77)
    made.generate(held_out_batch(DATASET, 2), n=3)
    wanted = {"n": 3, "temperature": 0.6, "top_p": 1.0, "max_tokens": 77}
    assert len(generator.asked) == 2
    for asked in generator.asked:
        assert {name: getattr(asked, name) for name in wanted} == wanted


def test_no_two_samples_of_training_and_evaluation_share_a_seed():
    """In the lower 32 bits either: torch's CPU generator reads no more."""
    made, generator = pool()
    for batch in itertools.islice(PromptBatches(DATASET, 10, seed=0), 20):
        made.generate(batch, n=8)
    made.generate(held_out_batch(DATASET, 50), n=1)
    assert len(generator.seeds) == 20 * 10 * 8 + 50
    assert len({seed % 2**32 for seed in generator.seeds}) == len(generator.seeds)


def test_evaluations_repeat_their_seeds():
    made, generator = pool()
    for _ in range(2):
        made.generate(held_out_batch(DATASET, 5), n=1)
    assert generator.seeds[:5] == generator.seeds[5:]


def test_an_evaluation_has_its_own_sampling_and_a_cache_apart():
    made, generator = pool(temperature=0.6, stop=["</s>"], max_response_tokens=9)
    made.generate(held_out_batch(DATASET, 1), n=1)
    made.evaluate(held_out_batch(DATASET, 1), EvaluationConfig(num_samples=2, top_k=5))
    made.evaluate(held_out_batch(DATASET, 1), EvaluationConfig(temperature=0.0, top_p=0.9))
    own = EvaluationConfig(stop=[], max_response_tokens=7)
    made.evaluate(held_out_batch(DATASET, 1), own)
    training, sampled, greedy, short = generator.asked
    assert (greedy.max_tokens, short.max_tokens, short.stop) == (9, 7, ())
    assert (training.cache, training.stop) == ("", ("</s>",))
    assert sampled.cache == greedy.cache != ""
    assert (sampled.n, sampled.temperature, sampled.top_k, sampled.top_p) == (2, 0.6, 5, 1.0)
    assert (greedy.temperature, greedy.top_p, greedy.stop) == (0.0, 0.9, ("</s>",))


def test_experts_are_asked_for_where_samples_are_trained():
    made, generator = pool()
    made.generate(held_out_batch(DATASET, 1), n=1)
    made = replace(made, records_experts=True)
    made.generate(held_out_batch(DATASET, 1), n=1)
    made.generate(held_out_batch(DATASET, 1), n=1, is_greedy=True)  # a baseline
    made.evaluate(held_out_batch(DATASET, 1), EvaluationConfig())
    assert [asked.experts_from for asked in generator.asked] == [None, 0, None, None]


def test_a_long_run_does_not_reach_the_seeds_of_the_next_run():
    """Group 2**21 of 8 samples has had the seeds of group 0 under the next seed."""
    late = held_out_batch(DATASET, 1).with_columns(group_ids=np.array([2**21]))
    first = next(PromptBatches(DATASET, 1, seed=0))
    (old, old_asked), (new, new_asked) = pool(seed=6), pool(seed=7)
    old.generate(late, n=8)
    new.generate(first, n=8)
    assert not {s % 2**32 for s in old_asked.seeds} & {s % 2**32 for s in new_asked.seeds}


def test_runs_begin_far_from_each_other():
    """A hundred runs of 16,384 samples each: no two share a seed, in 32 bits either."""
    starts = sorted(first_seed(seed) % 2**32 for seed in range(100))
    gaps = np.diff([*starts, starts[0] + 2**32])
    assert gaps.min() > 16_384


def test_seeds_are_taken_by_torch_whatever_the_run():
    for seed in (0, 1, MAX_SEED):
        for end in (first_seed(seed) - 2**32, first_seed(seed) + 2**32):
            assert 0 <= end < 2**63  # vLLM's GPU worker keeps them as int64
            torch.Generator().manual_seed(end)


def test_a_server_without_any_reward_has_the_parts_of_the_others_as_missing():
    failed = replace(SAMPLE, reward_error="raised")
    scored = replace(SAMPLE, group_id=1, reward=0.5, reward_parts={"format": 1.0})

    class Two(Answering):
        def answers(self, prompts, sampling):
            return [Batch.of([scored]), Batch.of([failed])]

    asked = Batch({"group_ids": np.array([0, 1])})
    batch = RolloutPool(Two(), RolloutConfig(), 0).generate(asked, 1)
    assert batch.array("reward_errors").tolist() == ["raised", ""]
    np.testing.assert_array_equal(batch.array("reward/format"), [np.nan, 1.0])


def test_samples_are_counted_and_heard_as_they_come():
    told, heard = [], []

    class OneByOne(Answering):
        def answers(self, prompts, sampling):
            return [Batch.of([replace(SAMPLE, group_id=i)] * sampling.n) for i in range(3)]

        def collect(self, stream, wait_s, at_least=1):
            told.append(str(ACTIVITY).partition(",")[0])
            first, *self.found = self.found
            return [first]

    asked = Batch({"group_ids": np.arange(3)})
    with ACTIVITY.enter_phase("generate"):
        RolloutPool(OneByOne(), RolloutConfig(), 0).generate(
            asked, 2, heard=lambda found: heard.append(sum(map(len, found)))
        )
    assert told == [f"generate {came}/6 samples" for came in (0, 2, 4)]
    assert heard == [2, 2, 2]
