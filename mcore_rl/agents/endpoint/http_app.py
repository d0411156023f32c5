"""What the apps here have in common: errors in OpenAI's form, and clients that vanish."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from mcore_rl.agents.endpoint.refusal import ClientGoneError, RefusalError
from mcore_rl.config.errors import ConfigError

T = TypeVar("T")


def new_app() -> FastAPI:
    """Without pages of its own; each error is a JSON object as OpenAI's clients read it."""
    app = FastAPI(openapi_url=None)

    @app.exception_handler(RefusalError)
    async def refused(request: Request, error: RefusalError) -> Response:
        return error.response()

    @app.exception_handler(ConfigError)
    async def unfit(request: Request, error: ConfigError) -> Response:
        return RefusalError(400, "invalid_request", str(error)).response()

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # to nobody

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        told = f"{where}: {first['msg']}" if where else str(first["msg"])
        return RefusalError(400, "invalid_request", told, param=where).response()

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        told = f"{request.method} {request.url.path}: {error.detail}"
        code = "not_found" if error.status_code == 404 else "invalid_request"
        return RefusalError(error.status_code, code, told).response()

    return app


async def has_ended(
    request: Request, work: asyncio.Task[T], timeout_s: float | None = None
) -> bool:
    """Whether work for a client has ended, after `timeout_s` at the latest.

    Raises ClientGoneError where the client has gone first; then the work is cancelled.
    """
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not work.done():
            raise ClientGoneError
        return work.done()
    except BaseException:
        work.cancel()
        raise
    finally:
        gone.cancel()


async def unless_gone(request: Request, work: asyncio.Task[T]) -> T:
    """The result of work. Raises as `has_ended` and `result_of`."""
    await has_ended(request, work)
    return result_of(work)


def result_of(work: asyncio.Task[T]) -> T:
    """Of work that has ended.

    Raises:
        RefusalError: it failed, or was cancelled since its session has ended.
        ConfigError: it was asked for what it cannot do.
    """
    if work.cancelled():
        raise RefusalError(409, "session_ended", "the session has ended")
    try:
        return work.result()
    except (RefusalError, ConfigError):
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise RefusalError(500, "server_failed", told) from error


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
