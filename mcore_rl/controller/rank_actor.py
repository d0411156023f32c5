"""What Ray runs for one rank: a plain class that builds the worker and calls its methods.

An exception of the worker comes back as data. Ray would pickle it, which fails for many exception
classes, and would wrap its message in pages of its own.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import ray

from mcore_rl.config.errors import ConfigError, DiedError, PeerError
from mcore_rl.controller.compilers import prepare_compilers
from mcore_rl.controller.dispatch import ANY_COLUMNS, Registration, registered_methods
from mcore_rl.controller.node import NODE, print_to
from mcore_rl.controller.object_columns import fetch, pieces, store
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.data.batch import Batch
from mcore_rl.observability.stacks import answer_signals
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer

Recipe = tuple[type, tuple[Any, ...], dict[str, Any]]  # a worker's class and its arguments
# The method of a worker, whether its value is wanted, and its arguments. One tuple, as Ray packs
# each argument of a call on its own.
Call = tuple[str, bool, list[Any], dict[str, Any]]


class FailureKind(IntEnum):
    """Lowest is the likeliest cause when several ranks fail at once."""

    DIED = 0  # the peers of a dead rank raise errors about a lost connection
    CONFIG = 1
    RAISED = 2
    BLAMED = 3  # a PeerError: another rank's failure, seen from here


@dataclass(frozen=True, slots=True)
class Failure:
    """How one call failed on one rank."""

    kind: FailureKind
    type_name: str
    message: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of one call on one rank: a value, or a failure."""

    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a rank lives."""

    host: str
    node_id: str  # Ray's
    pid: int
    stderr_file: str  # on that host

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"


class RankActor:
    """One rank of a group. First its `info` is asked for, and of rank 0 where all can meet."""

    def __init__(
        self,
        group: str,
        rank: int,
        log_dir: Path | None = None,
        card: bytes = b"",
        fetch_s: float | None = None,
    ) -> None:
        """`card` is what a later driver has to know of a detached group; `fetch_s` limits how long
        columns may take to come here.
        """
        self._rank, self._log_dir, self._card, self._fetch_s = rank, log_dir, card, fetch_s
        self.rename(group)
        self._worker: Any = None
        self._rendezvous: RendezvousServer | None = None  # of rank 0

    def __repr__(self) -> str:
        return self._label  # Ray puts it before each line that the worker prints

    def rename(self, group: str) -> None:
        """From now on it is a rank of that group, and prints to its log."""
        self._label = f"{group}[{self._rank}]"
        if self._log_dir is None:
            return
        log = self._log_dir / f"{group}-{self._rank}.log"
        try:
            print_to(log)
        except OSError as error:  # another node, without the output folder
            print(f"{log} cannot be written, so this is the log: {error}", file=sys.stderr)

    def info(self) -> Reply:
        """The value is a `WorkerInfo`."""
        answer_signals()
        node = ray.get_runtime_context().get_node_id()
        stderr = os.path.realpath("/proc/self/fd/2")
        host = os.environ.get(NODE) or socket.gethostname()
        return Reply(WorkerInfo(host, node, os.getpid(), stderr))

    def card(self) -> Reply:
        """The value is what the group has been given for later drivers."""
        return Reply(self._card)

    def open_rendezvous(self) -> Reply:
        """The value is the endpoint of a server that stays, on the address of this node."""

        def serve() -> RendezvousEndpoint:
            if self._rendezvous is None:  # else the ranks have met, and go on with that one
                self._rendezvous = RendezvousServer(ray.util.get_node_ip_address())
            return self._rendezvous.endpoint

        return _guarded(serve)

    def build(self, rendezvous: Reply, recipe: bytes) -> Reply:
        """Makes the worker from its class and arguments, in the place of one that was there.

        `rendezvous` is what `open_rendezvous` of rank 0 has returned, and `recipe` a pickled
        `Recipe`: with it comes torch, which is not to be imported before this.
        """
        if rendezvous.failure is not None:
            return rendezvous
        os.environ |= rendezvous.value.environment()

        def make() -> None:
            prepare_compilers()
            if self._worker is not None:
                self._worker.close()
                self._worker = None
            worker_class, args, kwargs = ray.cloudpickle.loads(recipe)
            self._worker = worker_class(*args, **kwargs)

        return _guarded(make)

    def call(self, call: Call, *stored: Any) -> Reply:
        """Calls a method of the worker; the value is dropped where nobody wants it.

        A `StoredBatch` among the arguments stands for one of those stored. Of batches by reference
        the columns are fetched, and what the method adds to them is stored here.
        """

        def run() -> Any:
            value, given = self._value(call, stored)
            method, is_output, *_ = call
            if not is_output:
                return None
            registration = registered_methods(type(self._worker))[method]
            return by_reference(value, given, method, registration) if given else value

        return _guarded(run)

    def make(self, call: Call, num_pieces: int, num_parts: int, *stored: Any) -> list[Any]:
        """The same for a method that returns new samples: the reply, and objects of `pieces`.

        They are results of this call, so they belong to the caller and outlive this process.
        """
        found: list[Any] = [None] * (num_pieces * (1 + num_parts))

        def run() -> Any:
            made, _ = self._value(call, stored)
            if made is None:  # of a rank that has no part in it
                return None
            value, found[:] = pieces(made, num_pieces, num_parts)
            return value

        return [_guarded(run), *found]

    def _value(self, call: Call, stored: Sequence[Any]) -> tuple[Any, list[Batch]]:
        """What the method returned, and the batches by reference as it has got them."""
        given: list[Batch] = []

        def here(value: Any) -> Any:
            value = stored[value.index] if isinstance(value, StoredBatch) else value
            if not isinstance(value, RemoteBatch):
                return value
            part = getattr(self._worker, "part", None)
            read = value if part is None else value.of_part(part)
            given.append(fetch(read, self._fetch_s))
            return given[-1]

        method, _, args, kwargs = call
        own = {name: here(value) for name, value in kwargs.items()}
        return getattr(self._worker, method)(*map(here, args), **own), given


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Stands for a batch that is in the object store, as several ranks get it."""

    index: int


def by_reference(
    value: Any, given: Sequence[Batch], method: str, registration: Registration
) -> Any:
    """What a method returned, with batches, alone or in a tuple, by reference.

    Raises:
        ValueError: a batch has a column that is neither of those given nor of those it writes.
    """
    if isinstance(value, tuple):
        return tuple(by_reference(one, given, method, registration) for one in value)
    if not isinstance(value, Batch):
        return value
    same = {n for n, c in value.columns.items() for g in given if g.columns.get(n) is c}
    writes = registration.writes
    undeclared = sorted(value.columns.keys() - same - {*writes})
    if undeclared and writes != ANY_COLUMNS:
        raise ValueError(
            f"{method} returned the column {undeclared[0]!r}; it writes "
            f"{', '.join(writes) or 'none'}"
        )
    return store(value, same)


def _guarded(run: Callable[[], Any]) -> Reply:
    try:
        return Reply(run())
    except Exception as error:  # noqa: BLE001 - whatever it is, the driver raises it again
        trace = "".join(traceback.format_exception(error))
        return Reply(failure=Failure(_kind_of(error), type(error).__name__, str(error), trace))


def _kind_of(error: Exception) -> FailureKind:
    if isinstance(error, ConfigError):
        return FailureKind.CONFIG
    if isinstance(error, DiedError):
        return FailureKind.DIED
    return FailureKind.BLAMED if isinstance(error, PeerError) else FailureKind.RAISED
