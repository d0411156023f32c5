"""Calls of worker groups that have been sent: wait for the replies, raise the likeliest cause.

When ranks do not answer in time, a task on each of their nodes reads what their processes do.
"""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

import ray
from ray import get_runtime_context, is_initialized
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller.object_columns import LostColumnsError
from mcore_rl.controller.process_cleanup import wait_if_ray_died
from mcore_rl.controller.worker_process import Failure, FailureKind, Reply, WorkerInfo
from mcore_rl.observability.stacks import (
    STUCK_STATES,
    ProcessState,
    format_stacks,
    inspect_process,
    summarize_states,
)
from mcore_rl.observability.timeline import TIMELINE

GRACE_S = 2.0  # after a first failure, for the rank that caused it to report, too
NODE_GRACE_S = 12.0  # the same with ranks on several nodes: Ray takes so long to notice a death
STDERR_LINES = 20
_POLL_S = 1.0
_INSPECT_S = 60.0  # for the tasks that inspect processes, on all nodes together
_MAX_NAMED = 4  # ranks whose state is in the first line of an error


class WorkerError(RuntimeError):
    """A rank raised an exception, died or did not answer in time.

    The message names group, method and rank.
    """


@dataclass(frozen=True, slots=True)
class Timeout:
    """The limit of a wait, and the setting that it comes from."""

    seconds: float
    setting: str  # "timeouts.call_s"

    def __str__(self) -> str:
        return f"{self.seconds:g} s ({self.setting})"


class CalledGroup(Protocol):
    """The part of a group that a pending call uses."""

    name: str
    worker_infos: dict[int, WorkerInfo]  # by world rank, of the processes that have come up
    end_reason: str  # why the group takes no more calls; empty while it does

    def close(self, reason: str = "") -> None: ...


class RunningGroup(CalledGroup, Protocol):
    """A group whose ranks can be asked whether they live."""

    def ping(self) -> dict[ray.ObjectRef, int]:
        """Call each rank; return its world rank by Ray's reference to the reply."""


RUNNING_GROUPS: weakref.WeakSet[RunningGroup] = weakref.WeakSet()  # of this driver


class SentCall(Protocol):
    """Ray's reference to the reply of a rank."""

    def future(self) -> Future[Reply]: ...


class PendingCall[T]:
    """A call on the ranks of one `group`. `result` may be called again."""

    def __init__(
        self,
        group: CalledGroup,
        method: str,
        calls: Mapping[SentCall, int],
        finish: Callable[[dict[int, Any]], T],
        timeout: Timeout,
    ) -> None:
        """Wait for nothing yet.

        Args:
            calls: World rank of each reference to a reply.
            finish: Joins the values by world rank.
        """
        self.group, self._label, self._finish = group, f"{group.name}.{method}", finish
        self._timeout, self._sent_at = timeout, time.monotonic()
        self._waiting = {reference.future(): rank for reference, rank in calls.items()}
        TIMELINE.follow(group.name, method, [*self._waiting])
        self._values: dict[int, Any] = {}
        self._failures: list[tuple[FailureKind, float, int, Failure]] = []  # time, rank
        self._error: Exception | None = None

    def result(self, timeout: Timeout | None = None) -> T:
        """Wait for every rank, by default for the timeout of the method.

        The first failure, or the timeout, ends the group.

        Raises:
            ConfigError: a worker raised it.
            WorkerError: a rank raised something else, died, or did not answer in time.
        """
        return gather_results([self], timeout)[0]

    def has_ended(self) -> bool:
        """Return whether all ranks have answered, or one has failed, without waiting.

        Raises:
            WorkerError: they have not answered within the timeout of the method.
        """
        for future in [future for future in self._waiting if future.done()]:
            self._record_reply(future)
        if self._failures or not self._waiting:
            return True
        if self.is_late():
            raise _end_by_timeout([self], self._timeout)
        return False

    @property
    def has_failed(self) -> bool:
        """Return whether a reply so far is a failure, which `result` raises."""
        return bool(self._failures)

    def is_late(self) -> bool:
        """Return whether a rank has not answered within the timeout of the method."""
        return bool(self._waiting) and time.monotonic() > self._sent_at + self._timeout.seconds

    def end_if_rank_died(self) -> WorkerError | None:
        """End the group if a reply so far says that a rank has died; return the error."""
        deaths = [(rank, why) for kind, _, rank, why in self._failures if kind is FailureKind.DIED]
        if not deaths:
            return None
        error = self._to_error(*deaths[0])
        assert isinstance(error, WorkerError)
        self._end(error)
        return error

    def _record_reply(self, future: Future[Reply]) -> FailureKind | None:
        """Record the value or failure of a reply that has arrived; return the kind of failure."""
        rank = self._waiting.pop(future)
        try:
            reply = future.result()
        except RayTaskError as error:  # outside of the worker: arguments that cannot be unpickled
            cause = error.cause or error
            reply = Reply(
                failure=Failure(FailureKind.RAISED, type(cause).__name__, str(cause), str(error))
            )
        except RayError as error:
            wait_if_ray_died()
            message = _extract_exit_detail(error)
            reply = Reply(failure=Failure(FailureKind.DIED, type(error).__name__, message))
        if reply.failure is None:
            self._values[rank] = reply.value
            return None
        self._failures.append((reply.failure.kind, time.monotonic(), rank, reply.failure))
        return reply.failure.kind

    def _to_error(self, rank: int, failure: Failure) -> Exception:
        """Return the error to raise for a failure, with the end of the rank's stderr."""
        if self.group.end_reason:
            return WorkerError(f"{self._label} was lost: {self.group.end_reason}")
        head = f"{self._label}: rank {rank}"
        if failure.kind is FailureKind.CONFIG:
            return ConfigError(f"{head}: {failure.message}")
        info = self.group.worker_infos.get(rank)
        tail = _read_last_lines(info.stderr_file) if info else ""
        if failure.kind is FailureKind.DIED:
            where = f" ({info})" if info else ""
            return WorkerError(f"{head}{where} died. {failure.message}{tail}")
        trace = f"\n\n{failure.trace}".rstrip() + tail
        message = f"{failure.type_name}: {failure.message}"
        if failure.type_name == LostColumnsError.__name__:
            message += describe_dead_ranks()
        return WorkerError(f"{head} raised {message}{trace}")

    def _end(self, error: Exception) -> None:
        self._error = error
        self.group.close(f"the group has ended: {str(error).splitlines()[0]}")


def describe_dead_ranks() -> str:
    """Return "; dead: " and the ranks of all groups that have died, or "" if none has.

    A rank that is in no call may have died unnoticed.
    """
    groups = [group for group in RUNNING_GROUPS if not group.end_reason]
    pings = {reply: (group, rank) for group in groups for reply, rank in group.ping().items()}
    answered = ray.wait([*pings], num_returns=len(pings), timeout=GRACE_S)[0] if pings else []
    dead = []
    for reply in answered:
        try:
            ray.get(reply)
        except RayError:
            group, rank = pings[reply]
            dead.append(f"{group.name}, rank {rank} ({group.worker_infos[rank]})")
    return f"; dead: {'; '.join(sorted(dead))}" if dead else ""


def gather_results[T](calls: Sequence[PendingCall[T]], timeout: Timeout | None = None) -> list[T]:
    """Wait for calls on several groups together; return their results.

    The first failure of any rank, or the timeout (by default the longest of the calls), ends the
    wait for all. Groups with a failed or silent rank end; others stay. Of several failures the
    likeliest cause is raised: a death before bad input, before other exceptions, before those that
    blame another rank; of one kind the first.

    Raises:
        ConfigError, WorkerError: as `PendingCall.result`.
    """
    if not calls:
        return []
    for call in calls:
        if call._error is not None:
            raise call._error
    timeout = timeout or _get_longest_timeout(calls)
    if any(call._waiting for call in calls):
        _collect_replies(calls, timeout.seconds, mildest=FailureKind.BLAMED)
    if any(call._failures for call in calls):
        if not any(call.group.end_reason for call in calls):
            # The error may come of a death that is noticed only later: wait for that for a moment.
            _collect_replies(calls, _get_grace_s(calls), mildest=FailureKind.DIED)
        raise _end_by_failure(calls)
    if any(call._waiting for call in calls):
        raise _end_by_timeout(calls, timeout)
    return [call._finish(call._values) for call in calls]


def wait_for_survivors(
    calls: Sequence[PendingCall[Any]],
    expendable: Collection[CalledGroup],
    timeout: Timeout | None = None,
    on_death: Callable[[], None] | None = None,
) -> dict[int, WorkerError]:
    """Wait for calls on several groups, of which the `expendable` ones may die.

    When a rank of an expendable group dies, that group ends, `on_death` is called, and calls of
    others may fail if they blame a peer. An expendable group that does not answer in time counts as
    dead if a process of it is stopped by a signal, and after a death in any case: ranks may wait
    for those that died.

    Returns:
        The errors of the deaths, by index of the call. If there are none, all calls have succeeded.

    Raises:
        ConfigError, WorkerError: as `gather_results`, for anything else that fails.
    """
    timeout = timeout or _get_longest_timeout(calls)
    deadline, blamed_at = time.monotonic() + timeout.seconds, 0.0
    deaths: dict[int, WorkerError] = {}
    expendable, indices = {*expendable}, {call: index for index, call in enumerate(calls)}
    replies, waiting = ReplyQueue(calls), {call for call in calls if call._waiting}
    failed = [call for call in calls if call._failures]
    kinds = _list_failure_kinds(failed, expendable)
    while waiting:
        answered = replies.wait(min(_POLL_S, max(0.0, deadline - time.monotonic())))
        waiting.difference_update([call for call in answered if not call._waiting])
        failed += [call for call in answered if call._failures]
        kinds |= _list_failure_kinds(failed, expendable)
        blamed_at = blamed_at or (time.monotonic() if kinds else 0.0)
        if kinds - {FailureKind.DIED, FailureKind.BLAMED}:
            gather_results(calls, timeout)
        if kinds == {FailureKind.BLAMED} and time.monotonic() > blamed_at + _get_grace_s(calls):
            raise _end_by_failure(calls)
        if new_deaths := _end_dead_groups({indices[call]: call for call in failed}, deaths):
            deaths |= new_deaths
            if on_death is not None:
                on_death()
        failed = []
        if time.monotonic() >= deadline:
            is_first = not deaths
            deaths |= _end_silent_groups(calls, expendable, deaths, timeout)
            if is_first and on_death is not None:
                on_death()
            # The others may have waited for those that have just ended.
            deadline = time.monotonic() + NODE_GRACE_S
    if kinds == {FailureKind.BLAMED} or not kinds <= {FailureKind.DIED, FailureKind.BLAMED}:
        raise _end_by_failure(calls)
    return deaths | _end_dead_groups(dict(enumerate(calls)), deaths)


class ReplyQueue:
    """The replies of many calls as they arrive. A wait looks at new ones only, not at all calls.

    One thread at a time may use it.
    """

    def __init__(self, calls: Iterable[PendingCall[Any]] = ()) -> None:
        self._answered: SimpleQueue[tuple[PendingCall[Any], Future[Reply]]] = SimpleQueue()
        self._watched: weakref.WeakSet[PendingCall[Any]] = weakref.WeakSet()
        self.watch(calls)

    def watch(self, calls: Iterable[PendingCall[Any]]) -> None:
        """Wait for these calls, too, from now on."""
        for call in calls:
            if call not in self._watched:
                self._watched.add(call)
                for future in [*call._waiting]:
                    future.add_done_callback(partial(self._put, call))

    def _put(self, call: PendingCall[Any], future: Future[Reply]) -> None:
        self._answered.put((call, future))

    def wait(self, seconds: float) -> list[PendingCall[Any]]:
        """Wait until a rank has answered, at most so long; return the calls with new replies."""
        deadline, answered = time.monotonic() + seconds, list[PendingCall[Any]]()
        with contextlib.suppress(Empty):
            while True:
                left_s = 0.0 if answered else max(0.0, deadline - time.monotonic())
                call, future = self._answered.get(timeout=left_s)
                if future in call._waiting:  # else `has_ended` has recorded it
                    call._record_reply(future)
                    answered.append(call)
        return answered


def _get_longest_timeout(calls: Sequence[PendingCall[Any]]) -> Timeout:
    return max((call._timeout for call in calls), key=lambda timeout: timeout.seconds)


def _get_grace_s(calls: Sequence[PendingCall[Any]]) -> float:
    nodes = {info.node_id for call in calls for info in call.group.worker_infos.values()}
    return NODE_GRACE_S if len(nodes) > 1 else GRACE_S


def _collect_replies(
    calls: Sequence[PendingCall[Any]], seconds: float, mildest: FailureKind
) -> None:
    """Record replies until all have come, the time is over, or one fails.

    `mildest` is the mildest kind of failure that ends the wait.
    """
    sent = {future: call for call in calls for future in call._waiting}
    if any(kind <= mildest for call in calls for kind, *_ in call._failures):
        return
    with contextlib.suppress(TimeoutError):
        for future in as_completed(sent, timeout=seconds):
            failure = sent[future]._record_reply(future)
            if failure is not None and failure <= mildest:
                return


def _list_failure_kinds(
    calls: Sequence[PendingCall[Any]], expendable: Collection[CalledGroup]
) -> set[FailureKind]:
    """Return the kinds; the death of a group that is not expendable counts as RAISED."""
    return {
        FailureKind.RAISED if kind is FailureKind.DIED and call.group not in expendable else kind
        for call in calls
        for kind, *_ in call._failures
    }


def _end_dead_groups(
    calls: Mapping[int, PendingCall[Any]], ended: Collection[int]
) -> dict[int, WorkerError]:
    """End the groups in which a rank has died, except those of `ended`; return errors by index."""
    errors = {index: call.end_if_rank_died() for index, call in calls.items() if index not in ended}
    return {index: error for index, error in errors.items() if error is not None}


def _end_silent_groups(
    calls: Sequence[PendingCall[Any]],
    expendable: Collection[CalledGroup],
    deaths: Collection[int],
    timeout: Timeout,
) -> dict[int, WorkerError]:
    """End the expendable groups that have not answered; raise if there are none to end.

    Before any death, end only those with a stopped process: the others may wait for it.
    """
    late = [
        index
        for index, call in enumerate(calls)
        if call._waiting and call.group in expendable and index not in deaths
    ]
    wait_if_ray_died()  # or is stopped
    if not deaths:
        late = [index for index in late if find_stopped(_list_unanswered([calls[index]]))]
    if not late:
        raise _end_by_timeout(calls, timeout)
    error = _end_by_timeout([calls[index] for index in late], timeout)
    return dict.fromkeys(late, error)


def _end_by_failure(calls: Sequence[PendingCall[Any]]) -> Exception:
    """End the groups with failures; return the error of the likeliest cause."""
    failed = [(call, *failure) for call in calls for failure in call._failures]
    # By kind, then by time: the lowest kind is the likeliest cause of the others.
    call, _, _, rank, failure = min(failed, key=lambda entry: entry[1:3])
    error = call._to_error(rank, failure)
    for call, *_ in failed:
        call._end(error)
    return error


def _end_by_timeout(calls: Sequence[PendingCall[Any]], timeout: Timeout) -> WorkerError:
    """End the groups that have not answered; return an error with the stacks of their ranks."""
    wait_if_ray_died()  # or is stopped
    late = [call for call in calls if call._waiting]
    error = WorkerError(describe_unanswered(_list_unanswered(late), str(timeout)))
    for call in late:
        call._end(error)
    return error


def _list_unanswered(calls: Sequence[PendingCall[Any]]) -> list[UnansweredCall]:
    return [
        UnansweredCall(call._label, rank, call.group.worker_infos.get(rank))
        for call in calls
        for rank in call._waiting.values()
    ]


def _extract_exit_detail(error: RayError) -> str:
    """Return the one useful sentence of Ray's page about a dead actor."""
    match = re.search(r"Worker exit detail: (.*?)( Some common causes|$)", str(error), re.DOTALL)
    return match.group(1).strip() if match else str(error)[:500]


def _read_last_lines(file: str) -> str:
    try:
        lines = Path(file).read_text(errors="replace").splitlines()[-STDERR_LINES:]
    except OSError:  # the rank lived on another node
        return ""
    return f"\nThe end of {file}:\n" + "\n".join(lines) if lines else ""


@dataclass(frozen=True, slots=True)
class UnansweredCall:
    """A rank that has not answered a call."""

    call: str  # "actor.update"
    rank: int
    info: WorkerInfo | None  # None when its process has not come up

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" ({self.info})" if self.info else "")


def describe_unanswered(unanswered: Sequence[UnansweredCall], timeout: str) -> str:
    """Describe ranks that have not answered in time: one line on what they do, then their stacks.

    The first is the rank that most likely blocks the others: it is gone, or stopped, or runs while
    they wait. `timeout` is the limit of the wait and its setting, as text.
    """
    states = _inspect_processes([rank.info for rank in unanswered if rank.info is not None])

    def get_urgency(rank: UnansweredCall) -> int:
        processes = states.get(rank.info) if rank.info else None
        return min(process.urgency for process in processes) if processes else -1

    def summarize(rank: UnansweredCall) -> str:
        if rank.info is None:
            return "its process has not come up"
        processes = states.get(rank.info)
        if not processes:
            return f"its processes were not inspected in {_INSPECT_S:g} s"
        return summarize_states(processes)

    first, *rest = sorted(unanswered, key=get_urgency)
    line = f"{first.call}: {first} has not answered in {timeout}: {summarize(first)}"
    named = [
        f"{'' if rank.call == first.call else f'{rank.call} '}{rank}: {summarize(rank)}"
        for rank in rest[: _MAX_NAMED - 1]
    ]
    if rest[_MAX_NAMED - 1 :]:
        named.append(f"ranks {', '.join(str(rank.rank) for rank in rest[_MAX_NAMED - 1 :])}")
    if named:
        line += f". Nor has {'; nor has '.join(named)}"
    stacks = [
        f"{rank.call}, {rank}:\n{format_stacks(states[rank.info])}"
        for rank in (first, *rest)
        if rank.info in states
    ]
    return "\n\n".join([line, *stacks])


def find_stopped(unanswered: Sequence[UnansweredCall]) -> list[UnansweredCall]:
    """Return the ranks of which a process, or one that it started, is stopped or gone."""
    inspected = _inspect_processes([rank.info for rank in unanswered if rank.info is not None])
    states = {info: {process.state for process in inspected[info]} for info in inspected}
    return [
        rank for rank in unanswered if rank.info and states.get(rank.info, set()) & STUCK_STATES
    ]


def _inspect_processes(worker_infos: Iterable[WorkerInfo]) -> dict[WorkerInfo, list[ProcessState]]:
    """Inspect processes, those of other nodes by a task; leave out those that take too long."""
    by_node: dict[str, list[WorkerInfo]] = defaultdict(list)
    for info in worker_infos:
        by_node[info.node_id].append(info)
    if not by_node:  # Ray would be started
        return {}
    states: dict[WorkerInfo, list[ProcessState]] = {}

    def inspect_here(infos: Sequence[WorkerInfo]) -> None:  # without Ray, which may be what hangs
        for info in infos:
            states[info] = inspect_process(info.pid)

    # A thread each, as even the calls that send tasks may not return.
    local_infos = by_node.pop(get_runtime_context().get_node_id() if is_initialized() else "", [])
    threads = [
        Thread(target=inspect_here, args=[local_infos], daemon=True),
        Thread(target=_inspect_on_nodes, args=[by_node, states], daemon=True),
    ]
    deadline = time.monotonic() + _INSPECT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline + 1.0 - time.monotonic()))
    return {**states}


def _inspect_on_nodes(
    by_node: Mapping[str, Sequence[WorkerInfo]], states: dict[WorkerInfo, list[ProcessState]]
) -> None:
    """Add the states of the processes on these nodes."""
    tasks = {
        _inspect_pids.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote([info.pid for info in infos]): infos
        for node, infos in by_node.items()
    }
    if not tasks:
        return
    done, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=_INSPECT_S)
    for task in done:
        with contextlib.suppress(RayError):  # the node is gone
            states.update(zip(tasks[task], ray.get(task), strict=True))
    for task in late:
        ray.cancel(task, force=True)


@ray.remote(num_cpus=0, max_retries=0)
def _inspect_pids(pids: list[int]) -> list[list[ProcessState]]:
    return [inspect_process(pid) for pid in pids]
