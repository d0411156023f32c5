"""The environment `openenv` against a server of the same wire."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mcore_rl.agents.chat_template.codec import ParsedCall, ParsedTurn
from mcore_rl.agents.environments.openenv import OpenEnv, OpenEnvError, OpenEnvSettings
from mcore_rl.agents.runner import ENVIRONMENTS
from mcore_rl.config.errors import ConfigError
from tests.unit.agents.openenv_server import OpenEnvServer, error, observation, tool_result

ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def talk(
    server: OpenEnvServer,
    body: Callable[[OpenEnv], Awaitable[Any]],
    fields: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Return the result of a coroutine that uses one environment, which is closed in the end."""

    async def run() -> Any:
        async with server.served():
            made = ENVIRONMENTS.bind("openenv", {"url": server.url, **settings})
            environment = made(fields or {})
            try:
                return await body(environment)
            finally:
                await environment.close()

    return asyncio.run(asyncio.wait_for(run(), 30))


def says(text: str, *calls: ParsedCall) -> ParsedTurn:
    return ParsedTurn(text, "", calls)


def call(name: str, call_id: str, **arguments: Any) -> ParsedCall:
    return ParsedCall("ok", name, arguments, "", None, call_id)


def echo(message: dict[str, Any]) -> dict[str, Any]:
    if message["type"] == "reset":
        return observation(echoed="begin", metadata={"hidden": 1})
    text = message["data"]["message"]
    return observation(reward=0.5, done=text == "end", echoed=text)


def test_texts_are_steps_and_their_rewards_and_end_come_back():
    server = OpenEnvServer(echo)

    async def body(environment: OpenEnv) -> list[Any]:
        first = await environment.reset()
        return [first, await environment.step(says("hi")), await environment.step(says("end"))]

    first, middle, last = talk(server, body, {"number": "7"}, seed_column="number")
    assert [(m.role, m.content) for m in first] == [("user", '{"echoed": "begin"}')]
    assert (middle.messages[0].content, middle.reward, middle.is_done) == (
        '{"echoed": "hi"}', 0.5, False,
    )  # fmt: skip
    assert (last.reward, last.is_done) == (0.5, True)
    assert server.heard == [
        {"type": "reset", "data": {"seed": 7}},
        {"type": "step", "data": {"message": "hi"}},
        {"type": "step", "data": {"message": "end"}},
        {"type": "close"},
    ]


def test_a_field_of_the_observation_is_shown_to_the_policy():
    async def body(environment: OpenEnv) -> list[str]:
        first = await environment.reset()
        step = await environment.step(says("ü"))
        return [first[0].content, step.messages[0].content]

    assert talk(OpenEnvServer(echo), body, observation_field="echoed") == ["begin", "ü"]
    with pytest.raises(OpenEnvError, match=r"observation_field='text' .*allowed: metadata, echoed"):
        talk(OpenEnvServer(echo), body, observation_field="text")


def tools(message: dict[str, Any]) -> dict[str, Any]:
    data = message["data"]
    if message["type"] == "reset":
        return observation(reward=0.25, metadata={"status": "ready"})
    if data["type"] == "list_tools":
        return observation(tools=[ADD])
    if data["tool_name"] == "add":
        total = sum(data["arguments"].values())
        return tool_result("add", str(total), reward=1, done=total == 9)
    fault = {"error_type": "tool_not_found", "message": "Unknown tool: sub"}
    return tool_result(data["tool_name"], "", result=None, error=fault)


def test_calls_of_a_turn_are_steps_in_their_order_until_it_is_done():
    server = OpenEnvServer(tools)
    broken = ParsedCall("malformed", "", {}, '{"name": ', None, "b")

    async def body(environment: OpenEnv) -> list[Any]:
        first = await environment.reset()
        turns = [
            says("", call("add", "a", x=1, y=2), broken, call("sub", "c")),
            says("", call("add", "d", x=4, y=5), call("add", "never", x=0)),
        ]
        return [first, environment.tools, *[await environment.step(turn) for turn in turns]]

    first, specs, middle, last = talk(server, body, action="tools")
    assert list(first) == []  # an observation of metadata says nothing
    assert [(spec.name, spec.description, spec.parameters) for spec in specs] == [
        ("add", "Adds.", {"type": "object"})
    ]
    assert [(m.role, m.tool_call_id, m.content) for m in middle.messages] == [
        ("tool", "a", "3"),
        ("tool", "b", 'Error: the call is malformed: {"name": '),
        ("tool", "c", "Error: Unknown tool: sub"),
    ]
    assert (middle.reward, middle.is_done) == (1.25, False)  # with that of the reset
    assert (last.reward, last.is_done, len(last.messages)) == (1.0, True, 1)
    steps = [message["data"] for message in server.heard if message["type"] == "step"]
    assert steps[:2] == [
        {"type": "list_tools"},
        {"type": "call_tool", "tool_name": "add", "arguments": {"x": 1, "y": 2}},
    ]
    assert len(steps) == 4


def test_with_tools_a_turn_without_a_call_is_the_end():
    async def body(environment: OpenEnv) -> Any:
        await environment.reset()
        return await environment.step(says("It is 3."))

    step = talk(OpenEnvServer(tools), body, action="tools")
    assert (step.messages, step.reward, step.is_done) == ((), 0.25, True)


async def _reset(environment: OpenEnv) -> None:
    await environment.reset()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            error("EXECUTION_ERROR", "no such level"),
            r"reset is refused \(EXECUTION_ERROR\): no suc",
        ),
        (error("VALIDATION_ERROR", "Invalid message", errors=[{"loc": "code"}]), "'loc': 'code'"),
        ("never", "no answer to reset in 0.3 s"),
        ("[" * 100_000, "the answer to reset is no message"),
        ("x" * 3000, r"is no message: x{500} \.\.\.$"),
        ('{"type": "observation"}', "is no message"),
        ({"type": "state", "data": {}}, "is no observation: .*'state'"),
        ({"observation": "text", "reward": None, "done": False}, "is no observation"),
        (observation(reward="1"), "is no observation"),
        (observation(reward=float("nan")), "the reward after reset is nan"),
        (observation(done=True), "done before the first turn"),
        (observation(text="x" * (1 << 20)), "no answer to reset: .*1009"),
    ],
)
def test_errors_of_a_server_name_its_url(answer, message):
    server = OpenEnvServer(lambda message: answer)
    limits = {"message_timeout_s": 0.3} if answer == "never" else {}
    with pytest.raises(OpenEnvError, match=message) as caught:
        talk(server, _reset, max_message_mb=0.5, **limits)
    assert server.url.replace("http", "ws") + "/ws" in str(caught.value)


def test_a_server_that_is_not_there_or_has_no_tools_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = OpenEnv({}, OpenEnvSettings(f"http://user:secret@127.0.0.1:{port}/games/"))
    reason = rf"the OpenEnv server ws://127.0.0.1:{port}/games/ws: no connection: "
    with pytest.raises(OpenEnvError, match=reason):
        asyncio.run(environment.reset())
    asyncio.run(environment.close())  # nothing is open
    with pytest.raises(OpenEnvError, match="it has no tools"):
        talk(OpenEnvServer(lambda message: observation(tools=[])), _reset, action="tools")


def test_a_session_is_waited_for_while_all_are_in_use():
    server = OpenEnvServer(echo, max_sessions=1)

    async def body(first: OpenEnv) -> bool:
        await first.reset()
        second = OpenEnv({}, OpenEnvSettings(server.url))
        reset = asyncio.create_task(second.reset())
        while server.refused < 2:
            await asyncio.sleep(0.01)
        was_waiting = not reset.done()
        await first.close()
        await reset
        await second.close()
        return was_waiting

    assert talk(server, body)

    async def full(first: OpenEnv) -> None:
        await first.reset()
        settings = OpenEnvSettings(server.url, session_timeout_s=0.0)
        await OpenEnv({}, settings).reset()

    with pytest.raises(OpenEnvError, match=r"CAPACITY_REACHED\).*1/1 sessions active, for 0 s"):
        talk(server, full)


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        ({}, {}, "environment_settings.url is needed"),
        ({"url": "localhost:8000"}, {}, "url='localhost:8000'; allowed: http://"),
        ({"url": "ws://a", "action": "code"}, {}, "action='code'; allowed: 'text', 'tools'"),
        ({"url": "ws://a", "message_timeout_s": 0}, {}, "message_timeout_s=0"),
        ({"url": "ws://a", "seed_column": "n"}, {"m": 1}, "the column 'n'.*this row has None"),
        ({"url": "ws://a", "seed_column": "n"}, {"n": -1}, "the seed is -1"),
    ],
)
def test_settings_and_rows_that_cannot_work_are_refused(settings, fields, message):
    with pytest.raises(ConfigError, match=message):
        ENVIRONMENTS.bind("openenv", settings)(fields)
