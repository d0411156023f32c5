"""A loop turns completions into samples: text without the end token, rewards split, seeds apart."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from mcore_rl.agents.single_turn import Prompt, SingleTurnLoop
from mcore_rl.config.schema import RewardConfig
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rewards.registry import get_registry

_EOS = 9


class Letters:
    """A tokenizer of one letter a token; messages become the token ids of their contents."""

    def decode(self, token_ids):
        return "".join(chr(ord("a") + i) for i in token_ids)

    def apply_chat_template(self, conversation, **options):
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return [ord(c) - ord("a") for m in conversation for c in m["content"]]


class Echo:
    """Answers with the prompt; every second completion stops at the end of sequence."""

    def __init__(self):
        self.requests = []

    @asynccontextmanager
    async def start_together(self):
        yield

    async def submit(self, prompt_ids, sampling):
        self.requests.append(sampling)
        await asyncio.sleep(0)
        if _EOS in prompt_ids:
            raise RuntimeError("broken prompt")
        stopped = [*prompt_ids, _EOS]
        return [
            Completion(stopped, [-0.5] * len(stopped), "stop", [4] * len(stopped))
            if i % 2
            else Completion(prompt_ids, [-1.0] * len(prompt_ids), "length", [4] * len(prompt_ids))
            for i in range(sampling.n)
        ]


async def _reward(samples, texts, max_tokens, where):
    for sample, text in zip(samples, texts, strict=True):
        sample.reward_parts = {"right": float(text == sample.fields["answer"])}
        sample.reward = sample.reward_parts["right"] + (sample.finish_reason == "stop")


def test_a_sample_holds_what_was_chosen_and_what_it_was_worth():
    loop = SingleTurnLoop(Echo(), Letters(), _reward)
    samples = asyncio.run(loop.run([0, 1], SamplingParams(n=2), 7, {"answer": "ab"}))
    cut, stopped = samples
    assert (cut.response_ids, cut.finish_reason, cut.reward) == ([0, 1], "length", 1.0)
    assert (stopped.response_ids, stopped.finish_reason) == ([0, 1, _EOS], "stop")
    assert stopped.reward == 2.0  # the text is judged without the end token
    assert stopped.reward_parts == {"right": 1.0}
    assert stopped.response_mask == [1, 1, 1]
    assert stopped.rollout_log_probs == [-0.5] * 3
    assert stopped.weight_versions == [4] * 3
    assert (stopped.group_id, stopped.fields) == (7, {"answer": "ab"})
    assert [(s.trajectory, s.status) for s in samples] == [(0, "truncated"), (1, "finished")]


def test_messages_are_rendered_and_groups_come_back_in_order():
    loop = SingleTurnLoop(Echo(), Letters(), _reward)
    prompts = [
        Prompt([{"role": "user", "content": "ca"}], 0, {"answer": "ca"}),
        Prompt([1], 1, {"answer": "x"}),
    ]
    samples = asyncio.run(loop.run_all(prompts, SamplingParams(n=2)))
    assert [(s.group_id, s.prompt_ids) for s in samples] == [(0, [2, 0])] * 2 + [(1, [1])] * 2


def test_no_two_completions_of_a_run_share_a_seed():
    generator = Echo()
    loop = SingleTurnLoop(generator, Letters(), _reward)
    prompts = [Prompt([1], group, {"answer": ""}) for group in (0, 1, 2, -1)]
    sampling = SamplingParams(n=4, temperature=0.7, top_p=0.9, max_tokens=33, seed=100)
    asyncio.run(loop.run_all(prompts, sampling))
    # The engine counts on from here for the n completions. All else arrives as it was sent.
    assert generator.requests == [
        replace(sampling, seed=100 + 4 * group, group=str(group)) for group in (0, 1, 2, -1)
    ]


def test_the_first_failure_is_raised():
    loop = SingleTurnLoop(Echo(), Letters(), _reward)
    prompts = [Prompt([0], 0, {"answer": ""}), Prompt([_EOS], 1, {"answer": ""})]
    with pytest.raises(RuntimeError, match="broken prompt"):
        asyncio.run(loop.run_all(prompts, SamplingParams()))


class Holding(Echo):
    """Knows of each request whether it was made while requests are held."""

    def __init__(self, fault: str = ""):
        super().__init__()
        self.is_held, self.were_held, self._fault = False, [], fault

    @asynccontextmanager
    async def start_together(self):
        await asyncio.sleep(0.01)
        if self._fault:
            raise OSError(self._fault)
        self.is_held = True
        yield
        self.is_held = False

    async def submit(self, prompt_ids, sampling):
        self.were_held.append(self.is_held)
        return await super().submit(prompt_ids, sampling)


def test_groups_start_together_and_each_ends_on_its_own():
    async def work():
        generator = Holding()
        loop = SingleTurnLoop(generator, Letters(), _reward)
        prompts = [Prompt([group], group, {"answer": ""}) for group in (_EOS, 1, 2)]
        groups = loop.start(prompts, SamplingParams(n=2))
        groups[2].cancel()
        broken, fine, cancelled = await asyncio.gather(*groups, return_exceptions=True)
        assert generator.were_held == [True] * 2
        assert str(broken) == "broken prompt"
        assert [sample.group_id for sample in fine] == [1, 1]
        assert isinstance(cancelled, asyncio.CancelledError)

    asyncio.run(work())


def test_all_groups_raise_why_they_cannot_start():
    loop = SingleTurnLoop(Holding("it sleeps"), Letters(), _reward)

    async def work():
        groups = loop.start([Prompt([1], 1), Prompt([1], 2)], SamplingParams())
        results = await asyncio.gather(*groups, return_exceptions=True)
        assert [str(error) for error in results] == ["it sleeps"] * 2

    asyncio.run(work())


def test_a_reward_gets_the_prompt_and_the_limit_of_responses():
    calls = []

    async def reward(samples, texts, max_tokens, where):
        calls.append((len(samples), max_tokens, where))

    loop = SingleTurnLoop(Echo(), Letters(), reward)
    asyncio.run(loop.run_all([Prompt([0], 3, row=12)], SamplingParams(n=2, max_tokens=33)))
    assert calls == [(2, 33, "row 12 of the data (group 3)")]


BLOCKS = """
import threading

from mcore_rl.rewards.registry import run_in_thread

all_sampled = threading.Event()
on_main_thread = []

@run_in_thread
def blocks(text, fields, finish_reason):
    on_main_thread.append(threading.current_thread() is threading.main_thread())
    return {"reward": float(all_sampled.wait(60))}
"""


def test_a_reward_that_blocks_its_thread_delays_no_generation(tmp_path):
    # The reward of the first prompt waits for the last one; the server has room for one.
    (tmp_path / "own.py").write_text(BLOCKS)
    name = f"{tmp_path}/own.py:blocks"
    namespace, room = get_registry()[name].__globals__, asyncio.Lock()

    class OneAtATime(Echo):
        async def submit(self, prompt_ids, sampling):
            async with room:
                completions = await super().submit(prompt_ids, sampling)
            if len(self.requests) == 4:
                namespace["all_sampled"].set()
            return completions

    loop = SingleTurnLoop(OneAtATime(), Letters(), RewardManager(RewardConfig(name)))
    prompts = [Prompt([0], group) for group in range(4)]
    samples = asyncio.run(loop.run_all(prompts, SamplingParams(n=1)))
    assert [sample.reward for sample in samples] == [1.0] * 4
    assert namespace["on_main_thread"] == [False] * 4
