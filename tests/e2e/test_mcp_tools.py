"""Tools of a real MCP server in a process, by stdio and by streamable HTTP."""

import asyncio
import json
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.tools.base import ToolError, ToolSet, tool
from mcore_rl.agents.tools.mcp_tools import McpTools
from mcore_rl.config.agent_schema import AgentConfig
from mcore_rl.rollout.agent_loop import Prompt
from mcore_rl.rollout.protocol import SamplingParams
from tests.e2e.processes import command_line, free_port
from tests.nightly import all_but
from tests.unit.agents.test_loops import MESSAGES, TOKENIZER, Scripted, is_42, run, text_of

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = [sys.executable, SERVER, "stdio"]

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def url():
    port = free_port()
    with subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL) as server:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and server.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
        server.kill()


@tool
def add(a: int, b: int) -> int:
    """Another one of the name."""
    return a - b


def servers() -> list[psutil.Process]:
    return [
        p for p in psutil.Process().children() if {SERVER, "stdio"} <= {*command_line(p).split()}
    ]


@pytest.mark.parametrize("how", ["stdio", "http"])
def test_tools_of_a_server(how, url):
    async def run() -> dict[str, object]:
        source = McpTools(STDIO if how == "stdio" else url, prefix="far_", timeout_s=120)
        async with ToolSet([source, add]) as tools:
            found: dict[str, object] = {"names": list(tools.tools)}
            found["schema"] = tools.tools["far_add"].schema()["function"]
            found["add"] = await tools.call("far_add", {"a": 3, "b": 4})
            found["wrong"] = await tools.call("far_add", {"a": "x"})
            found["fail"] = await tools.call("far_fail", {})
            return found

    found = asyncio.run(run())
    assert found["names"] == ["far_add", "far_wait", "far_fail", "far_end", "add"]
    assert found["schema"]["description"] == "Adds two numbers."
    assert found["schema"]["parameters"]["required"] == ["a", "b"]
    assert (found["add"].text, found["add"].is_error) == ("7", False)
    assert "'b' is a required property" in found["wrong"].text
    assert found["fail"].is_error and "fail" in found["fail"].text
    assert servers() == []


@pytest.mark.parametrize("how", all_but(["http"], ["stdio", "http"]))
def test_a_call_that_takes_too_long_is_told(how, url):
    async def run() -> tuple[str, str]:
        source = McpTools(STDIO if how == "stdio" else url, timeout_s=8)
        async with ToolSet([source]) as tools:
            late = await tools.call("wait", {"seconds": 60})
            return late.text, (await tools.call("add", {"a": 1, "b": 1})).text

    late, after = asyncio.run(run())
    assert late.startswith("Error: ") and ("longer than" in late or "imed out" in late), late
    assert after == "2"


def test_a_server_that_dies_costs_a_call():
    async def run() -> tuple[str, bool, float]:
        async with ToolSet([McpTools(STDIO, timeout_s=120)]) as tools:
            start = time.monotonic()
            answer = await tools.call("end", {})
            return answer.text, answer.is_error, time.monotonic() - start

    text, is_error, seconds = asyncio.run(run())
    assert is_error, text
    assert seconds < 60  # it is noticed, not waited for
    assert servers() == []


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (["/missing/server"], "/missing/server.*No such file"),
        ([sys.executable, "-c", "raise SystemExit(1)"], "raise SystemExit"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "no answer in|imed out"),
        ("http://127.0.0.1:9/mcp", "127.0.0.1:9"),
    ],
)
def test_a_server_that_does_not_answer(server, message):
    async def run() -> None:
        async with ToolSet([McpTools(server, timeout_s=2)]):
            pass

    with pytest.raises(ToolError, match=message):
        asyncio.run(run())


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("how", ["stdio", "http"])
def test_servers_that_the_settings_name_are_those_of_a_trajectory(how, url):
    server = shlex.join(STDIO) if how == "stdio" else url
    config = AgentConfig("tools", mcp_servers=[server], tools=["calculator"], tool_timeout_s=120)
    [sample], policy = run([called("add", a=3, b=4) + called("fail"), "42"], config)
    told = text_of(policy.prompts[1][len(policy.prompts[0]) :])
    assert "<tool_response>\n7\n</tool_response>" in told and "Error: " in told
    assert (sample.reward, sample.status) == (1.0, "finished")
    assert servers() == []


@pytest.mark.parametrize("how", ["stdio", "http"])
def test_a_trajectory_that_is_cancelled_in_a_call_leaves_no_server_and_others_go_on(
    how, url, tmp_path
):
    server, file = shlex.join(STDIO) if how == "stdio" else url, tmp_path / "waits"
    config = AgentConfig("tools", mcp_servers=[server], tool_timeout_s=120)
    sampling, prompt = SamplingParams(n=1, max_tokens=1000), Prompt([], 0, messages=MESSAGES)

    async def cut_short() -> None:
        waits = called("wait", seconds=600, file=str(file))
        policy = Scripted([waits, called("add", a=3, b=4), "42"])
        runner = AgentRunner(policy, TOKENIZER, is_42, config, 4096, stops_on_error=True)
        running = asyncio.create_task(runner.run_all([prompt], sampling))
        async with asyncio.timeout(120):
            while not file.exists():
                await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert servers() == []
        [sample] = await runner.run_all([prompt], sampling)
        assert (sample.reward, sample.status) == (1.0, "finished")

    asyncio.run(cut_short())
    assert servers() == []
