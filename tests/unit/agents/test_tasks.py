"""Tasks of several turns: their problems, and the conversations of their warm starts."""

from __future__ import annotations

import asyncio
import json
import random

import pyarrow.parquet as pq
import pytest

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec, parse_messages
from mcore_rl.agents.chat_template.validation import select_codec
from mcore_rl.agents.environments.base import Environment
from mcore_rl.agents.environments.coding import Coding, CodingSettings
from mcore_rl.agents.tools.built_in import calculator
from mcore_rl.config.schema import DataConfig
from mcore_rl.data.examples import load_chats
from mcore_rl.data.prepared_task import PreparedTask
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.examples.environments.countdown import Countdown, CountdownSettings
from mcore_rl.examples.tasks.calculator import CalculatorTask
from mcore_rl.examples.tasks.code import CodeTask
from mcore_rl.examples.tasks.conversations import build_conversation, prepare, split_problems
from mcore_rl.examples.tasks.countdown import CountdownTask
from mcore_rl.rewards.registry import get_reward

TASKS = {"calculator": CalculatorTask(), "countdown": CountdownTask(), "code": CodeTask()}
each_task = pytest.mark.parametrize("name", TASKS)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, PreparedTask]:
    folder = tmp_path_factory.mktemp("tasks")
    return {name: prepare(task, folder / name, 3, 0.4) for name, task in TASKS.items()}


def played(environment: Environment, talk: list[ChatMessage]) -> tuple[list[ChatMessage], float]:
    """Return the environment's messages to the assistant's turns, and the reward."""
    messages, reward = [], 0.0
    for message in talk:
        if message.role == "assistant":
            step = asyncio.run(environment.step(ParsedTurn(message.content, "", ())))
            messages += step.messages
            reward += step.reward
    return messages, reward


def test_problems_worked_by_hand():
    assert CountdownTask().question(((2, 3, 4), 14)) == "Make 14 of 2, 3 and 4."
    assert ((2, 3, 4), 14) in CountdownTask().problems()  # 2+3*4, and nothing else
    of_twos = [problem for problem in CountdownTask().problems() if problem[0] == (2, 2, 2)]
    assert of_twos == [((2, 2, 2), 8)]  # 6 is 2+2+2, 2+2*2 and 2*2+2
    assert CalculatorTask().fields((47, 86)) == {"answer": "4042"}
    asserts = {"asserts": ["assert f(0) == 30", "assert f(1) == 34"]}
    assert json.loads(CodeTask().fields((4, 30))["answer"]) == asserts


@each_task
def test_no_problem_is_on_both_sides_and_a_tenth_is_held_out(name):
    train, held_out = split_problems(TASKS[name])
    assert len({*train, *held_out}) == len(train) + len(held_out)
    assert len(held_out) >= 128
    assert len(held_out) / len(train) == pytest.approx(1 / 9, abs=0.02)


@pytest.mark.parametrize("is_worked", [True, False])
def test_the_environment_of_countdown_says_what_the_conversations_have(is_worked):
    task, chance, earned = CountdownTask(), random.Random(0), []
    for problem in split_problems(task)[1]:
        talk = build_conversation(task, problem, is_worked, chance)
        environment = Countdown(task.fields(problem), CountdownSettings())
        messages, reward = played(environment, talk)
        assert messages == [message for message in talk[1:] if message.role == "user"] + (
            messages[-1:] if not reward else []
        )
        earned.append(reward)
    if is_worked:  # the right one of four comes first to last
        assert sum(earned) / len(earned) == pytest.approx(0.85, abs=0.03)
        assert min(earned) == pytest.approx(0.7)
    else:
        assert sorted(set(earned)) == [0.0, 1.0]


def test_the_environment_of_programs_says_what_the_conversations_have():
    task, chance = CodeTask(), random.Random(0)
    for problem in split_problems(task)[1][:3]:
        for is_worked in (True, False):
            talk = build_conversation(task, problem, is_worked, chance)
            environment = Coding(task.fields(problem), CodingSettings())
            messages, reward = played(environment, talk)
            assert messages[:1] == talk[2:3]
            assert reward == pytest.approx(0.9 * is_worked)


def test_the_calculator_says_what_the_conversations_have_and_the_reward_takes_it():
    task, chance = CalculatorTask(), random.Random(0)
    reward = get_reward("final_number")
    for problem in split_problems(task)[1][:50]:
        _, called, result, answer = build_conversation(task, problem, True, chance)
        [call] = called.tool_calls
        assert calculator(**call.arguments) == result.content == task.fields(problem)["answer"]
        assert reward(answer.content, task.fields(problem), "stop")["reward"] == 1.0
        question, direct = build_conversation(task, problem, False, chance)
        assert str(problem[0]) in question.content and direct.content == answer.content


@each_task
def test_the_same_seed_makes_the_same_files_and_another_the_same_problems(name, made, tmp_path):
    again = prepare(TASKS[name], tmp_path / "again", 3, 0.4)
    other = prepare(TASKS[name], tmp_path / "other", 4, 0.4)
    first = made[name]
    for file in ("train_file", "test_file", "warm_start_file"):
        bytes_ = [getattr(task, file).read_bytes() for task in (first, again, other)]
        assert bytes_[0] == bytes_[1]
        assert (bytes_[0] == bytes_[2]) == (file == "test_file")
    tokens = [(task.model_dir / "tokenizer.json").read_bytes() for task in (first, again, other)]
    assert len(set(tokens)) == 1


@pytest.mark.job
@each_task
def test_what_the_assistant_says_is_trained_on_as_the_loop_would_have_it(name, made):
    # A turn's tokens directly follow those of a prompt that the codec renders.
    task, paths = TASKS[name], made[name]
    tokenizer = load_tokenizer(str(paths.model_dir))
    config = DataConfig(tools_column="tools" if task.tools else "")
    batch = load_chats(str(paths.warm_start_file), config, 256, tokenizer)
    rows = pq.read_table(paths.warm_start_file)["messages"].to_pylist()
    codec = select_codec(tokenizer, "auto")
    for number in range(8):
        ids, mask = list_tokens(batch, number)
        talk = [ChatMessage(**_without_none(message)) for message in rows[number]]
        firsts = [i for i, flag in enumerate(mask) if flag and not mask[i - 1]]
        turns = [i for i, message in enumerate(talk) if message.role == "assistant"]
        assert len(firsts) == len(turns)
        prompt = codec.render(parse_messages(rows[number][:1]), task.tools)
        assert ids[: firsts[0]] == prompt
        for first in firsts:
            end = next(i for i in range(first, len(ids)) if ids[i] in codec.stop_ids) + 1
            assert all(mask[first:end]) and not any(mask[end : end + 1])


def list_tokens(batch, row: int) -> tuple[list[int], list[int]]:
    prompt, response, mask = (
        batch.jagged(name)[row].tolist() for name in ("prompt_ids", "response_ids", "response_mask")
    )
    return prompt + response, [0] * len(prompt) + mask


def _without_none(message: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in message.items() if value is not None}


def test_a_tool_of_the_warm_start_is_the_tool_of_the_run():
    [tool] = CalculatorTask().tools
    assert isinstance(tool, ToolSpec)
    assert tool.name == "calculator" and list(tool.parameters["properties"]) == ["expression"]
