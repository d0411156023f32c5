"""Trajectories of several contexts: a context that is summed up, and a solver with helpers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.agents.chat_template.codec import ChatMessage
from mcore_rl.agents.loops import ToolLoopSettings, add_summary
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.session import draw_session_seed, draw_turn_seed
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.algorithms.advantages import compute_advantages
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AgentConfig, RewardConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.trainers import evaluation
from tests.pages import ROOT
from tests.unit.agents import test_loops
from tests.unit.agents.families import tokenizer_of
from tests.unit.agents.test_loops import (
    END,
    MESSAGES,
    TOKENIZER,
    TOOLS,
    Scripted,
    call,
    is_42,
    run,
    text_of,
)

ASSISTANT = "<|im_start|>assistant\n"
DELEGATING = f"{ROOT}/examples/delegating.py:Delegating"


def tools_of(share: float, **more: int) -> AgentConfig:
    settings = {"compact_at": share, "compact_prompt": "Sum up."}
    return AgentConfig("tools", settings=settings, tools=["calculator"], **more)


def encode_turn(text: str) -> list[int]:
    return [*TOKENIZER.encode(text, add_special_tokens=False), END]


def expected(*parts: tuple[str, int]) -> tuple[list[int], list[int], list[int], list[float]]:
    """Return ids, mask, versions and log-probs of texts; number 0 means that no turn sampled it."""
    ids, mask, versions, log_probs = [], [], [], []
    for text, turn in parts:
        new = encode_turn(text) if turn else TOKENIZER.encode(text, add_special_tokens=False)
        ids += new
        mask += [int(turn > 0)] * len(new)
        versions += [4 + turn if turn else -1] * len(new)
        log_probs += [-0.1 * turn if turn else 0.0] * len(new)
    return ids, mask, versions, log_probs


@pytest.mark.parametrize("family", ["published/qwen2.5", "published/qwen3", "qwen3"])
def test_a_game_without_reasoning_is_one_sample(family, monkeypatch):
    # Each turn ends with white space, which templates trim when they render it again.
    monkeypatch.setattr(test_loops, "TOKENIZER", tokenizer_of(family))
    config = AgentConfig("environment", environment=f"{test_loops.__file__}:Guessing")
    guesses = [f"I say {number}\n" for number in (10, 20, 30, 40)]
    [sample], policy = run([*guesses, "42"], config)
    assert len(sample.turn_spans) == 5
    tokens = [*sample.prompt_ids, *sample.response_ids]
    assert tokens[: len(policy.prompts[-1])] == policy.prompts[-1]


def columns(sample: Sample) -> tuple[list[int], list[int], list[int], list[float]]:
    return (
        sample.response_ids, sample.response_mask, sample.weight_versions,
        sample.rollout_log_probs,
    )  # fmt: skip


def tool(text: str) -> str:
    return f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n"


SUM_UP = f"<|im_start|>user\nSum up.<|im_end|>\n{ASSISTANT}"


def test_a_full_context_is_summed_up_and_the_next_begins_with_the_summary():
    says = [call("6 * 7"), "It is 42.", "42"]
    _, policy = run([says[0], "42"], tools_of(0))
    length = len(policy.prompts[1])
    samples, policy = run(says, tools_of(0.5), 2 * length - 1)
    first, second = samples
    assert first.prompt_ids == policy.prompts[0]
    assert columns(first) == expected((says[0], 1), (tool("42") + SUM_UP, 0), (says[1], 2))
    question = "How much is 6 * 7?"
    assert text_of(second.prompt_ids) == text_of(first.prompt_ids).replace(
        question, f"{question}\n\nWhat was done so far:\nIt is 42."
    )
    assert columns(second) == expected(("42", 3))
    assert [(s.segment, s.trajectory, s.group_id) for s in samples] == [(0, 0, 3), (1, 0, 3)]
    assert [s.reward for s in samples] == [1.0, 1.0]
    assert [s.reward_parts for s in samples] == [{"length": 2.0}] * 2
    [sample], _ = run([says[0], "42"], tools_of(0.5), 2 * length)  # it is not more than half full
    assert columns(sample) == expected((says[0], 1), (tool("42") + ASSISTANT, 0), ("42", 2))


def test_a_context_may_be_summed_up_again_and_summaries_count_as_turns():
    says = [call("6 * 7"), "Uno.", call("42"), "Due.", "42"]
    samples, policy = run(says, tools_of(0.01))
    assert [columns(sample) for sample in samples] == [
        expected((says[0], 1), (tool("42") + SUM_UP, 0), ("Uno.", 2)),
        expected((says[2], 3), (tool("42") + SUM_UP, 0), ("Due.", 4)),
        expected(("42", 5)),
    ]
    assert "Uno." not in text_of(policy.prompts[4])
    samples, policy = run(says, tools_of(0.01, max_turns=4))
    assert (len(policy.prompts), samples[-1].status) == (4, "truncated")
    assert [s.finish_reason for s in samples] == ["length"] * 2


def test_each_context_has_a_response_and_overlong_counts_the_turns_of_all():
    says, lengths = [call("6 * 7"), "It is 42.", "42"], list[int]()

    async def reward(samples: list[Sample], texts: list[str], *rest: object) -> None:
        lengths.extend(len(ids) for ids in samples[0].turn_token_ids)

    budget = sum(len(encode_turn(text)) for text in says[:2])
    _, policy = run(says, tools_of(0.01), max_tokens=budget, reward=reward)
    assert len(policy.prompts) == 3
    assert lengths == [len(encode_turn(text)) for text in says]


def test_without_the_setting_no_context_is_summed_up():
    says = [call("6 * 7"), "42"]
    [sample], _ = run(says, AgentConfig("tools", tools=["calculator"]))
    assert columns(sample) == expected((says[0], 1), (tool("42") + ASSISTANT, 0), ("42", 2))
    assert ToolLoopSettings().compact_at == 0
    with pytest.raises(ConfigError, match=r"agent.settings.compact_at=2.0; allowed: 0 to 1"):
        run(says, tools_of(2.0))


def test_a_context_with_no_room_for_the_question_is_cut_off():
    [start], _ = run(["42"], tools_of(0))
    room = len(start.prompt_ids) + len(encode_turn(call("6 * 7"))) + 3
    [sample], policy = run([call("6 * 7"), "x"], tools_of(0.5), room)
    assert (len(policy.prompts), sample.status, sample.finish_reason) == (1, "truncated", "length")


def test_a_summary_joins_the_last_message_of_a_user():
    system, user = ChatMessage("system", "Be brief."), ChatMessage("user", "Why?")
    text = "What was done so far:\nNothing."
    assert add_summary([system, user], "Nothing.") == [
        system, ChatMessage("user", f"Why?\n\n{text}"),
    ]  # fmt: skip
    assert add_summary([system], "Nothing.") == [system, ChatMessage("user", text)]


def delegate(question: str) -> str:
    arguments = f'{{"question": "{question}"}}'
    return f'<tool_call>\n{{"name": "delegate", "arguments": {arguments}}}\n</tool_call>'


def test_helpers_see_their_question_alone_and_all_samples_have_the_reward_of_the_answer():
    says = [delegate("6 * 6?") + delegate("36 + 6?"), "36", "42!", "42"]
    samples, policy = run(says, AgentConfig(DELEGATING))
    questions = [text_of(prompt) for prompt in policy.prompts[1:3]]
    assert questions == [
        f"<|im_start|>user\n{q}<|im_end|>\n{ASSISTANT}" for q in ("6 * 6?", "36 + 6?")
    ]
    answers = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in ("36", "42!"))
    between = f"\n<|im_start|>user{answers}<|im_end|>\n{ASSISTANT}"
    assert [columns(sample) for sample in samples] == [
        expected(("36", 2)), expected(("42!", 3)),
        expected((says[0], 1), (between, 0), ("42", 4)),
    ]  # fmt: skip
    assert [(s.segment, s.trajectory, s.reward) for s in samples] == [
        (0, 0, 1.0), (1, 0, 1.0), (2, 0, 1.0),
    ]  # fmt: skip
    assert all(sample.reward_parts == {"length": 2.0} for sample in samples)
    assert len(set(policy.seeds)) == 4 and policy.seeds[0] == 103


def test_calls_without_a_question_or_beyond_the_last_helper_are_errors():
    says = [delegate("a") * 2 + call("1"), "A", "42"]
    samples, policy = run(says, AgentConfig(DELEGATING, settings={"max_helpers": 1}))
    text = text_of(policy.prompts[2])
    assert "there is no helper left" in text and "the call has no question" in text
    assert len(samples) == 2


def test_statistics_of_a_group_count_a_trajectory_with_helpers_once():
    # Two trajectories of a group: three samples that earn 1, and one that earns 0.

    async def both() -> list[Sample]:
        all_samples: list[Sample] = []
        scripts = [delegate("a") + delegate("b"), "A", "B", "42"], ["no"]
        for number, says in enumerate(scripts):
            runner = AgentRunner(
                Scripted(says), TOKENIZER, is_42, AgentConfig(DELEGATING), 4096, stops_on_error=True
            )
            prompt = Prompt([], 3, {"answer": "42"}, row=7, messages=MESSAGES)
            made = await runner.run_all([prompt], SamplingParams(n=1, max_tokens=100))
            for sample in made:
                sample.trajectory = number
            all_samples += made
        return all_samples

    samples = asyncio.run(both())
    batch = Batch.collate(samples)
    scores = evaluation.compute_scores(batch, RewardConfig())
    assert (scores["reward"], scores["num_samples"]) == (0.5, 2)
    advantages = compute_advantages(batch, "rloo", {})["advantages"]
    for row, sample in zip(advantages, samples, strict=True):
        expected = 1.0 if sample.reward else -1.0
        assert row[np.array(sample.response_mask) == 1] == pytest.approx(expected)


def test_sessions_of_a_trajectory_have_seeds_of_their_own():
    assert draw_session_seed(None, 3) is None and draw_session_seed(7, 0) == 7
    seeds = {draw_session_seed(seed, session) for seed in (7, 8) for session in range(5)}
    seeds |= {draw_turn_seed(seed, turn) for seed in (7, 8) for turn in range(1, 5)}
    assert len(seeds) == 18 and all(0 <= seed < 2**62 for seed in seeds)


class EndsOtherwise(Scripted):
    """Ends each turn with a token that generation_config.json has beside the tokenizer's."""

    async def submit(self, *args, **options) -> list[Completion]:
        [completion] = await super().submit(*args, **options)
        return [replace(completion, token_ids=[*completion.token_ids[:-1], SECOND_END])]


SECOND_END = TOKENIZER.convert_tokens_to_ids("<|endoftext|>")


@pytest.mark.parametrize("codec", ["template", "auto", "renderers"])
def test_a_turn_that_a_second_token_ends_has_it_in_no_text_and_ends_once(codec):
    texts: list[list[str]] = []

    async def reward(samples: list[Sample], final: list[str], *rest: object) -> None:
        texts.append([*samples[0].turn_texts, *final])

    policy, config = EndsOtherwise([call("6 * 7"), "42"]), replace(TOOLS, codec=codec)
    runner = AgentRunner(
        policy, TOKENIZER, reward, config, 4096, stops_on_error=True, stop_ids=[SECOND_END]
    )
    prompt = Prompt([], 3, {"answer": "42"}, row=7, messages=MESSAGES)
    asyncio.run(runner.run_all([prompt], SamplingParams(max_tokens=1000)))
    assert texts == [[call("6 * 7"), "42", "42"]]
    ends = [text_of([token]) for token in policy.prompts[1] if token in (END, SECOND_END)]
    text = text_of(policy.prompts[1]).split(call("6 * 7"))[1]
    assert text.startswith(("<|im_end|>\n<|im_start|>", "<|endoftext|>\n<|im_start|>"))
    assert len(ends) == 4  # of the tools, the user, the turn and the answer of the tool
