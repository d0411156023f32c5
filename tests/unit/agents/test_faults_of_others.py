"""Faults of tools and environments that cost no trajectory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec
from mcore_rl.agents.environments.base import EnvironmentStep
from mcore_rl.agents.loops import Agent, Task
from mcore_rl.agents.tools import base as tools_base
from mcore_rl.agents.tools.base import tool
from mcore_rl.agents.trajectory import hash_state
from mcore_rl.config.schema import AgentConfig
from mcore_rl.data.sample import Sample
from tests.unit.agents.test_loops import call, run, text_of

THIS_FILE = __file__
LONE = "x\ud800"  # half of a character in two bytes pairs, as JSON may have it
REPLACED = "x\ufffd"


@tool
def weather(city: str) -> str:
    """Return the weather in a city."""
    if city == f"no {LONE}":
        raise ValueError(city)
    return f"in {city}"


class Echoes:
    """Says what no tokenizer takes."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, fields: dict[str, str]) -> None:
        pass

    async def reset(self) -> Sequence[ChatMessage]:
        return [ChatMessage("user", LONE)]

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        return EnvironmentStep((ChatMessage("user", f"in {LONE}"),))

    async def close(self) -> None:
        pass


class Renders:
    """A loop whose second conversation has the calls of the first one."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, task: Task) -> list[Sample]:
        session, other = self._agent.session(task), self._agent.session(task)
        answer = await session.ask(task.messages)
        messages = [*task.messages, answer.parsed.to_message(), ChatMessage("tool", LONE)]
        await other.ask(messages)
        return await self._agent.score_samples(task, other, "finished", "42", [session])


def write_call(city: str) -> str:
    arguments = {"name": "weather", "arguments": {"city": city}}
    return f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


def test_half_a_character_is_replaced_wherever_it_comes_from():
    config = AgentConfig("tools", tools=[f"{THIS_FILE}:weather"])
    says = [write_call(LONE) + write_call(f"no {LONE}"), "42"]
    [sample], policy = run(says, config)
    text = text_of(policy.prompts[1])
    assert f"in {REPLACED}" in text and f"Error: ValueError: no {REPLACED}" in text
    assert (sample.reward, sample.status) == (1.0, "finished")
    config = AgentConfig("environment", environment=f"{THIS_FILE}:Echoes", max_turns=2)
    [sample], policy = run(["1", "2"], config)
    assert REPLACED in text_of(policy.prompts[0]) and f"in {REPLACED}" in text_of(policy.prompts[1])
    assert sample.state_ids[-1] == hash_state(f"in {LONE}") != hash_state(f"in {REPLACED}")
    _, policy = run([write_call(LONE), "42"], AgentConfig(f"{THIS_FILE}:Renders"))
    assert text_of(policy.prompts[1]).count(REPLACED) == 2


class Hanging:
    @tool
    def seven(self) -> int:
        """Seven."""
        return 7

    async def close(self) -> None:
        await asyncio.sleep(60)


class Failing(Hanging):
    async def close(self) -> None:
        raise OSError("the file is gone")


class HangingRoom(Echoes):
    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        return EnvironmentStep(reward=1.0, is_done=True)

    async def close(self) -> None:
        await asyncio.sleep(60)


class FailingRoom(HangingRoom):
    async def close(self) -> None:
        raise OSError("the file is gone")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Hanging", "the tool Hanging has not closed in 0.01 s"),
        ("Failing", "the tool Failing raised OSError when it was closed: the file is gone"),
        ("HangingRoom", "has not closed in 0.01 s"),
        ("FailingRoom", "raised OSError when it was closed: the file is gone"),
    ],
)
def test_a_close_that_fails_is_printed_and_costs_no_trajectory(name, what, monkeypatch, capsys):
    monkeypatch.setattr(tools_base, "CLOSE_S", 0.01)
    path, is_room = f"{THIS_FILE}:{name}", name.endswith("Room")
    config = AgentConfig("tools", tools=[path, "calculator"])
    if is_room:
        config = AgentConfig("environment", environment=path)
        what = f"agent.environment={path!r}, for row 7, {what}"
    [sample], _ = run(["42"] if is_room else [call("6 * 7"), "42"], config)
    assert (sample.reward, sample.status, sample.reward_error) == (1.0, "finished", "")
    assert capsys.readouterr().out == f"{what}\n"
