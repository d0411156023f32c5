"""The live page of a report: a server on this machine, behind a token.

The address has the token in its fragment, which browsers do not send. The page itself has nothing
of a run. It asks for the data with the token as its key, which `RequestGuard` checks before any
file is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from mcore_rl.agents.api_server.http_server import HttpServer, RequestGuard, build_app
from mcore_rl.config.errors import ConfigError
from mcore_rl.observability.expert_load import EXPERT_LOAD_FILE
from mcore_rl.observability.metrics import METRICS_FILE
from mcore_rl.observability.timeline import TIMELINE_FILE
from mcore_rl.tools.report.page import MAX_BYTES, build_live_page, encode_data, iter_smaller_data
from mcore_rl.tools.report.runs import SETTINGS_FILE, SUMMARY_FILE, read_runs

HOST = "127.0.0.1"
_FILES = (SETTINGS_FILE, METRICS_FILE, SUMMARY_FILE, TIMELINE_FILE, EXPERT_LOAD_FILE)
_GLOBS = ("samples/*.parquet", "evaluations/*/*.parquet")
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_MAX_BODY_BYTES, _BODY_S = 0, 5.0


class LiveData:
    """The data of a page, which is built again when a file of the runs has changed."""

    def __init__(self, folders: Sequence[Path], num_samples: int) -> None:
        self._folders, self._num_samples = folders, num_samples
        self._lock = threading.Lock()
        self._version, self._content = "", b""

    def read(self) -> tuple[str, bytes]:
        """Return the version of the data, and the data as compressed JSON of at most MAX_BYTES.

        Raises:
            ConfigError: A file of a run cannot be read.
        """
        with self._lock:
            version = self._compute_version()
            if version != self._version:
                self._content = self._build()
                self._version = version
            return self._version, self._content

    def _build(self) -> bytes:
        for data in iter_smaller_data(read_runs(self._folders), self._num_samples):
            content = encode_data(data)
            if len(content) <= MAX_BYTES:
                break
        return content

    def _compute_version(self) -> str:
        digest = hashlib.sha256()
        for folder in self._folders:
            paths = [folder / name for name in _FILES]
            paths += sorted(path for pattern in _GLOBS for path in folder.glob(pattern))
            for path in paths:
                with contextlib.suppress(OSError):  # not written yet
                    stat = path.stat()
                    digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return f'"{digest.hexdigest()[:32]}"'


def build_live_app(folders: Sequence[Path], num_samples: int, token: str) -> ASGIApp:
    """Build the app: the page without a key, and everything else with the token as key.

    Raises:
        ConfigError: A folder is not of a run.
    """
    read_runs(folders)
    page = HTMLResponse(build_live_page(), headers=_HEADERS)
    data = LiveData(folders, num_samples)
    app: FastAPI = build_app()

    @app.get("/data")
    async def send_data(request: Request) -> Response:
        version, content = await asyncio.to_thread(data.read)
        headers = _HEADERS | {"ETag": version}
        if request.headers.get("If-None-Match") == version:
            return Response(status_code=304, headers=headers)
        headers |= {"Content-Encoding": "gzip"}
        return Response(content, media_type="application/json", headers=headers)

    @app.get("/metrics")
    async def send_metrics() -> Response:
        content = await asyncio.to_thread(format_latest, folders)
        return Response(content, media_type=CONTENT_TYPE_LATEST, headers=_HEADERS)

    def find(given: str) -> LiveData | None:
        return data if secrets.compare_digest(given.encode(), token.encode()) else None

    guarded = RequestGuard(app, find, max_body_bytes=_MAX_BODY_BYTES, body_s=_BODY_S)

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        is_page = scope["type"] == "http" and (scope["method"], scope["path"]) == ("GET", "/")
        await (page if is_page else guarded)(scope, receive, send)

    return route


def format_latest(folders: Sequence[Path]) -> bytes:
    """Return the last step of each run and phase, and the last value of each metric.

    The format is that of Prometheus.
    """
    registry = CollectorRegistry()
    labels = ("run", "phase", "metric")
    values = Gauge(
        "mcore_rl", "Last value of a metric in metrics.jsonl.", labels, registry=registry
    )
    steps = Gauge("mcore_rl_step", "The last step.", labels[:2], registry=registry)
    for run in read_runs(folders):
        for phase in run.phases:
            for name, points in run.collect_series(phase).items():
                if (value := points[-1].value) is not None:
                    values.labels(run.name, phase, name).set(value)
            steps.labels(run.name, phase).set(
                max(row["step"] for row in run.rows if row["phase"] == phase)
            )
    content: bytes = generate_latest(registry)
    return content


def serve(
    folders: Sequence[Path], num_samples: int, port: int, on_start: Callable[[str], None]
) -> None:
    """Serve runs until the process is interrupted.

    Args:
        port: 0 takes a free one.
        on_start: Called with the address to open.

    Raises:
        ConfigError: The port is taken, or a folder is not of a run.
    """
    token = secrets.token_urlsafe(32)
    app = build_live_app(folders, num_samples, token)
    try:
        server = HttpServer(app, HOST, port)
    except OSError as error:
        raise ConfigError(f"--port={port} cannot be used on {HOST}: {error.strerror}") from error

    async def run() -> None:
        await server.start()
        on_start(f"{server.url}/#{token}")
        try:
            await asyncio.Event().wait()
        finally:
            await server.close()

    asyncio.run(run())
