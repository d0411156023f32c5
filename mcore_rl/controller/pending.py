"""Calls on groups that have been sent and not yet gathered."""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ray.exceptions import RayError, RayTaskError

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller.rank_actor import Failure, FailureKind, Reply, WorkerInfo
from mcore_rl.controller.run_scope import wait_if_ray_died
from mcore_rl.controller.silence import Silent, find_stopped, report

GRACE_S = 2.0  # after a first failure: time for the rank that caused it to be heard too
NODE_GRACE_S = 12.0  # the same where ranks are on several nodes: Ray takes so long to miss one
STDERR_LINES = 20
_LOOK_S = 1.0


class WorkerError(RuntimeError):
    """A rank raised an exception, died or did not answer in time.

    The message names group, method and rank.
    """


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a wait may take, and the setting that says so."""

    seconds: float
    setting: str  # "timeouts.call_s"

    def __str__(self) -> str:
        return f"{self.seconds:g} s ({self.setting})"


class CalledGroup(Protocol):
    """What a pending call needs of its group."""

    name: str
    worker_infos: dict[int, WorkerInfo]  # by world rank, of the processes that have come up
    ended: str  # why the group takes no calls; empty while it does

    def close(self, reason: str = "") -> None: ...


class SentCall(Protocol):
    """Ray's reference to the reply of a rank."""

    def future(self) -> Future[Reply]: ...


class PendingCall:
    """Waits for the ranks of one call. `result` may be called again."""

    def __init__(
        self,
        group: CalledGroup,
        method: str,
        calls: Mapping[SentCall, int],
        finish: Callable[[dict[int, Any]], Any],
        limit: Limit,
    ) -> None:
        """`calls` maps references to world ranks; `finish` joins the values by world rank."""
        self._group, self._label, self._finish = group, f"{group.name}.{method}", finish
        self._limit, self._sent_at = limit, time.monotonic()
        self._waiting = {reference.future(): rank for reference, rank in calls.items()}
        self._values: dict[int, Any] = {}
        self._failures: list[tuple[FailureKind, float, int, Failure]] = []  # when, and which rank
        self._error: Exception | None = None

    def result(self, limit: Limit | None = None) -> Any:
        """Waits for every rank, for as long as `limit` says, which is the method's own by default.

        The first failure ends the group, whatever the other ranks do, and so does the limit.

        Raises:
            ConfigError: a worker raised it.
            WorkerError: a rank raised something else, died, or did not answer in time.
        """
        return gathered([self], limit)[0]

    def has_ended(self) -> bool:
        """Whether all ranks have answered, or one has failed; does not wait.

        Raises:
            WorkerError: they have not answered within the method's limit.
        """
        for future in [future for future in self._waiting if future.done()]:
            self._take(future)
        if self._failures or not self._waiting:
            return True
        if time.monotonic() > self._sent_at + self._limit.seconds:
            raise _ended_by_limit([self], self._limit)
        return False

    def death(self) -> WorkerError | None:
        """Of a rank, if `has_ended` has found one; it ends the group."""
        died = [(rank, why) for kind, _, rank, why in self._failures if kind is FailureKind.DIED]
        if not died:
            return None
        error = self._to_error(*died[0])
        assert isinstance(error, WorkerError)
        self._end(error)
        return error

    def _take(self, future: Future[Reply]) -> FailureKind | None:
        rank = self._waiting.pop(future)
        try:
            reply = future.result()
        except RayTaskError as error:  # outside of the worker: arguments that cannot be read there
            cause = error.cause or error
            reply = Reply(
                failure=Failure(FailureKind.RAISED, type(cause).__name__, str(cause), str(error))
            )
        except RayError as error:
            wait_if_ray_died()
            reply = Reply(failure=Failure(FailureKind.DIED, type(error).__name__, _why(error)))
        if reply.failure is None:
            self._values[rank] = reply.value
            return None
        self._failures.append((reply.failure.kind, time.monotonic(), rank, reply.failure))
        return reply.failure.kind

    def _to_error(self, rank: int, failure: Failure) -> Exception:
        if self._group.ended:
            return WorkerError(f"{self._label} was lost: {self._group.ended}")
        head = f"{self._label}: rank {rank}"
        if failure.kind is FailureKind.CONFIG:
            return ConfigError(f"{head}: {failure.message}")
        info = self._group.worker_infos.get(rank)
        tail = _last_lines(info.stderr_file) if info else ""
        if failure.kind is FailureKind.DIED:
            where = f" ({info})" if info else ""
            return WorkerError(f"{head}{where} died. {failure.message}{tail}")
        story = f"\n\n{failure.trace}".rstrip() + tail
        return WorkerError(f"{head} raised {failure.type_name}: {failure.message}{story}")

    def _end(self, error: Exception) -> None:
        self._error = error
        self._group.close(f"the group has ended: {str(error).splitlines()[0]}")


def gathered(calls: Sequence[PendingCall], limit: Limit | None = None) -> list[Any]:
    """The results of calls on several groups, for which it waits together.

    The first failure of any rank, or the limit, ends the wait for all. By default the limit is the
    longest of the calls'. Groups whose ranks failed, or did not answer, end; others stay as they
    are. Of several failures the likeliest cause is raised: a death before bad input, before other
    exceptions, before those that blame another rank; and of the same kind the first.

    Raises:
        ConfigError, WorkerError: as `PendingCall.result`.
    """
    if not calls:
        return []
    for call in calls:
        if call._error is not None:
            raise call._error
    limit = limit or max((call._limit for call in calls), key=lambda limit: limit.seconds)
    _collect(calls, limit.seconds, until=FailureKind.BLAMED)
    if any(call._failures for call in calls):
        if not any(call._group.ended for call in calls):
            _collect(calls, _grace_s(calls), until=FailureKind.DIED)
        raise _ended_by_failure(calls)
    if any(call._waiting for call in calls):
        raise _ended_by_limit(calls, limit)
    return [call._finish(call._values) for call in calls]


def outlived(
    calls: Sequence[PendingCall],
    mortal: Collection[CalledGroup],
    limit: Limit | None = None,
    on_death: Callable[[], None] | None = None,
) -> dict[int, WorkerError]:
    """Waits for calls on several groups together; a `mortal` one may die of it, or meanwhile.

    Then it ends, `on_death` is called, and the calls of others may fail, as long as they blame a
    peer. A mortal group that does not answer in time counts as dead if a process of it is stopped
    by a signal, and after a death in any case: others may wait for it. It returns when all have
    ended: the deaths, by the places of their calls. Without any, all have succeeded.

    Raises:
        ConfigError, WorkerError: as `gathered`, for anything else that fails.
    """
    limit = limit or max((call._limit for call in calls), key=lambda limit: limit.seconds)
    deadline, blamed_at = time.monotonic() + limit.seconds, 0.0
    deaths: dict[int, WorkerError] = {}
    mortal, places = {*mortal}, {call: place for place, call in enumerate(calls)}
    replies, waiting = Replies(calls), {call for call in calls if call._waiting}
    failed = [call for call in calls if call._failures]
    kinds = _failed_kinds(failed, mortal)
    while waiting:
        answered = replies.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
        waiting.difference_update([call for call in answered if not call._waiting])
        failed += [call for call in answered if call._failures]
        kinds |= _failed_kinds(failed, mortal)
        blamed_at = blamed_at or (time.monotonic() if kinds else 0.0)
        if kinds - {FailureKind.DIED, FailureKind.BLAMED}:
            gathered(calls, limit)
        if kinds == {FailureKind.BLAMED} and time.monotonic() > blamed_at + _grace_s(calls):
            raise _ended_by_failure(calls)
        if found := _new_deaths({places[call]: call for call in failed}, deaths):
            deaths |= found
            if on_death is not None:
                on_death()
        failed = []
        if time.monotonic() >= deadline:
            is_first = not deaths
            deaths |= _given_up(calls, mortal, deaths, limit)
            if is_first and on_death is not None:
                on_death()
            deadline = time.monotonic() + NODE_GRACE_S
    if kinds == {FailureKind.BLAMED} or not kinds <= {FailureKind.DIED, FailureKind.BLAMED}:
        raise _ended_by_failure(calls)
    return deaths | _new_deaths(dict(enumerate(calls)), deaths)


def _new_deaths(calls: Mapping[int, PendingCall], known: Collection[int]) -> dict[int, WorkerError]:
    """By place; their groups end."""
    found = {place: call.death() for place, call in calls.items() if place not in known}
    return {place: error for place, error in found.items() if error is not None}


def _given_up(
    calls: Sequence[PendingCall],
    mortal: Collection[CalledGroup],
    deaths: Collection[int],
    limit: Limit,
) -> dict[int, WorkerError]:
    """Ends the mortal groups that have not answered; raises where that is not to be done.

    Without a death only those of which a process is stopped: others may wait for somebody else.
    """
    late = [p for p, c in enumerate(calls) if c._waiting and c._group in mortal and p not in deaths]
    if not deaths:
        late = [place for place in late if find_stopped(_silent([calls[place]]))]
    if not late:
        raise _ended_by_limit(calls, limit)
    error = _ended_by_limit([calls[place] for place in late], limit)
    return dict.fromkeys(late, error)


class Replies:
    """The replies of many calls as they come. A wait looks at those that are new, not at all calls.

    One thread at a time may use it.
    """

    def __init__(self, calls: Iterable[PendingCall] = ()) -> None:
        self._answered: SimpleQueue[tuple[PendingCall, Future[Reply]]] = SimpleQueue()
        self._watched: weakref.WeakSet[PendingCall] = weakref.WeakSet()
        self.watch(calls)

    def watch(self, calls: Iterable[PendingCall]) -> None:
        """Wait for these from now on, too; those that are watched already are left as they are."""
        for call in calls:
            if call not in self._watched:
                self._watched.add(call)
                for future in [*call._waiting]:
                    future.add_done_callback(partial(self._put, call))

    def _put(self, call: PendingCall, future: Future[Reply]) -> None:
        self._answered.put((call, future))

    def wait(self, seconds: float) -> list[PendingCall]:
        """Wait until a rank has answered, at most so long; return the calls with new replies."""
        deadline, answered = time.monotonic() + seconds, list[PendingCall]()
        with contextlib.suppress(Empty):
            while True:
                left_s = 0.0 if answered else max(0.0, deadline - time.monotonic())
                call, future = self._answered.get(timeout=left_s)
                if future in call._waiting:  # nobody has looked at it in another way
                    call._take(future)
                    answered.append(call)
        return answered


def _failed_kinds(
    calls: Sequence[PendingCall], mortal: Collection[CalledGroup]
) -> set[FailureKind]:
    """RAISED for the death of a group that is not to die."""
    return {
        FailureKind.RAISED if kind is FailureKind.DIED and call._group not in mortal else kind
        for call in calls
        for kind, *_ in call._failures
    }


def _collect(calls: Sequence[PendingCall], seconds: float, until: FailureKind) -> None:
    """Takes in replies until all are there, the time is over, or there is such a failure or worse.

    (`until` is the mildest kind of failure that ends the wait.)
    """
    sent = {future: call for call in calls for future in call._waiting}
    if any(kind <= until for call in calls for kind, *_ in call._failures):
        return
    with contextlib.suppress(TimeoutError):
        for future in as_completed(sent, timeout=seconds):
            failed = sent[future]._take(future)
            if failed is not None and failed <= until:
                return


def _grace_s(calls: Sequence[PendingCall]) -> float:
    nodes = {info.node_id for call in calls for info in call._group.worker_infos.values()}
    return NODE_GRACE_S if len(nodes) > 1 else GRACE_S


def _ended_by_failure(calls: Sequence[PendingCall]) -> Exception:
    failed = [(call, *failure) for call in calls for failure in call._failures]
    call, _, _, rank, failure = min(failed, key=lambda found: found[1:3])
    error = call._to_error(rank, failure)
    for call, *_ in failed:
        call._end(error)
    return error


def _ended_by_limit(calls: Sequence[PendingCall], limit: Limit) -> WorkerError:
    late = [call for call in calls if call._waiting]
    error = WorkerError(report(_silent(late), str(limit)))
    for call in late:
        call._end(error)
    return error


def _silent(calls: Sequence[PendingCall]) -> list[Silent]:
    return [
        Silent(call._label, rank, call._group.worker_infos.get(rank))
        for call in calls
        for rank in call._waiting.values()
    ]


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
