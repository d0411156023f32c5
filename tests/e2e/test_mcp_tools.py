"""Tools of a real MCP server in a process, by stdio and by streamable HTTP."""

import asyncio
import json
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mcore_rl.agents.runner import AgentRunner, try_out
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.agents.tools.base import ToolError, ToolSet, tool
from mcore_rl.agents.tools.mcp_tools import McpTools
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AgentConfig
from mcore_rl.inference.protocol import SamplingParams
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
    """Add, under the name of another tool."""
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
            results: dict[str, object] = {"names": list(tools.tools)}
            results["schema"] = tools.tools["far_add"].schema()["function"]
            results["add"] = await tools.call("far_add", {"a": 3, "b": 4})
            results["wrong"] = await tools.call("far_add", {"a": "x"})
            results["fail"] = await tools.call("far_fail", {})
            return results

    results = asyncio.run(run())
    names = ["far_add", "far_wait", "far_fail", "far_process", "far_end", "add"]
    assert results["names"] == names
    assert results["schema"]["description"] == "Add two numbers."
    assert results["schema"]["parameters"]["required"] == ["a", "b"]
    assert (results["add"].text, results["add"].is_error) == ("7", False)
    assert "'b' is a required property" in results["wrong"].text
    assert results["fail"].is_error and "fail" in results["fail"].text
    assert servers() == []


@pytest.mark.nightly  # tests/unit/agents/tools has calls that take too long, the next test a death
@pytest.mark.parametrize("how", ["stdio", "http"])
def test_a_call_that_takes_too_long_is_an_error(how, url):
    async def run() -> tuple[str, str]:
        # The limit is also that of the server's start, which takes seconds.
        source = McpTools(STDIO if how == "stdio" else url, timeout_s=25)
        async with ToolSet([source]) as tools:
            late = await tools.call("wait", {"seconds": 200})
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


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


DEAD: list[tuple[object, str]] = [
    (["/missing/server"], "/missing/server.*No such file"),
    (
        python("import sys; sys.exit('no key: set UNITS_KEY')"),
        r"Connection closed; its stderr: no key: set UNITS_KEY$",
    ),
    (python("import missing_package"), "its stderr: .*No module named 'missing_package'$"),
    (
        python("import sys, time; print('loading', file=sys.stderr); time.sleep(60)"),
        "no answer in 2 s; its stderr: loading$",
    ),
    ("http://127.0.0.1:9/mcp", "127.0.0.1:9"),
]


@pytest.mark.parametrize(("server", "message"), DEAD)
def test_a_server_that_does_not_answer_is_an_error_with_its_stderr(server, message):
    async def run() -> None:
        async with ToolSet([McpTools(server, timeout_s=2)]):
            pass

    with pytest.raises(ToolError, match=message):
        asyncio.run(run())


@pytest.mark.parametrize(("server", "message"), all_but(DEAD[:2], DEAD))
def test_a_server_that_does_not_answer_is_refused_before_a_run(server, message):
    given = server if isinstance(server, str) else shlex.join(server)
    config = AgentConfig("tools", mcp_servers=[given], tool_timeout_s=2)
    with pytest.raises(ConfigError, match=f"agent.mcp_servers: the MCP server .*{message}"):
        try_out(config, {})


@pytest.mark.parametrize(("server", "message"), [("'", "No closing quotation"), (" ", "a command")])
def test_a_command_that_is_none_is_refused_with_its_place(server, message):
    config = AgentConfig("tools", mcp_servers=["http://127.0.0.1:9/mcp", server])
    with pytest.raises(ConfigError, match=rf"agent.mcp_servers\[1\]=.*{message}"):
        try_out(config, {})


def test_servers_that_answer_are_tried_together_and_left_before_a_run(url):
    two = AgentConfig("tools", mcp_servers=[shlex.join(STDIO)], tool_timeout_s=120)
    try_out(two, {})
    assert servers() == []
    two.mcp_servers.append(url)
    with pytest.raises(ConfigError, match="two tools have the name 'add'"):
        try_out(two, {})
    assert servers() == []


def test_trajectories_share_a_server_which_is_started_again_when_it_has_ended(capfd):
    config = AgentConfig("tools", mcp_servers=[shlex.join(STDIO)], tool_timeout_s=120)
    prompt = Prompt([], 0, messages=MESSAGES)

    async def work() -> tuple[list[str], list[int]]:
        says = [called("process")] * 6 + ["42"] * 6
        policy = Scripted([*says, called("end"), called("process"), "42"])
        runner = AgentRunner(policy, TOKENIZER, is_42, config, 4096, stops_on_error=True)
        replies, running = [], []
        try:
            samples = await runner.run_all([prompt], SamplingParams(n=6, max_tokens=1000))
            running.append(len(servers()))
            replies += [text_of(sample.response_ids) for sample in samples]
            [sample] = await runner.run_all([prompt], SamplingParams(n=1, max_tokens=1000))
            running.append(len(servers()))
            replies.append(text_of(sample.response_ids))
        finally:
            await runner.close()
        return replies, running

    replies, running = asyncio.run(work())
    answers = [re.findall(r"<tool_response>\n(.*)\n</tool_response>", text) for text in replies]
    first = {process for [process] in answers[:6]}
    assert len(first) == 1
    assert answers[6][0].startswith("Error: ") and answers[6][1] not in first
    assert running == [1, 1] and servers() == []
    assert "mcp_server.py', 'stdio'] has ended" in capfd.readouterr().out


def test_the_example_server_answers_the_policy():
    example = Path(__file__).parents[2] / "examples/mcp_server.py"
    command = shlex.join([sys.executable, str(example)])
    config = AgentConfig("tools", mcp_servers=[command], tool_timeout_s=120)
    try_out(config, {})
    miles = called("convert", value=26.2, source="mile", target="kilometre")
    [sample], policy = run([miles + called("units"), "42"], config)
    text = text_of(policy.prompts[1][len(policy.prompts[0]) :])
    assert "<tool_response>\n42.16" in text and "kilometre" in text
    assert "Convert a length to another unit." in text_of(sample.prompt_ids)


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("how", ["stdio", "http"])
def test_servers_that_the_settings_name_are_those_of_a_trajectory(how, url):
    server = shlex.join(STDIO) if how == "stdio" else url
    config = AgentConfig("tools", mcp_servers=[server], tools=["calculator"], tool_timeout_s=120)
    [sample], policy = run([called("add", a=3, b=4) + called("fail"), "42"], config)
    text = text_of(policy.prompts[1][len(policy.prompts[0]) :])
    assert "<tool_response>\n7\n</tool_response>" in text and "Error: " in text
    assert (sample.reward, sample.status) == (1.0, "finished")
    assert servers() == []


@pytest.mark.parametrize("how", ["stdio", "http"])
def test_a_trajectory_that_is_cancelled_in_a_call_leaves_its_server_to_others(how, url, tmp_path):
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
        assert len(servers()) == (how == "stdio")
        [sample] = await runner.run_all([prompt], sampling)
        assert (sample.reward, sample.status) == (1.0, "finished")
        assert len(servers()) == (how == "stdio")
        await runner.close()

    asyncio.run(cut_short())
    assert servers() == []
