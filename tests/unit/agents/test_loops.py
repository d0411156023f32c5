"""Trajectories of a scripted policy: their tokens, masks, log-probs, versions and rewards."""

from __future__ import annotations

import asyncio
import importlib
import json
import runpy
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mcore_rl
from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec
from mcore_rl.agents.environments.base import EnvironmentStep
from mcore_rl.agents.loops import Agent, Task
from mcore_rl.agents.runner import AgentRunner, TrajectoryTimeout
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.agents.trajectory import hash_state
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AgentConfig, FilterConfig, RewardConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.sample import RoutedExperts, Sample
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rewards.registry import RewardError
from mcore_rl.trainers.step_samples import describe_samples
from mcore_rl.trainers.training_batch import mask_truncated
from tests.pages import ROOT
from tests.unit.agents.families import tokenizer_of
from tests.unit.repo.test_docs import write_recipes
from tests.unit.rewards.test_http_reward import SkippedTime

THIS_FILE = __file__
TOKENIZER = tokenizer_of("qwen3")
END = TOKENIZER.eos_token_id
MESSAGES = [{"role": "user", "content": "How much is 6 * 7?"}]


def call(expression: str) -> str:
    function = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(function)}\n</tool_call>"


@dataclass
class Scripted:
    """Says one text after the other, each with log-probs and a version of its own."""

    says: Sequence[str]
    prompts: list[list[int]] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)
    experts_from: list[int | None] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def start_together(self) -> AsyncIterator[None]:
        yield

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        number = len(self.prompts)
        self.prompts.append(prompt_ids)
        self.seeds.append(sampling.seed)
        self.experts_from.append(sampling.experts_from)
        self.adapters.append(sampling.adapter)
        if self.says[number] == "waits":
            await asyncio.sleep(60)
        if self.says[number] == "dies":
            raise ConnectionError("the server is gone")
        ids = [*TOKENIZER.encode(self.says[number], add_special_tokens=False), END]
        sampled, routed = ids[: sampling.max_tokens], None
        if (start := sampling.experts_from) is not None:
            num_tokens = len(prompt_ids) + len(sampled) - 1 - start
            routed = RoutedExperts(start, np.full((num_tokens, 1, 2), number, np.uint8))
        return [
            Completion(
                token_ids=sampled,
                log_probs=[-0.1 * (number + 1)] * len(sampled),
                finish_reason="stop" if len(sampled) == len(ids) else "length",
                weight_versions=[5 + number] * len(sampled),
                routed_experts=routed,
            )
        ]


async def is_42(samples: list[Sample], texts: list[str], max_tokens: int, where: str) -> None:
    for sample, text in zip(samples, texts, strict=True):
        sample.reward = float(text == "42")
        sample.reward_parts = {"length": float(len(text))}


def run(
    says: Sequence[str],
    config: AgentConfig,
    max_context: int = 4096,
    *,
    stops: bool = True,
    **options,
) -> tuple[list[Sample], Scripted]:
    policy = Scripted(says)
    reward = options.get("reward", is_42)
    runner = AgentRunner(policy, TOKENIZER, reward, config, max_context, stops_on_error=stops)
    prompt = Prompt([], 3, {"answer": "42"}, row=7, messages=MESSAGES)
    sampling = SamplingParams(
        n=1,
        seed=100,
        max_tokens=options.get("max_tokens", 1000),
        experts_from=options.get("experts_from"),
    )

    async def run_and_close() -> list[Sample]:
        try:
            return await runner.run_all([prompt], sampling)
        finally:
            await runner.close()

    return asyncio.run(run_and_close()), policy


def text_of(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids))


TOOLS = AgentConfig(loop="tools", tools=["calculator"])


def test_a_tool_loop_is_one_sample_whose_tool_tokens_are_context():
    [sample], policy = run([call("6 * 7"), "42"], TOOLS)
    first = TOKENIZER.encode(call("6 * 7"), add_special_tokens=False)
    last = TOKENIZER.encode("42", add_special_tokens=False)
    between = len(sample.response_ids) - len(first) - len(last) - 2
    mask = [1] * (len(first) + 1) + [0] * between + [1] * (len(last) + 1)
    assert sample.response_mask == mask
    assert sample.prompt_ids == policy.prompts[0]
    assert [*sample.prompt_ids, *sample.response_ids[: -len(last) - 1]] == policy.prompts[1]
    chosen = [[-0.1, 5]] * (len(first) + 1) + [[0.0, -1]] * between + [[-0.2, 6]] * (len(last) + 1)
    pairs = zip(sample.rollout_log_probs, sample.weight_versions, strict=True)
    assert [list(pair) for pair in pairs] == chosen
    render = TOKENIZER.apply_chat_template(
        [
            *MESSAGES,
            {"role": "assistant", "content": call("6 * 7")},
            {"role": "tool", "content": "42"},
        ],
        tools=[json.loads(json.dumps(spec)) for spec in _schemas()],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text_of(policy.prompts[1]) == render
    assert (sample.reward, sample.reward_parts) == (1.0, {"length": 2.0})
    assert (sample.finish_reason, sample.status, sample.fields) == (
        "stop", "finished", {"answer": "42"},
    )  # fmt: skip
    assert policy.seeds[0] == 100 + 3 and policy.seeds[1] not in (None, 103)


def _schemas() -> list[dict]:
    from mcore_rl.agents.tools.built_in import calculator

    return [calculator.tool.schema()]


def test_turns_bring_the_experts_of_their_own_tokens_only():
    [sample], policy = run([call("6 * 7"), "42"], TOOLS, experts_from=0)
    first = sample.response_mask.index(0)  # of the tool, after the tokens of the call
    assert policy.experts_from == [0, len(sample.prompt_ids) + first - 1]
    ids = np.concatenate([part.ids for part in sample.routed_experts])
    assert len(ids) == len(sample.prompt_ids) + len(sample.response_ids) - 1
    assert ids[:, 0, 0].tolist() == [0] * policy.experts_from[1] + [1] * len(
        ids[policy.experts_from[1] :]
    )
    [sample], policy = run([call("6 * 7"), "42"], TOOLS)
    assert (policy.experts_from, sample.routed_experts) == ([None, None], ())


def test_calls_of_one_turn_are_all_answered_and_wrong_ones_with_errors():
    says = [
        call("1 + 1") + call("1 / 0") + "<tool_call>\n{\n</tool_call>",
        '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>',
        "42",
    ]
    [sample], policy = run(says, TOOLS)
    text = text_of(policy.prompts[1][len(policy.prompts[0]) :])
    assert text.count("<tool_response>") == 3
    assert "\n2\n" in text and "Error: " in text and "malformed" in text
    text = text_of(policy.prompts[2][len(policy.prompts[1]) :])
    assert "there is no tool 'nothing'; there are: calculator" in text
    assert sample.reward == 1


def test_turns_tokens_and_time_are_limited():
    [sample], policy = run([call("1")] * 3, AgentConfig("tools", tools=["calculator"], max_turns=2))
    assert len(policy.prompts) == 2
    assert (sample.status, sample.finish_reason, sample.reward) == ("truncated", "length", 0.0)
    [sample], policy = run(["x" * 400], TOOLS, max_tokens=5)
    assert (len(sample.response_ids), sample.status) == (5, "truncated")
    start = len(policy.prompts[0])
    [sample], policy = run([call("1"), "42"], TOOLS, max_context=start + 8)
    assert (len(sample.response_ids), sample.finish_reason) == (8, "length")
    config = AgentConfig("tools", tools=["calculator"], timeout_s=2.0)
    [sample], _ = run([call("1"), "waits"], config)
    assert (sample.status, sample.reward, sample.reward_error) == ("aborted", 0.0, "")
    assert sum(sample.response_mask) == len(TOKENIZER.encode(call("1"))) + 1


def count(text: str) -> int:
    """Return how many tokens a turn has."""
    return len(TOKENIZER.encode(text, add_special_tokens=False)) + 1


def test_a_turn_has_the_rest_of_the_response_and_tokens_of_tools_are_none_of_it():
    first, budget = count(call("1 + 1")), count(call("1 + 1")) + 9
    [sample], _ = run([call("1 + 1"), "x" * 400], TOOLS, max_tokens=budget)
    assert [span.end - span.start for span in sample.turn_spans] == [first, 9]
    assert sum(sample.response_mask) == budget < len(sample.response_ids)
    assert (sample.status, sample.finish_reason) == ("truncated", "length")
    # Exactly enough for a second call, and nothing left for the answer.
    budget = first + count(call("2 + 2"))
    [sample], policy = run([call("1 + 1"), call("2 + 2"), "4"], TOOLS, max_tokens=budget)
    assert (len(policy.prompts), sample.status, sample.reward) == (2, "truncated", 0.0)
    [sample], _ = run([call("1 + 1"), "42"], TOOLS, max_tokens=first + count("42"))
    assert (sample.status, sample.reward) == ("finished", 1.0)


@pytest.mark.parametrize(("turn_tokens", "lengths"), [(4, [4, 4, 2]), (9, [9, 1]), (0, [10])])
def test_a_limit_of_a_turn_gives_no_more_than_the_rest(turn_tokens, lengths):
    config = AgentConfig(f"{THIS_FILE}:Heedless", max_turn_tokens=turn_tokens)
    [sample], _ = run(["x" * 90] * 3, config, max_tokens=10)
    assert [span.end - span.start for span in sample.turn_spans] == lengths


def test_overlong_counts_the_tokens_of_turns_and_is_at_least_minus_1():
    def punish(says: Sequence[str], max_tokens: int) -> float:
        judge = RewardManager(RewardConfig("overlong", {"buffer_tokens": 10}), max_tokens)
        [sample], _ = run(says, TOOLS, max_tokens=max_tokens, reward=judge)
        assert len(sample.response_ids) > max_tokens
        return sample.reward

    says = [call("1 + 1"), call("2 + 2"), "42"]
    used = sum(map(count, says))
    assert punish(says, used + 10) == 0.0
    assert punish(says, used + 3) == pytest.approx(-0.7)  # equation 13 of 2503.14476
    assert punish(says, used) == -1.0
    assert punish([*says[:2], "x" * 99], used) == -1.0


class Heedless:
    """A loop that knows of no limit."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, task: Task) -> list[Sample]:
        session, messages = self._agent.session(task), task.messages
        for _ in range(3):
            answer = await session.ask(messages)
            messages = (ChatMessage("user", "Go on."),)
        return await self._agent.score_samples(task, session, "finished", answer.parsed.content)


@pytest.mark.parametrize(
    ("says", "config", "room"),
    [
        ([call("1")] * 2, {"max_turns": 2}, None),
        ([call("1"), "waits"], {"timeout_s": 1.0}, None),
        ([call("1"), "42"], {}, 30),
        (["40", "41", "42"], {"loop": f"{THIS_FILE}:Heedless"}, 15),
        (["40", "waits"], {"loop": f"{THIS_FILE}:Heedless", "timeout_s": 1.0}, None),
    ],
    ids=["turns", "time", "context", "context of a user's loop", "time of a user's loop"],
)
def test_every_limit_of_a_trajectory_masks_it(says, config, room):
    config, max_context = replace(TOOLS, **config), 4096
    if room is not None:
        [sample], _ = run(["42"] * 3, config)
        max_context = len(sample.prompt_ids) + room
    [sample], _ = run(says, config, max_context)
    batch = Batch.collate([sample])
    assert describe_samples(batch)["truncated"] == 1
    masked = mask_truncated(batch, FilterConfig(mask_truncated=True)).jagged("response_mask")
    assert sum(sample.response_mask) > 0 and not masked.values.any()


def test_a_prompt_without_room_fails_a_loop_that_knows_of_no_limit():
    with pytest.raises(RewardError, match=r"ContextFullError: .* of 5 tokens are used"):
        run(["42"], AgentConfig(f"{THIS_FILE}:Heedless"), 5)


class Guessing:
    """Tells whether a guess is too low; 1 for the number, 0.1 for each guess in words."""

    tools: Sequence[ToolSpec] = ()
    closed = 0

    def __init__(self, fields: dict[str, str]) -> None:
        self._number = int(fields["answer"])

    async def reset(self) -> Sequence[ChatMessage]:
        return [ChatMessage("user", "Guess.")]

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        if turn.content == "broken":
            raise ValueError("out of order")
        if turn.content == str(self._number):
            return EnvironmentStep(reward=1.0, is_done=True)
        return EnvironmentStep((ChatMessage("user", "Too low."),), reward=0.1)

    async def close(self) -> None:
        Guessing.closed += 1


GUESSING = AgentConfig("environment", environment=f"{THIS_FILE}:Guessing")


def test_an_environment_answers_until_it_is_done_and_its_rewards_add_up():
    [sample], policy = run(["40", "42"], GUESSING)
    assert "Guess." in text_of(policy.prompts[0]) and "Too low." in text_of(policy.prompts[1])
    assert (sample.reward, sample.status) == (pytest.approx(1.1), "finished")
    config = replace(GUESSING, max_turn_tokens=9)
    [sample], policy = run(["40", "x" * 90, "42"], config)  # with a turn cut off
    assert (sample.reward, sample.status) == (pytest.approx(1.2), "finished")
    assert sample.response_mask.count(1) == 2 * len(TOKENIZER.encode("42<|im_end|>")) + 9
    assert text_of(policy.prompts[2]).count("x<|im_end|>") == 1
    ends = [span.end - 1 for span in sample.turn_spans]
    paid = {position: reward for position, reward in enumerate(sample.process_rewards) if reward}
    assert paid == dict(zip(ends, [0.1, 0.1, 1.0], strict=True))
    start = len(policy.prompts[0])
    [sample], _ = run(["40", "x" * 90], GUESSING, max_context=start + 30)
    assert (sample.reward, sample.status) == (pytest.approx(0.2), "truncated")


def test_tokens_have_the_state_that_their_turn_was_chosen_in():
    # The state is the last text for the policy, unless the environment names one.
    [sample], _ = run(["40", "41", "42"], GUESSING)
    first, second, third = (sample.state_ids[span.start] for span in sample.turn_spans)
    assert first == hash_state("How much is 6 * 7?\nGuess.")
    assert second == third == hash_state("Too low.")
    of_turn = {-1 if mask == 0 else state for mask, state in states_of(sample)}
    assert of_turn == {-1, first, second} == {state for _, state in states_of(sample)}
    config = AgentConfig("environment", environment=f"{THIS_FILE}:Named", timeout_s=2.0)
    [sample], _ = run(["40", "41", "waits"], config)
    assert sample.status == "aborted"
    assert {state for mask, state in states_of(sample) if mask} == {first, hash_state("below 42")}
    [sample], _ = run([call("6 * 7"), "42"], TOOLS)
    assert not sample.state_ids


def states_of(sample: Sample) -> list[tuple[int, int]]:
    return list(zip(sample.response_mask, sample.state_ids, strict=True))


class Named(Guessing):
    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        return replace(await super().step(turn), state=f"below {self._number}")


def test_an_environment_that_raises_stops_the_run_or_marks_its_samples():
    with pytest.raises(
        RewardError, match=r"agent.loop='environment' raised ValueError: out of .*7"
    ):
        run(["40", "broken"], GUESSING)
    [sample], _ = run(["40", "broken"], GUESSING, stops=False)
    assert (sample.status, sample.reward) == ("failed", 0.0)
    assert "out of order" in sample.reward_error
    assert sum(sample.response_mask) > 0


@pytest.fixture
def page(tmp_path) -> Path:
    write_recipes((ROOT / "docs" / "agents.md").read_text(), tmp_path)
    return tmp_path / "here"


def test_the_code_of_the_page_runs(page):
    config = AgentConfig("environment", environment=f"{page}/guessing.py:Guessing")
    [sample], policy = run(["50", "well", "41", "42"], config)
    assert "Too high." in text_of(policy.prompts[1]) and "A number" in text_of(policy.prompts[2])
    assert (sample.reward, sample.status) == (pytest.approx(0.9), "finished")
    [sample], policy = run(["41", "42"], AgentConfig(f"{page}/twice.py:CheckedTwice"))
    assert "Check that" in text_of(policy.prompts[1]) and sample.reward == 1
    config = AgentConfig("tools", tools=["calculator", f"{page}/tools.py:weather"])
    call_text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    [sample], policy = run([call_text, "42"], config)
    assert "20 degrees celsius in Oslo" in text_of(policy.prompts[1])


def test_the_tool_and_the_reward_of_the_tutorial_work(tmp_path, monkeypatch):
    """Its script is run without a model; a call that fails is answered as the page says."""
    write_recipes((ROOT / "docs" / "tutorial_agent.md").read_text(), tmp_path)
    runs: list[tuple[Any, ...]] = []
    monkeypatch.setattr(mcore_rl, "grpo", lambda *args, **options: runs.append((args, options)))
    script = runpy.run_path(str(tmp_path / "here" / "train.py"))
    [((_, score, rows), options)] = runs
    assert rows[9] == {"prompt": "What is 32*41?", "answer": "1312"}
    config = mcore_rl.load_recipe(
        "", *(f"{k}={v}" for k, v in options["settings"].items() if k != "agent.tools")
    )
    tools = [f"{tmp_path / 'here' / 'train.py'}:calculator"]
    [sample], policy = run(
        [call("6*seven"), call("6*7"), "#### 42"], replace(config.agent, tools=tools)
    )
    answers = [text_of(prompt) for prompt in policy.prompts[1:]]
    assert "Error: ValueError: invalid literal" in answers[0]
    assert "<tool_response>\n42\n" in answers[1]
    assert (sample.status, len(policy.prompts)) == ("finished", 3)
    expected = {"reward": pytest.approx(0.9), "right": True, "calls": 2}
    assert score("#### 42", {"answer": "42"}, "stop", ["", "", "#### 42"]) == expected
    assert script["calculator"]("12*34") == "408"


def test_a_slow_reward_takes_no_time_of_its_trajectory():
    async def slow(samples: list[Sample], texts: list[str], max_tokens: int, where: str) -> None:
        await asyncio.sleep(2.5)
        await is_42(samples, texts, max_tokens, where)

    config = AgentConfig("tools", tools=["calculator"], timeout_s=2.0)
    [sample], _ = run(["42"], config, reward=slow)
    assert (sample.status, sample.reward) == ("finished", 1.0)
    config = AgentConfig(f"{THIS_FILE}:AsksAgain", timeout_s=2.0)
    [sample], _ = run(["42", "waits"], config, reward=slow)
    assert (sample.status, sample.reward) == ("aborted", 0.0)


class AsksAgain:
    """A loop that goes on after a reward."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, task: Task) -> list[Sample]:
        session = self._agent.session(task)
        answer = await session.ask(task.messages)
        await self._agent.score_samples(task, session, "finished", answer.parsed.content)
        await session.ask([ChatMessage("user", "Once more.")])
        raise AssertionError("the policy waits longer than the trajectory may")


def test_rewards_are_computed_while_other_trajectories_are_generated():
    # The reward of the first trajectory waits for the last one; the server has room for one.
    all_sampled, room = asyncio.Event(), asyncio.Lock()

    async def slow(samples: list[Sample], texts: list[str], max_tokens: int, where: str) -> None:
        async with asyncio.timeout(60):
            await all_sampled.wait()
        await is_42(samples, texts, max_tokens, where)

    class OneAtATime(Scripted):
        async def submit(self, *args, **more) -> list[Completion]:
            async with room:
                await asyncio.sleep(0)
                completions = await super().submit(*args, **more)
                if len(self.prompts) == len(self.says):
                    all_sampled.set()
                return completions

    policy = OneAtATime(["42"] * 4)
    runner = AgentRunner(policy, TOKENIZER, slow, TOOLS, 4096, stops_on_error=True)
    prompts = [Prompt([], n, {"answer": "42"}, messages=MESSAGES) for n in range(4)]
    samples = asyncio.run(runner.run_all(prompts, SamplingParams(n=1, max_tokens=1000)))
    assert [sample.reward for sample in samples] == [1.0] * 4


def test_a_server_that_fails_is_no_failure_of_the_environment():
    with pytest.raises(ConnectionError, match="the server is gone"):
        run(["40", "dies"], GUESSING, stops=False)


class TwoSpeakers:
    """A loop of a user: two conversations, both trained."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, task: Task) -> list[Sample]:
        samples = []
        for _ in range(2):
            session = self._agent.session(task)
            await session.ask(task.messages)
            samples += self._agent.build_samples(task, session, "finished", 0.5)
        return samples


def test_a_loop_of_ones_own_may_give_several_samples_of_one_trajectory():
    samples, _ = run(["a", "b"], AgentConfig(f"{THIS_FILE}:TwoSpeakers"))
    assert [(s.group_id, s.trajectory, s.segment, s.reward) for s in samples] == [
        (3, 0, 0, 0.5), (3, 0, 1, 0.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AgentConfig("tool"), "agent.loop='tool' is unknown; allowed: environment, program, tools"),
        (AgentConfig("tools", tools=["abacus"]), "agent.tools has 'abacus'; allowed: calculator"),
        (AgentConfig("tools", tools=["search"]), "agent.search_file=''"),
    ],
)
def test_what_is_unknown_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        run(["42"], config)


async def ended_in_time(limit: TrajectoryTimeout, *pauses_s: float) -> bool:
    """Return whether a trajectory that is paused for each of these times, in turn, ended."""
    try:
        async with limit:
            for pause_s in pauses_s:
                with limit.paused(), limit.paused():
                    await asyncio.sleep(pause_s)
            await asyncio.sleep(0.05)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(("limit_s", "ends"), [(0.02, False), (0.2, True)])
def test_time_stands_still_while_it_is_stopped(limit_s, ends):
    async def work() -> bool:
        return await ended_in_time(TrajectoryTimeout(limit_s), 0.3, 0.1)

    clock = SkippedTime()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.time_s  # type: ignore[method-assign]
    try:
        assert loop.run_until_complete(work()) is ends
    finally:
        loop.close()


def test_a_trajectory_whose_time_is_over_can_be_stopped_while_it_ends():
    async def work() -> bool:
        limit = TrajectoryTimeout(0.01)
        try:
            async with limit:
                try:
                    await asyncio.sleep(10)
                finally:
                    with limit.paused():
                        await asyncio.sleep(0.01)
        except TimeoutError:
            return True
        return False

    assert asyncio.run(work())


class OldNames:
    """A loop that uses the names of the last release."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, task: Task) -> list[Sample]:
        self._agent.begin_anew(task)
        async with self._agent.served(task) as api:
            session = api.session
            answer = await session.ask(task.messages)
        await self._agent.judged(task, session, "finished", answer.parsed.content)
        return self._agent.rewarded(task, session, "finished", 0.25)


def test_methods_of_an_agent_keep_their_old_names_for_one_release():
    with pytest.warns(FutureWarning) as caught:
        [sample], _ = run(["42"], AgentConfig(f"{THIS_FILE}:OldNames"))
    assert sample.reward == 0.25
    assert {str(warning.message).partition(" is")[0] for warning in caught} == {
        "agent.begin_anew", "agent.served", "agent.judged", "agent.rewarded",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("codec", "chat_template.codec", "ChatMessage"),
        ("environment", "environments.base", "EnvironmentStep"),
    ],
)
def test_documented_import_paths_keep_working_for_one_release(old, new, name):
    sys.modules.pop(f"mcore_rl.agents.{old}", None)
    with pytest.warns(FutureWarning, match=f"is now mcore_rl.agents.{new}"):
        module = importlib.import_module(f"mcore_rl.agents.{old}")
    assert getattr(module, name) is getattr(importlib.import_module(f"mcore_rl.agents.{new}"), name)
