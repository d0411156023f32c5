"""A worker group whose ranks are no processes: a model of them answers the calls.

All that the driver does for a call is that of a `WorkerGroup`: it is split over the ranks of the
mesh, batches are stored, replies are awaited, recorded and joined. Only the actors of Ray are
replaced, by objects that pass the calls on to a `RankModel`. A Ray session has to be there, for the
columns of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import ray

from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.dispatch import get_registered_methods
from mcore_rl.controller.object_columns import fetch_columns, store_columns
from mcore_rl.controller.pending_call import PendingCall
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.controller.worker_process import (
    Failure,
    FailureKind,
    MethodCall,
    Reply,
    StoredBatch,
    store_outputs,
)
from mcore_rl.data.batch import Batch

Schedule = Callable[[float, Callable[[], None]], None]  # delay in seconds, callback


@dataclass(eq=False, slots=True)
class RankCall:
    """A call that a rank has got, and the reply that it owes."""

    worker_class: type
    rank: int
    method: str
    is_output: bool  # whether the value counts; other ranks reply with None
    args: list[Any]  # the same list for all ranks of a part
    kwargs: dict[str, Any]
    stored: tuple[Any, ...]
    reply: Future[Reply] = field(default_factory=Future)

    def future(self) -> Future[Reply]:
        return self.reply

    def fetch_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments, with the columns of batches by reference."""

        def fetch(value: Any) -> Any:
            if isinstance(value, StoredBatch):
                value = ray.get(self.stored[value.index])
            return fetch_columns(value) if isinstance(value, RemoteBatch) else value

        return [*map(fetch, self.args)], {n: fetch(value) for n, value in self.kwargs.items()}

    def answer(self, value: Any = None, inputs: Sequence[Batch] = ()) -> None:
        """Reply with a value; columns of batches that are not of `inputs` are stored."""
        if self.reply.done():
            return  # the rank has died meanwhile
        if self.is_output and value is not None:
            registration = get_registered_methods(self.worker_class)[self.method]
            if registration.makes:
                value = store_columns(value)
            else:
                value = store_outputs(value, inputs, self.method, registration)
        self.reply.set_result(Reply(value if self.is_output else None))

    def fail(self, message: str) -> None:
        """Reply as Ray does for a rank that has died."""
        if not self.reply.done():
            self.reply.set_result(Reply(failure=Failure(FailureKind.DIED, "Died", message)))


class RankModel(Protocol):
    """Answer the calls of a group's ranks."""

    def execute(self, calls: Sequence[RankCall]) -> None:
        """Answer each of these calls, which were sent together, at some time."""

    def close(self) -> None:
        """End the ranks; calls are not answered any more."""


class SimulatedGroup(WorkerGroup):
    """The ranks of a layout, as a model of them.

    Attributes:
        num_calls: Calls of ranks so far.
    """

    def __init__(
        self,
        name: str,
        worker_class: type,
        layout: Layout,
        timeouts: TimeoutsConfig,
        model: RankModel,
        schedule: Schedule,
    ) -> None:
        """Build the group; its ranks are there at once, and no call starts them.

        Args:
            schedule: Calls back later, when the driver waits.
        """
        self.num_calls = 0
        self._model, self._schedule = model, schedule
        self._arrived: list[RankCall] = []
        self._set_up(name, worker_class, layout, timeouts, model.close)
        # New samples are stored when a model makes them, as no process of Ray returns objects.
        self._registered = {n: replace(mark, makes=False) for n, mark in self._registered.items()}
        self._actors = [_RankHandle(self, rank) for rank in range(layout.world_size)]
        # The calls by which Ray starts ranks, none of which waits for a reply: a start takes its
        # time in the methods of the worker that the model answers, such as `start` of a server.
        has_started = PendingCall(self, "__init__", {}, dict, self._start_timeout)
        self._info_call = self._rendezvous_call = self._build_call = has_started

    def send(self, rank: int, call: MethodCall, stored: tuple[Any, ...]) -> RankCall:
        """Give a call to the model, together with others that are sent before the driver waits."""
        self.num_calls += 1
        sent = RankCall(self._worker_class, rank, *call, stored)
        if not self._arrived:
            self._schedule(0.0, self._execute)
        self._arrived.append(sent)
        return sent

    def _execute(self) -> None:
        calls, self._arrived = self._arrived, []
        self._model.execute(calls)

    def _kill_actors(self) -> None:
        """Do nothing: the model ends with what the group gives back."""


@dataclass(frozen=True, slots=True)
class _RankHandle:
    """The part of a handle of Ray's actors that a group uses: `handle.call.remote(call)`."""

    group: SimulatedGroup
    rank: int

    @property
    def call(self) -> _RankHandle:
        return self

    def remote(self, call: MethodCall, *stored: Any) -> RankCall:
        return self.group.send(self.rank, call, stored)
