"""A generator behind HTTP and its client: what comes through, and what is told where it fails."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from mcore_rl.agents.api_server.app import build_generate_app
from mcore_rl.agents.api_server.http_server import HttpServer
from mcore_rl.agents.chat_template.codec import ChatMessage
from mcore_rl.agents.chat_template.validation import select_codec
from mcore_rl.agents.frozen_model import GENERATE, ModelAddress, ModelServerError, RemoteGenerator
from mcore_rl.agents.session import ChatSession
from mcore_rl.config.errors import ConfigError
from mcore_rl.inference.protocol import Completion, SamplingParams
from tests.unit.agents.test_loops import END, TOKENIZER, Scripted

KEY = "the key"
SAMPLING = SamplingParams(
    n=2, temperature=0.5, top_p=0.9, top_k=7, stop=("x",), max_tokens=9, seed=2**62 + 1
)


@dataclass
class Server:
    """Two completions, or what it is told to do instead."""

    does: str = ""
    requests: list[tuple[list[int], SamplingParams, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    cancelled: int = 0

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        self.requests.append((prompt_ids, sampling, request_id))
        if self.does == "raises":
            raise RuntimeError("out of\n memory")
        if self.does == "refuses":
            raise ConfigError("a prompt of 9 tokens does not fit")
        try:
            while self.does == "waits" and request_id not in self.aborted:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        reason = "abort" if self.aborted else "stop"
        return [
            Completion([1, 2], [-0.25, -1e-9], reason, [4, 5], "x"),
            Completion([3], [-0.1], "length", [4]),
        ]

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


@asynccontextmanager
async def serving(*servers: object, timeout_s: float = 30.0) -> AsyncIterator[RemoteGenerator]:
    """Yield what sends requests to the servers, in this order; a text is the URL of a server."""
    async with AsyncExitStack() as stack:
        urls = []
        for server in servers:
            if isinstance(server, str):
                urls.append(server)
                continue
            http = HttpServer(build_generate_app(server, KEY, 4096), "127.0.0.1")  # type: ignore[arg-type]
            await http.start()
            stack.push_async_callback(http.close)
            urls.append(http.url)
        remote = RemoteGenerator("user", ModelAddress(tuple(urls), KEY), timeout_s)
        stack.push_async_callback(remote.close)
        yield remote


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(limited())


def test_a_request_and_its_answer_come_through_but_for_versions():
    async def work() -> None:
        server = Server()
        async with serving(server) as remote:
            completions = await remote.submit([7, 8], SAMPLING, request_id="a")
            assert server.requests == [([7, 8], SAMPLING, "a")]
            assert completions == [
                Completion([1, 2], [-0.25, -1e-9], "stop", [-1, -1], "x"),
                Completion([3], [-0.1], "length", [-1]),
            ]
            new = [part async for part in remote.stream([7], SAMPLING)]
            assert [(part.index, part.token_ids) for part in new] == [(0, [1, 2]), (1, [3])]
            async with remote.start_together():
                pass

    run(work)


def test_a_conversation_goes_over_it_as_over_a_server_here():
    async def work() -> None:
        local, distant = Scripted(["Yes.", "No."]), Scripted(["Yes.", "No."])
        codec, sampling = select_codec(TOKENIZER), SamplingParams(max_tokens=20, seed=3)
        async with serving(distant) as remote:
            for generator in (local, remote):
                session = ChatSession("a", generator, codec, sampling, 500)
                for text in ("One?", "Two?"):
                    answer = await session.ask([ChatMessage("user", text)])
                assert answer.parsed.content == "No."
                assert session.turns[-1].token_ids[-1] == END
        assert (local.prompts, local.seeds) == (distant.prompts, distant.seeds)

    run(work)


def test_requests_go_where_the_fewest_are():
    async def work() -> None:
        servers = [Server("waits"), Server(), Server("waits")]
        async with serving(*servers) as remote:
            requests = [asyncio.create_task(remote.submit([1], SAMPLING)) for _ in range(7)]
            await until(lambda: sum(task.done() for task in requests) == 2)
            await until(lambda: sum(len(server.requests) for server in servers) == 7)
            for _ in range(3):  # the second has none any more
                await remote.submit([1], SAMPLING)
            assert [len(server.requests) for server in servers] == [3, 5, 2]
            for server in servers:
                server.does = ""
            await asyncio.gather(*requests)

    run(work)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("raises", r"answered with status 500: .*RuntimeError: out of"),
        ("refuses", r"answered with status 400: .*a prompt of 9 tokens does not fit"),
        ("waits", r"has not answered in 0.5 s \(models.user.timeout_s\)"),
    ],
)
def test_errors_name_the_model_and_the_server_without_a_second_request(does, message):
    async def work() -> None:
        server = Server(does)
        async with serving(server, timeout_s=0.5) as remote:
            where = rf"models\.user: the server at http://127\.0\.0\.1:\d+ {message}"
            with pytest.raises(ModelServerError, match=where) as caught:
                await remote.submit([1], SAMPLING)
            assert "\n" not in str(caught.value) and KEY not in repr(caught.value)
            assert len(server.requests) == 1
            await until(lambda: server.cancelled == (does == "waits"))

    run(work)


async def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_what_nobody_waits_for_any_more_ends_at_the_server():
    async def work() -> None:
        server = Server("waits")
        async with serving(server) as remote:
            request = asyncio.create_task(remote.submit([1], SAMPLING))
            await until(lambda: bool(server.requests))
            request.cancel()
            await until(lambda: server.cancelled == 1)

    run(work)


def test_an_abort_ends_a_request_with_what_it_has():
    async def work() -> None:
        server = Server("waits")
        async with serving(server) as remote:
            request = asyncio.create_task(remote.submit([1], SAMPLING, request_id="mine"))
            await until(lambda: bool(server.requests))
            await remote.abort("another")
            await remote.abort("mine")
            assert (await request)[0].finish_reason == "abort"
            assert server.aborted == ["mine"]

    run(work)


def test_without_the_key_nothing_is_answered_and_no_page_is_shown():
    async def work() -> None:
        server = Server()
        async with serving(server) as remote, httpx.AsyncClient(trust_env=False) as client:
            [url] = remote._urls
            body = {"token_ids": [1], "sampling_params": {}}
            for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": KEY}):
                answer = await client.post(f"{url}{GENERATE}", json=body, headers=headers)
                assert answer.status_code == 401
            right = {"Authorization": f"Bearer {KEY}"}
            for page in ("/docs", "/openapi.json", "/"):
                assert (await client.get(f"{url}{page}", headers=right)).status_code == 404
            wrong = {"token_ids": [], "sampling_params": {"n": 0}}
            answer = await client.post(f"{url}{GENERATE}", json=wrong, headers=right)
            assert (answer.status_code, server.requests) == (400, [])

    run(work)
    assert KEY not in repr(ModelAddress(("http://a",), KEY))


def test_a_server_that_was_never_there_is_an_error_soon(monkeypatch):
    monkeypatch.setattr("mcore_rl.agents.frozen_model._PAUSES_S", (0.01, 0.02))

    async def work() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            remote = RemoteGenerator("judge", ModelAddress((url,), KEY), 30)
            with pytest.raises(
                ModelServerError, match=rf"models.judge: the server at {url} cannot be reached"
            ):
                await remote.submit([1], SAMPLING)
            await remote.close()

    run(work)


SERVER = """
import asyncio, sys
from mcore_rl.agents.api_server.app import build_generate_app
from mcore_rl.agents.api_server.http_server import HttpServer
class Waits:
    async def submit(self, prompt_ids, sampling, *, request_id=""):
        print("asked", flush=True)
        await asyncio.sleep(600)
async def main():
    server = HttpServer(build_generate_app(Waits(), "the key", 4096), "127.0.0.1")
    await server.start()
    print(server.url, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.job
def test_a_server_that_dies_under_a_request_is_an_error(monkeypatch):
    monkeypatch.setattr("mcore_rl.agents.frozen_model._PAUSES_S", (0.05,))
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()

    async def work() -> None:
        remote = RemoteGenerator("user", ModelAddress((url,), KEY), 50)
        request = asyncio.create_task(remote.submit([1], SAMPLING))
        assert await asyncio.to_thread(process.stdout.readline) == "asked\n"
        process.kill()
        with pytest.raises(ModelServerError, match=f"models.user: the server at {url} cannot be r"):
            await request
        await remote.close()

    try:
        run(work)
    finally:
        process.kill()
        process.wait()


def test_a_connection_that_is_lost_once_is_made_again():
    async def work() -> None:
        server = Server()
        async with serving(server) as remote:
            answers = 0

            async def flaky(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                nonlocal answers
                answers += 1
                if answers == 1:
                    writer.close()  # without a word
                    return
                body = b'{"choices": []}'
                await reader.read(1 << 16)
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                writer.write(head + body)
                await writer.drain()
                writer.close()

            listener = await asyncio.start_server(flaky, "127.0.0.1", 0)
            port = listener.sockets[0].getsockname()[1]
            remote._urls = (f"http://127.0.0.1:{port}",)
            assert await remote.submit([1], SAMPLING) == []
            assert answers == 2
            listener.close()

    run(work)


@pytest.mark.parametrize("body", [b"[]", b"no", b'{"choices": [{"token_ids": [1]}]}'])
def test_an_answer_without_completions_is_an_error(body):
    async def work() -> None:
        async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1 << 16)
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            writer.close()

        listener = await asyncio.start_server(answers, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        address = ModelAddress((f"http://127.0.0.1:{port}",), KEY)
        remote = RemoteGenerator("user", address, 30)
        with pytest.raises(ModelServerError, match=f"models.user: the server at .*:{port} answ"):
            await remote.submit([1], SAMPLING)
        await remote.close()
        listener.close()

    run(work)
