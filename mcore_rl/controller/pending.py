"""A call on a group that has been sent and not yet gathered."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller.rank_host import Birth, Failure, FailureKind, Reply

GRACE_S = 1.0  # after a first failure: time for the rank that caused it to be heard too
STDERR_LINES = 20


class WorkerError(RuntimeError):
    """A rank of a group raised an exception or died; the message names group, method and rank."""


class Group(Protocol):
    """What a pending call needs of its group."""

    name: str
    births: dict[int, Birth]  # by world rank, once built
    ended: str  # why the group takes no calls; empty while it does

    def close(self, reason: str = "") -> None: ...


class Pending:
    """Waits for the ranks of one call. `result` may be called again."""

    def __init__(
        self,
        group: Group,
        method: str,
        calls: dict[Any, int],
        finish: Callable[[dict[int, Any]], Any],
    ) -> None:
        """`calls` maps Ray references to world ranks; `finish` joins the values by world rank."""
        self._group, self._label, self._finish = group, f"{group.name}.{method}", finish
        self._waiting = dict(calls)
        self._values: dict[int, Any] = {}
        self._failures: list[tuple[int, Failure]] = []
        self._error: Exception | None = None

    def result(self, timeout_s: float | None = None) -> Any:
        """Waits for every rank. The first failure ends the group, whatever the other ranks do.

        Raises WorkerError, or ConfigError where a worker raised that; TimeoutError when
        `timeout_s` pass, which leaves the call running.
        """
        if self._error is not None:
            raise self._error
        if not self._failures:
            self._collect(timeout_s)
        if self._failures:
            already_ended = self._group.ended
            if not already_ended:
                self._collect(GRACE_S)
            self._error = self._to_error(already_ended)
            self._group.close(f"the group has ended: {str(self._error).splitlines()[0]}")
            raise self._error
        if self._waiting:
            raise TimeoutError(
                f"{self._label}: ranks {sorted(self._waiting.values())} have not answered in "
                f"{timeout_s:g} s"
            )
        return self._finish(self._values)

    def _collect(self, timeout_s: float | None) -> None:
        """Takes in replies until all are there, the time is over, or one more rank has failed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        failed_before = len(self._failures)
        while self._waiting and len(self._failures) == failed_before:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=left)
            if not ready:
                return
            for reference in ready:
                self._take(reference)

    def _take(self, reference: Any) -> None:
        rank = self._waiting.pop(reference)
        try:
            reply: Reply = ray.get(reference)
        except RayTaskError as error:  # outside of the worker: arguments that cannot be read there
            cause = error.cause or error
            reply = Reply(
                failure=Failure(FailureKind.RAISED, type(cause).__name__, str(cause), str(error))
            )
        except RayError as error:
            reply = Reply(failure=Failure(FailureKind.DIED, type(error).__name__, _why(error)))
        if reply.failure is None:
            self._values[rank] = reply.value
        else:
            self._failures.append((rank, reply.failure))

    def _to_error(self, already_ended: str) -> Exception:
        if already_ended:
            return WorkerError(f"{self._label} was lost: {already_ended}")
        rank, failure = min(self._failures, key=lambda item: item[1].kind)
        head = f"{self._label}: rank {rank}"
        if failure.kind is FailureKind.CONFIG:
            return ConfigError(f"{head}: {failure.message}")
        birth = self._group.births.get(rank)
        tail = _last_lines(birth.stderr_file) if birth else ""
        if failure.kind is FailureKind.DIED:
            where = f" (pid {birth.pid})" if birth else ""
            return WorkerError(f"{head}{where} died. {failure.message}{tail}")
        story = f"\n\n{failure.trace}".rstrip() + tail
        return WorkerError(f"{head} raised {failure.type_name}: {failure.message}{story}")


def gathered(calls: Sequence[Pending]) -> list[Any]:
    """The results of calls on several groups. The first failure of any rank ends the wait for all.

    Raises what `result` of the call that failed raises. The other groups stay as they are.
    """
    while not any(call._failures for call in calls):
        sent = {reference: call for call in calls for reference in call._waiting}
        if not sent:
            break
        [reference], _ = ray.wait(list(sent), num_returns=1)
        sent[reference]._take(reference)
    failed = [call for call in calls if call._failures]
    return [call.result() for call in failed or calls]


def _why(error: RayError) -> str:
    """The one useful sentence of Ray's page about a dead actor."""
    found = re.search(r"Worker exit detail: (.*?)( Some common causes|$)", str(error), re.DOTALL)
    return found.group(1).strip() if found else str(error)[:500]


def _last_lines(file: str) -> str:
    try:
        lines = Path(file).read_text(errors="replace").splitlines()[-STDERR_LINES:]
    except OSError:  # the rank lived on another node
        return ""
    return f"\nThe end of {file}:\n" + "\n".join(lines) if lines else ""
