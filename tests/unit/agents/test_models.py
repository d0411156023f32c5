"""Loops with several models and several roles: who says what, who is trained, who is compared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from mcore_rl.agents.chat_template.validation import select_codec
from mcore_rl.agents.frozen_model import AdapterGenerator, FrozenModel, make_judge_post
from mcore_rl.agents.loops import Agent, Task
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.session import draw_session_seed, draw_turn_seed
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.agents.trajectory import build_samples
from mcore_rl.algorithms.advantages import compute_advantages
from mcore_rl.algorithms.sample_choice import filter_groups
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AgentConfig, FilterConfig, RewardConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rewards.registry import RewardError
from mcore_rl.trainers.step_samples import describe_samples
from tests.pages import ROOT
from tests.unit.agents.test_loops import TOKENIZER, Scripted, text_of

THIS_FILE = __file__
STOP = "###STOP###"
CODEC = select_codec(TOKENIZER)


class Frozen(Scripted):
    """A server of another model: its tokens are of no version of the policy."""

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        [completion] = await super().submit(prompt_ids, sampling, request_id=request_id)
        completion.weight_versions[:] = [-1] * len(completion.token_ids)
        return [completion]


async def word_count(samples: list[Sample], texts: list[str], max_tokens: int, where: str) -> None:
    for sample, text in zip(samples, texts, strict=True):
        sample.reward = float(len(text.split()))


def run(
    config: AgentConfig,
    policy: Sequence[str],
    frozen: Sequence[str] = (),
    messages: Sequence[dict[str, str]] = (),
    *,
    stops: bool = True,
    max_context: int = 4096,
) -> tuple[list[Sample], Scripted, Frozen]:
    speaks, other = Scripted(policy), Frozen(frozen)
    runner = AgentRunner(
        speaks, TOKENIZER, word_count, config, max_context, stops_on_error=stops, models=["user"]
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=50)
    runner.models["user"] = FrozenModel(other, CODEC, sampling, 4096)
    prompt = Prompt([], 3, {"answer": "42", "item": "tea"}, row=7, messages=messages)
    policy_sampling = SamplingParams(n=1, seed=100, max_tokens=1000)
    return asyncio.run(runner.run_all([prompt], policy_sampling)), speaks, other


def chat(*messages: tuple[str, str]) -> str:
    """Return a prompt as the chat template writes it."""
    return TOKENIZER.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        add_generation_prompt=True,
        tokenize=False,
    )


def user(**settings: object) -> AgentConfig:
    user_settings = {"prompt": "You want {item}.", "greeting": "Yes?"} | settings
    return AgentConfig("user", settings=user_settings, max_turns=3)


def length(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False))


def test_each_side_sees_the_other_as_its_user_and_the_policy_alone_is_trained():
    row = [{"role": "system", "content": "Sell."}, {"role": "user", "content": "Tea."}]
    [sample], policy, other = run(user(), ["Which?", "One euro."], ["Green.", f"Bye {STOP}"], row)
    assert [text_of(ids) for ids in policy.prompts] == [
        chat(("system", "Sell."), ("user", "Tea.")),
        chat(("system", "Sell."), ("user", "Tea."), ("assistant", "Which?"), ("user", "Green.")),
    ]
    start = ("system", "You want tea."), ("user", "Yes?"), ("assistant", "Tea."), ("user", "Which?")
    assert [text_of(ids) for ids in other.prompts] == [
        chat(*start), chat(*start, ("assistant", "Green."), ("user", "One euro.")),
    ]  # fmt: skip
    first, last = length("Which?") + 1, length("One euro.") + 1  # with the token that ends a turn
    between = len(sample.response_ids) - first - last
    assert sample.response_mask == [1] * first + [0] * between + [1] * last
    assert sample.weight_versions == [5] * first + [-1] * between + [6] * last
    assert (sample.reward, sample.status, sample.role) == (2.0, "finished", "")
    assert policy.seeds[0] == 103
    assert other.seeds[0] == draw_session_seed(103, 1) and None not in other.seeds
    assert len({*policy.seeds, *other.seeds}) == 4


def test_the_user_speaks_first_where_the_row_has_nothing_of_its_and_turns_are_limited():
    says = ["A", "B", "C D E"]
    [sample], policy, other = run(user(), says, ["Hi.", "More.", "Yet more."])
    assert text_of(other.prompts[0]) == chat(("system", "You want tea."), ("user", "Yes?"))
    assert text_of(policy.prompts[0]) == chat(("user", "Hi."))
    assert len(other.prompts) == 3
    assert (sample.status, sample.finish_reason, sample.reward) == ("truncated", "length", 3.0)
    [sample], *_ = run(user(reads="conversation"), says, ["Hi.", "More.", STOP])
    assert sample.reward == 8  # words: a role and a text, four times
    thinks = ["<think>Tea or not?</think>A", "<think></think> B"]
    samples, *_ = run(user(reads="conversation"), thinks, ["Hi.", "More.", STOP])
    assert {sample.reward for sample in samples} == {8}


def test_a_conversation_that_the_user_ends_before_it_begins_is_no_sample():
    assert run(user(), [], [STOP])[0] == []


def test_a_server_of_a_model_that_fails_is_no_failure_of_the_loop():
    with pytest.raises(ConnectionError, match="the server is gone"):
        run(user(), ["A"], ["dies"], stops=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "judge"}, "agent.settings.model='judge' is none of models; allowed: user"),
        ({"reads": "all"}, "agent.settings.reads='all'"),
        ({"stop": ""}, "stop=''; allowed"),
    ],
)
def test_settings_of_the_user_are_checked_before_the_run(settings, message):
    with pytest.raises(ConfigError, match=message):
        run(user(**settings), [])


def test_a_column_that_the_row_lacks_is_an_error():
    with pytest.raises(RewardError, match=r"\{mood\}, and the row no such column; it has answer,"):
        run(user(prompt="You are {mood}."), [], ["Hi."])


class Wrong:
    """Would train what it must not."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, task: Task) -> list[Sample]:
        policy, other = self._agent.session(task), self._agent.session(task, model="user")
        await policy.ask(task.messages)
        await other.ask(task.messages)
        way = task.fields["way"]
        if way == "agent":
            return self._agent.build_samples(task, other, "finished", 1.0)
        if way == "tokens":
            known = {"trajectory": 0, "group_id": 3, "reward": 1.0}
            return build_samples(other.turns, status="finished", **known)
        if way == "rewards":
            again = self._agent.session(task)
            await again.ask(task.messages)
            return [
                *self._agent.build_samples(task, policy, "finished", 1.0),
                *self._agent.build_samples(task, again, "finished", 0.0),
            ]
        self._agent.session(task, model="nobody")
        raise AssertionError


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("agent", "a session with models.user is not trained"),
        ("tokens", "samples have tokens to be trained that the policy did not choose"),
        ("rewards", "rewards 1 and 0: sessions with rewards of their own need roles"),
        ("unknown", r"model='nobody'.*allowed: one of models \(user\)"),
    ],
)
def test_what_a_loop_must_not_train_is_refused(way, message):
    runner = AgentRunner(
        Scripted(["a", "b"]), TOKENIZER, word_count, AgentConfig(f"{THIS_FILE}:Wrong"), 4096,
        stops_on_error=True, models=["user"],
    )  # fmt: skip
    runner.models["user"] = FrozenModel(Frozen(["c"]), CODEC, SamplingParams(), 4096)
    prompt = Prompt([], 3, {"way": way}, messages=[{"role": "user", "content": "Hi."}])
    with pytest.raises(RewardError, match=message):
        asyncio.run(runner.run_all([prompt], SamplingParams(n=1, max_tokens=10)))


PLAY = AgentConfig(
    f"{ROOT}/examples/self_play.py:HideAndGuess", settings={"high": 10, "num_guesses": 2}
)


def test_both_roles_of_self_play_are_trained_with_rewards_of_their_own():
    samples, policy, _ = run(PLAY, ["The number 7", "5", "7"])
    hider, guesser = samples
    rules = "Numbers are from 1 to 10. {} Answer with a number."
    assert [text_of(ids) for ids in policy.prompts] == [
        chat(("user", rules.format("Name a number that is hard to guess."))),
        chat(("user", rules.format("Guess the number."))),
        chat(
            ("user", rules.format("Guess the number.")), ("assistant", "5"),
            ("user", "5 is too low."),
        ),
    ]  # fmt: skip
    assert hider.response_mask == [1] * (length("The number 7") + 1)
    length_of_turn = length("5") + 1
    between = len(guesser.response_ids) - 2 * length_of_turn
    assert guesser.response_mask == [1] * length_of_turn + [0] * between + [1] * length_of_turn
    assert [(s.role, s.reward, s.group_id, s.segment) for s in samples] == [
        ("hider", 0.0, 3, 0), ("guesser", 1.0, 3, 0),
    ]  # fmt: skip
    assert hider.trajectory != guesser.trajectory
    assert len(set(policy.seeds)) == 3
    samples, *_ = run(PLAY, ["7", "x", "8"])
    assert [(s.role, s.reward) for s in samples] == [("hider", 1.0), ("guesser", 0.0)]
    [sample], *_ = run(PLAY, ["11"])
    assert (sample.role, sample.reward) == ("hider", 0.0)


def test_a_guesser_without_room_for_its_next_guess_is_cut_off():
    [_, guesser], policy, _ = run(PLAY, ["7", "5", "7"])
    room = len(policy.prompts[2])  # none for an answer
    [hider, guesser], *_ = run(PLAY, ["7", "5"], max_context=room)
    assert (hider.status, guesser.status, guesser.finish_reason) == (
        "finished", "truncated", "length",
    )  # fmt: skip


def test_a_trajectory_that_breaks_off_has_its_roles():
    samples, *_ = run(PLAY, ["7", "5", "5"], stops=False)
    assert [s.role for s in samples] == ["hider", "guesser"]

    class Breaks(Scripted):
        async def submit(self, prompt_ids, sampling, *, request_id=""):
            completions = await super().submit(prompt_ids, sampling, request_id=request_id)
            if len(self.prompts) == 2:
                raise_in_parse(completions[0])
            return completions

    def raise_in_parse(completion: Completion) -> None:
        completion.log_probs.append(0.0)  # no turn can be made of it

    runner = AgentRunner(
        Breaks(["7", "5"]), TOKENIZER, word_count, PLAY, 4096, stops_on_error=False
    )
    prompt = Prompt([], 3, {}, messages=[])
    [sample] = asyncio.run(runner.run_all([prompt], SamplingParams(n=1, max_tokens=10)))
    assert (sample.role, sample.status, sample.reward) == ("hider", "failed", 0.0)
    assert "ValueError" in sample.reward_error


def a_sample(group: int, trajectory: int, role: str, reward: float) -> Sample:
    return Sample(
        [1], [2, 3], [1, 1], [0.0, 0.0], [0, 0], "stop", group, reward=reward, role=role,
        trajectory=trajectory,
    )  # fmt: skip


def test_a_role_is_compared_with_itself_and_prompts_are_counted_as_ever():
    # Hiders of prompt 0 earn 0 and 1, guessers 10 and 10; by hand: -0.5, 0.5 and 0, 0.
    rows = [
        a_sample(0, 0, "hider", 0.0), a_sample(0, 4, "guesser", 10.0),
        a_sample(0, 1, "hider", 1.0), a_sample(0, 5, "guesser", 10.0),
    ]  # fmt: skip
    batch = Batch.collate(rows)
    advantages = compute_advantages(batch, "grpo", {"normalize_by_std": False})["advantages"]
    assert [row.tolist() for row in advantages] == [[-0.5] * 2, [0.0] * 2, [0.5] * 2, [0.0] * 2]
    mixed = Batch.collate([*map(plain, rows)])
    assert not np.allclose(
        compute_advantages(mixed, "grpo", {"normalize_by_std": False})["advantages"].values,
        advantages.values,
    )
    groups = filter_groups(batch, FilterConfig(group_filter="drop_uniform"))
    assert groups.array("roles").tolist() == ["hider", "hider"]
    assert groups.array("group_ids").tolist() == [0, 0]
    metrics = describe_samples(batch)
    assert (metrics["role/hider/reward"], metrics["role/guesser/reward"]) == (0.5, 10.0)
    assert not any(name.startswith("role/") for name in describe_samples(mixed))


def plain(sample: Sample) -> Sample:
    sample.role = ""
    return sample


def test_seeds_of_sessions_and_turns_differ():
    seeds = [draw_session_seed(100, number) for number in range(50)]
    later = [draw_turn_seed(100, number) for number in range(1, 50)]
    assert seeds[0] == 100 and draw_session_seed(None, 3) is None
    assert len({*seeds, *later}) == 99
    assert all(seed < 2**62 for seed in [*seeds[1:], *later])


class Verdicts:
    """A generator that gives these, one a completion, and keeps what it is asked."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.requests = texts, list[tuple[str, SamplingParams]]()

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        self.requests.append((TOKENIZER.decode(prompt_ids), sampling))
        responses = [TOKENIZER.encode(text) for text in self.texts[: sampling.n]]
        return [Completion(ids, [0.0] * len(ids), "stop", [-1] * len(ids)) for ids in responses]


def judge_by_model(generator: Verdicts, max_context: int) -> Sample:
    settings = {
        "served_by": "big", "template": "Q: {prompt} A: {response}", "high": 10.0, "votes": 2,
        "temperature": 0.5, "max_tokens": 40,
    }  # fmt: skip
    judge = RewardManager(RewardConfig("judge", settings, on_error="zero"))
    model = FrozenModel(generator, CODEC, SamplingParams(top_p=0.9), max_context)  # type: ignore[arg-type]
    judge.models["big"] = make_judge_post(model)
    sample = Sample([], [1, 2], [1, 1], [0.0, 0.0], [0, 0], "stop", 3)
    sample.messages = [{"role": "user", "content": "3 + 4?"}]
    asyncio.run(judge([sample], ["7"], 16, "row 7"))
    return sample


def test_a_frozen_model_is_a_judge_with_its_chat_template_and_a_seed_of_the_prompt():
    generator = Verdicts("Score: 2", "It is a Score: 6")
    sample = judge_by_model(generator, 4096)
    assert (sample.reward, sample.reward_parts, sample.reward_error) == (0.4, {"parsed": 1.0}, "")
    judge_by_model(generator, 4096)
    [(prompt, sampling), again] = generator.requests
    assert prompt == chat(("user", "Q: 3 + 4? A: 7"))
    assert (sampling.n, sampling.temperature, sampling.top_p) == (2, 0.5, 0.9)
    assert sampling.max_tokens == 40
    assert sampling.seed is not None
    assert again == (prompt, sampling)
    length = len(TOKENIZER.encode(prompt))
    judge_by_model(generator, length + 7)
    assert generator.requests[-1][1].max_tokens == 7
    reason = f"raised RemoteError: the judge's prompt has {length} tokens, and its max_context is"
    assert reason in judge_by_model(generator, length).reward_error


def test_an_adapter_answers_from_the_policys_server_without_a_version_of_the_policy():
    # One server has both sides of the conversation, in turns.
    server = Scripted(["Which?", "Green.", "One euro.", f"Bye {STOP}", "Score: 3"])
    runner = AgentRunner(
        server, TOKENIZER, word_count, user(), 4096, stops_on_error=True, models=["user"]
    )
    generator = AdapterGenerator(server, "user")
    runner.models["user"] = FrozenModel(generator, CODEC, SamplingParams(max_tokens=50), 4096)
    prompt = Prompt([], 3, {"item": "tea"}, row=7, messages=[{"role": "user", "content": "Tea."}])
    [sample] = asyncio.run(runner.run_all([prompt], SamplingParams(seed=1, max_tokens=1000)))
    assert server.adapters == ["", "user", "", "user"]
    versions = zip(sample.response_mask, sample.weight_versions, strict=True)
    assert {(mask, version == -1) for mask, version in versions} == {(1, False), (0, True)}
    judge = FrozenModel(AdapterGenerator(server, "judge"), CODEC, SamplingParams(), 99)
    request = {"messages": [{"role": "user", "content": "?"}], "n": 1, "temperature": 0}
    asyncio.run(make_judge_post(judge)({**request, "max_tokens": 9}))
    assert server.adapters[-1] == "judge"
