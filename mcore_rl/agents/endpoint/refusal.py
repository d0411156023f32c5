"""What a client is told instead of an answer, in the form of OpenAI's API."""

from __future__ import annotations

from starlette.responses import JSONResponse


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class RefusalError(Exception):
    """A request that is not answered: a status, a code for programs and a message for people."""

    def __init__(
        self, status: int, code: str, message: str, *, may_retry: bool = False, param: str = ""
    ) -> None:
        """`may_retry`: whether the same request may succeed later, which clients try by themselves.

        `param` is the field of the request that is at fault.
        """
        super().__init__(message)
        self.status, self.code, self.may_retry, self.param = status, code, may_retry, param

    def body(self) -> dict[str, object]:
        error = {
            "message": str(self),
            "type": "server_error" if self.status >= 500 else "invalid_request_error",
            "param": self.param or None,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """OpenAI's client tries 408, 409, 429 and 5xx again unless a header says no."""
        headers = {"x-should-retry": str(self.may_retry).lower()}
        if self.may_retry:
            headers["retry-after"] = "1"
        return JSONResponse(self.body(), self.status, headers)
