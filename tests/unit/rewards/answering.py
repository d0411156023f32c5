"""A server on loopback that answers as a script says: also what no library for servers would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

# Writes an answer, or does not; the connection is closed after it.
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def says(content: object, status: int = 200, **headers: str) -> Answer:
    """`found` as it is, if that is bytes, or else as JSON."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status} so", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in named.items()]

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    return answer


async def disconnect(writer: asyncio.StreamWriter) -> None:
    """Close the connection without an answer."""


async def stops_half_way(writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 so\r\nContent-Length: 100\r\n\r\n{"reward": 1')


async def waits(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(600)


async def streams(writer: asyncio.StreamWriter, pause_s: float = 0.0) -> None:
    writer.write(b"HTTP/1.1 200 so\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
        await writer.drain()
        await asyncio.sleep(pause_s)


async def drips(writer: asyncio.StreamWriter) -> None:
    await streams(writer, 0.05)


@dataclass
class Answering:
    """Answers requests by turns with `script`, the last of it from then on."""

    script: Sequence[Answer]
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # such as POST /score HTTP/1.1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers["content-length"]))
            number = len(self.requests)
            self.lines.append(head[0])
            self.headers.append(headers)
            self.requests.append(json.loads(body))
            await self.script[min(number, len(self.script) - 1)](writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client is gone
        finally:
            writer.close()


@asynccontextmanager
async def answering(*script: Answer) -> AsyncIterator[Answering]:
    result = Answering(script)
    tasks = set()

    def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(result._serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    result.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/score"
    try:
        yield result
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
