"""The environment `openenv` against servers of the real package, in an environment of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.agents.chat_template.codec import ParsedCall, ParsedTurn
from mcore_rl.agents.environments.openenv import OpenEnv, OpenEnvError, OpenEnvSettings

PACKAGE = "openenv==0.10.0"  # it conflicts with our pins
SERVERS = Path(__file__).with_name("openenv_servers.py")

pytestmark = [pytest.mark.job, pytest.mark.nightly]


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    """Of an environment with the package; skips where it cannot be installed."""
    folder = tmp_path_factory.mktemp("openenv") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    made = str(folder / "bin" / "python")
    command = [made, "-m", "pip", "install", "--quiet", PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be installed: {done.stderr[-300:]}")
    return made


@contextlib.contextmanager
def served(python: str, kind: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([python, str(SERVERS), kind, str(port)]) as server:
        try:
            deadline = time.monotonic() + 180
            while True:
                assert server.poll() is None and time.monotonic() < deadline
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def talk(settings: OpenEnvSettings, body: Callable[[OpenEnv], Any], fields: Any = None) -> Any:
    async def run() -> Any:
        environment = OpenEnv(fields or {}, settings)
        try:
            return await body(environment)
        finally:
            await environment.close()

    return asyncio.run(run())


def says(text: str, *calls: ParsedCall) -> ParsedTurn:
    return ParsedTurn(text, "", calls)


def test_a_text_environment_of_the_package(python):
    async def body(environment: OpenEnv) -> list[Any]:
        [first] = await environment.reset()
        steps = [await environment.step(says(text)) for text in ("hi", "end")]
        return [first.content, *[(s.messages[0].content, s.reward, s.is_done) for s in steps]]

    async def fails(environment: OpenEnv) -> None:
        await environment.reset()
        await environment.step(says("fail"))

    async def refused(environment: OpenEnv) -> None:
        await environment.reset()
        async with asyncio.TaskGroup() as group:
            others = [OpenEnv({}, settings) for _ in range(2)]
            for one in others:
                group.create_task(one.reset())

    with served(python, "text") as url:
        settings = OpenEnvSettings(url, observation_field="echoed", seed_column="n")
        assert talk(settings, body, {"n": 7}) == [
            "seed 7", ("hi", 0.0, False), ("end", 1.0, True),
        ]  # fmt: skip
        with pytest.raises(OpenEnvError, match=r"EXECUTION_ERROR\): it fails as it was asked to"):
            talk(settings, fails, {"n": 1})
        settings = OpenEnvSettings(url, action_field="code")
        with pytest.raises(OpenEnvError, match=r"VALIDATION_ERROR\).*'message'"):
            talk(settings, fails)
        settings = OpenEnvSettings(url, session_timeout_s=0.5)
        with pytest.raises(ExceptionGroup) as caught:  # there are two sessions
            talk(settings, refused)
        assert "CAPACITY_REACHED" in str(caught.value.exceptions[0])


def test_tools_of_an_mcp_environment_of_the_package(python):
    calls = [
        ParsedCall("ok", "add", {"a": 3, "b": 4}, "", None, "1"),
        ParsedCall("ok", "add", {"a": "x"}, "", None, "2"),
        ParsedCall("unknown_tool", "sub", {}, "", None, "3"),
    ]

    async def body(environment: OpenEnv) -> list[Any]:
        first = await environment.reset()
        step = await environment.step(says("", *calls))
        end = await environment.step(says("It is 7."))
        return [list(first), environment.tools, step, end]

    with served(python, "tools") as url:
        first, tools, step, end = talk(OpenEnvSettings(url, action="tools"), body)
    assert first == []
    assert [(one.name, one.description) for one in tools] == [("add", "Adds two numbers.")]
    assert tools[0].parameters["required"] == ["a", "b"]
    right, wrong, unknown = [message.content for message in step.messages]
    assert right == "7"
    assert wrong.startswith("Error: ") and "validation error" in wrong
    assert unknown.startswith("Error: ") and "sub" in unknown
    assert (step.is_done, end.is_done) == (False, True)
