"""Programs that a loop starts, and the limits that the server in front of them keeps."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from mcore_rl.agents.api_server import http_server as server_module
from mcore_rl.agents.api_server.http_server import HttpServer, RequestGuard
from mcore_rl.agents.loops import Task
from mcore_rl.agents.runner import AgentRunner, check_agent
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AgentConfig
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.rewards.registry import RewardError
from mcore_rl.rollout.worker import EventLoopThread
from tests.pages import ROOT
from tests.unit.agents.test_loops import MESSAGES, TOKENIZER, Scripted, is_42

AGENT = """
import json, os
from openai import OpenAI

task = json.load(open(os.environ["MCORE_RL_TASK"]))
messages = task["messages"]
answer = OpenAI().chat.completions.create(model="any", messages=messages).choices[0].message
messages += [answer, {"role": "user", "content": "Not " + task["fields"]["answer"] + "?"}]
OpenAI().chat.completions.create(model="any", messages=messages)
"""


def run(command: str, says: list[str], variables: str = "", **config) -> list[Sample]:
    loop_settings = {"command": command, "variables": variables}
    settings = AgentConfig(loop="program", settings=loop_settings, **config)

    async def work() -> list[Sample]:
        policy = Scripted(says)
        runner = AgentRunner(policy, TOKENIZER, is_42, settings, 4096, stops_on_error=True)
        prompt = Prompt([], 3, {"answer": "42"}, row=7, messages=MESSAGES)
        try:
            async with asyncio.timeout(50):
                return await runner.run_all([prompt], SamplingParams(max_tokens=1000))
        finally:
            await runner.close()

    return EventLoopThread(60).run(work())  # as a server's worker has it


def test_a_command_finds_its_session_and_its_row_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # is not asked
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    [sample] = run(f"{sys.executable} {agent}", ["41", "42"], variables="HTTP_PROXY")
    assert (sample.reward, sample.status, sum(sample.response_mask)) == (1.0, "finished", 6)
    assert "Not 42?" in TOKENIZER.decode(sample.response_ids)


SECRETS = {
    "WANDB_API_KEY": "a", "RAY_AUTH_TOKEN": "b", "HF_TOKEN": "c", "MCORE_RL_SECRET": "d",
    "HTTPS_PROXY": "http://me:secret@proxy", "PYTHONPATH": "/x", "LD_PRELOAD": "",
}  # fmt: skip


@pytest.mark.parametrize("variables", ["", "HF_TOKEN", "HF_TOKEN, HTTPS_PROXY"])
def test_a_command_gets_no_variables_but_those_that_the_page_names(
    variables, tmp_path, monkeypatch
):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "told"
    with pytest.raises(RewardError, match="a session without a turn"):
        run(f"sh -c 'env -0 > {output}'", [], variables=variables)
    names = {line.partition("=")[0] for line in output.read_text().split("\0") if line}
    names -= {"PWD", "SHLVL", "_", "OLDPWD"}  # the shell's own
    chosen = {name.strip() for name in variables.split(",") if name}
    assert names & SECRETS.keys() == chosen
    page = (ROOT / "docs" / "endpoint.md").read_text()
    assert all(f"`{name}`" in page for name in names - chosen - {"no_proxy"})
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "MCORE_RL_TASK", "PATH"} <= names


def test_a_command_that_fails_is_an_error_with_the_end_of_its_output():
    command = f"""{sys.executable} -c 'raise SystemExit("no such city")'"""
    with pytest.raises(RewardError, match=r"exited with 1: no such city; it was asked about row 7"):
        run(command, [])


def test_a_command_ends_with_all_that_it_has_started_when_its_time_is_over(tmp_path):
    output = tmp_path / "pid"
    command = f"""sh -c 'sleep 600 & echo $! > {output}; wait'"""
    assert run(command, [], timeout_s=5.0) == []
    assert_gone(int(output.read_text()))
    command = f"""sh -c 'sleep 600 & echo $! > {output}'"""
    with pytest.raises(RewardError, match="a session without a turn"):
        run(command, [])
    assert_gone(int(output.read_text()))


def test_no_more_commands_run_at_once_than_are_allowed(tmp_path):
    script = tmp_path / "agent.sh"
    script.write_text(
        f"mkdir {tmp_path}/alone || exit 9; sleep 0.2; rmdir {tmp_path}/alone; exit 3"
    )
    settings = AgentConfig(loop="program", settings={"command": f"sh {script}", "at_once": 1})

    async def work() -> list[str]:
        runner = AgentRunner(Scripted([]), TOKENIZER, is_42, settings, 4096, stops_on_error=False)
        errors: list[str] = []
        loop = runner._loop

        class Listens:
            async def run(self, task: Task) -> list[Sample]:
                with pytest.raises(RuntimeError) as caught:
                    await loop.run(task)
                errors.append(str(caught.value))
                return []

        runner._loop = Listens()
        prompts = [Prompt([], number, {}, messages=MESSAGES) for number in range(3)]
        await runner.run_all(prompts, SamplingParams())
        await runner.close()
        return errors

    assert [text[-3:].strip() for text in EventLoopThread(60).run(work())] == ["3:"] * 3


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "Z":  # nobody reads its status here
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "agent.settings.command='' and agent.settings.function=''; allowed: one of them"),
        ({"command": "a", "function": "b:c"}, "allowed: one of them"),
        ({"command": "no-such-program x"}, "there is no program 'no-such-program'"),
        ({"command": " "}, "agent.settings.command=' ' names no program"),
        ({"command": "sh", "at_once": 0}, "agent.settings.at_once=0; allowed: at least 1"),
        ({"command": "sh 'x"}, 'command="sh \'x": No closing quotation'),
        ({"function": "os:getcwd"}, "function='os:getcwd'; allowed: a function by `async def`"),
        ({"function": "os:nothing"}, "'os' has no function 'nothing'"),
        ({"command": "sh", "variables": "NO_SUCH_ONE"}, "'NO_SUCH_ONE' is not set; allowed: names"),
        ({"command": "sh", "variables": "PATH,,HOME"}, "agent.settings.variables='PATH,,HOME': ''"),
        ({"command": "sh", "variables": "A=B"}, "'A=B' is not set; allowed: names of environment"),
        ({"comand": "sh"}, "agent.settings.comand is no setting of agent.loop='program'"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_a_run(settings, message):
    with pytest.raises(ConfigError) as caught:
        check_agent(AgentConfig(loop="program", settings=settings), TOKENIZER)
    assert message in str(caught.value)


@pytest.fixture
def serve(monkeypatch):
    """Runs a test against a guarded app that answers "yes"."""
    monkeypatch.setattr(server_module, "HEADERS_S", 0.4)

    def run(talk) -> None:
        async def work() -> None:
            app = RequestGuard(
                PlainTextResponse("yes"),
                lambda key: key == "mine" or None,
                max_body_bytes=1000,
                body_s=0.4,
            )
            server = HttpServer(app, "127.0.0.1")
            await server.start()
            try:
                async with asyncio.timeout(30):
                    await talk(server.url)
            finally:
                await server.close()

        asyncio.run(work())

    return run


async def raw(url: str, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send bytes with pauses; return what comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        return await reader.read()
    except ConnectionError:  # it has closed while there was something to send
        return b""
    finally:
        writer.close()


HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer mine\r\n"


def test_headers_that_do_not_come_close_the_connection(serve):
    async def talk(url: str) -> None:
        started = time.monotonic()
        assert await raw(url) == b""
        assert await raw(url, b"POST", b" /x") == b""
        assert await raw(url, *[b"P"] * 300, pause_s=0.1) == b""  # however often a byte comes
        assert time.monotonic() - started < 15
        request_bytes = HEAD + b"Content-Length: 2\r\n\r\nok"
        assert b"yes" in await raw(url, request_bytes, b"GET", pause_s=0.1)  # the next one, too
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        for _ in range(2):  # a connection without requests stays
            writer.write(request_bytes)
            assert b"200 OK" in await reader.readuntil(b"yes")
            await asyncio.sleep(0.8)
        writer.close()

    serve(talk)


def test_a_body_that_is_late_or_too_large_is_refused(serve):
    async def talk(url: str) -> None:
        slow = HEAD + b"Content-Length: 5\r\n\r\n"
        assert b" 408 " in await raw(url, slow, b"a", b"a", pause_s=0.1)
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:

            async def parts():
                for _ in range(20):
                    yield b"x" * 100

            key = {"Authorization": "Bearer mine"}
            for body in (b"x" * 2**22, parts()):
                answer = await client.post(url, content=body, headers=key)
                assert answer.status_code == 413
                assert answer.json()["error"]["message"] == "a request may have 1000 bytes"
            answer = await client.post(url, content=b"x" * 2**22)
            assert answer.status_code == 401
            answer = await client.post(url, content=b"x" * 1000, headers=key)
            assert answer.text == "yes"

    serve(talk)


@pytest.mark.parametrize(
    "opening",
    [
        b"",
        b"POST /x HTTP/1.1\r\nHost:",  # headers without an end
        HEAD.replace(b"mine", b"wrong") + b"Content-Length: 900\r\n\r\nab",
        HEAD.replace(b"Authorization", b"X-Other") + b"Transfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["nothing", "half of the headers", "a wrong key", "no key"],
)
def test_connections_without_a_key_are_limited_and_cost_others_nothing(serve, opening, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_ANONYMOUS", 5)
    monkeypatch.setattr(server_module, "HEADERS_S", 20.0)

    async def talk(url: str) -> None:
        port = int(url.rsplit(":", 1)[1])
        request_bytes = HEAD + b"Content-Length: 2\r\n\r\nok"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes)
        await reader.readuntil(b"yes")
        before, strangers = num_sockets(port), []
        for _ in range(30):
            strangers.append(await asyncio.open_connection("127.0.0.1", port))
            strangers[-1][1].write(opening)
        await asyncio.sleep(0.1)
        assert num_sockets(port) - before <= 5
        writer.write(request_bytes)  # the oldest of all has shown a key
        await reader.readuntil(b"yes")
        assert b"yes" in await raw(url, request_bytes, b"GET / HTTP/9\r\n\r\n")  # and who comes now
        for _, stream in [*strangers, (reader, writer)]:
            stream.close()

    serve(talk)


def num_sockets(port: int) -> int:
    """Count the open sockets of this process that were accepted at a port."""
    inodes = {
        fields[9]
        for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]
        if (fields := line.split())[1].endswith(f":{port:04X}") and fields[3] == "01"
    }
    number = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            number += str(link.readlink()).removeprefix("socket:[").removesuffix("]") in inodes
    return number
