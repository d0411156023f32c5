"""The process of one rank: an actor of Ray that builds the worker and calls its methods.

An exception of the worker comes back as data. Ray would pickle it, which fails for many exception
classes, and would wrap its message in pages of its own.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import ray

from mcore_rl.config.errors import ConfigError, DiedError, PeerError
from mcore_rl.config.python_objects import import_objects
from mcore_rl.controller.compilers import prepare_compilers
from mcore_rl.controller.dispatch import ANY_COLUMNS, Registration, get_registered_methods
from mcore_rl.controller.node import NODE, redirect_output
from mcore_rl.controller.object_columns import fetch_columns, split_into_objects, store_columns
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.data.batch import Batch
from mcore_rl.observability.process import exempt_imports_from_gc
from mcore_rl.observability.stacks import dump_stacks_on_signal
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer

WorkerSpec = tuple[type, tuple[Any, ...], dict[str, Any]]  # a worker's class and its arguments
# The method of a worker, whether its value is an output, and its arguments. One tuple, as Ray packs
# each argument of a call separately.
MethodCall = tuple[str, bool, list[Any], dict[str, Any]]


class FailureKind(IntEnum):
    """Kinds of failures; of several ranks that fail at once, the lowest is the likeliest cause."""

    DIED = 0  # the peers of a dead rank raise errors about a lost connection
    CONFIG = 1
    RAISED = 2
    BLAMED = 3  # a PeerError: the failure of another rank, seen from this one


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed call on one rank."""

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
    """The process of a rank."""

    host: str
    node_id: str  # Ray's
    pid: int
    stderr_file: str  # on that host

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Stands for an argument in the object store, which several ranks get."""

    index: int


class WorkerProcess:
    """One rank of a group: a Ray actor that has the worker."""

    def __init__(
        self,
        group: str,
        rank: int,
        log_dir: Path | None = None,
        group_spec: bytes = b"",
        fetch_timeout_s: float | None = None,
    ) -> None:
        """Print to the log of this rank; the worker is built later.

        Args:
            group_spec: Pickled class and layout of a detached group, for later drivers.
            fetch_timeout_s: Limit of fetching the columns of a batch.
        """
        self._rank, self._log_dir = rank, log_dir
        self._group_spec, self._fetch_timeout_s = group_spec, fetch_timeout_s
        self.rename(group)
        self._worker: Any = None
        self._rendezvous: RendezvousServer | None = None  # of rank 0

    def __repr__(self) -> str:
        return self._label  # Ray puts it before each line that the worker prints

    def rename(self, group: str) -> None:
        """Make this a rank of another group, and print to the log of that."""
        self._label = f"{group}[{self._rank}]"
        if self._log_dir is None:
            return
        log = self._log_dir / f"{group}-{self._rank}.log"
        try:
            redirect_output(log)
        except OSError as error:  # another node, without the output folder
            print(f"{log} cannot be written, so this is the log: {error}", file=sys.stderr)

    def get_info(self) -> Reply:
        """Reply with the `WorkerInfo` of this process."""
        dump_stacks_on_signal()
        node = ray.get_runtime_context().get_node_id()
        stderr = os.path.realpath("/proc/self/fd/2")
        host = os.environ.get(NODE) or socket.gethostname()
        return Reply(WorkerInfo(host, node, os.getpid(), stderr))

    def get_group_spec(self) -> Reply:
        """Reply with `group_spec`."""
        return Reply(self._group_spec)

    def open_rendezvous(self) -> Reply:
        """Start a rendezvous server on the address of this node; reply with its endpoint."""

        def serve() -> RendezvousEndpoint:
            if self._rendezvous is None:  # else the ranks have met, and go on with that one
                self._rendezvous = RendezvousServer(ray.util.get_node_ip_address())
            return self._rendezvous.endpoint

        return _catch_failure(serve)

    def build(self, rendezvous: Reply, spec: bytes, objects: Mapping[str, bytes]) -> Reply:
        """Create the worker; close an earlier one.

        Args:
            rendezvous: The reply of rank 0 to `open_rendezvous`.
            spec: A pickled `WorkerSpec`. Unpickling imports torch, which must not happen earlier.
            objects: Functions of the driver's Python session, by name (config/python_objects.py).
        """
        if rendezvous.failure is not None:
            return rendezvous
        os.environ |= rendezvous.value.to_environment()

        def create() -> None:
            prepare_compilers()
            import_objects(objects)
            if self._worker is not None:
                self._worker.close()
                self._worker = None  # its memory is free before the next worker takes any
            with exempt_imports_from_gc():  # of torch and of the engine
                worker_class, args, kwargs = ray.cloudpickle.loads(spec)
                self._worker = worker_class(*args, **kwargs)

        return _catch_failure(create)

    def call(self, call: MethodCall, *stored: Any) -> Reply:
        """Call a method of the worker; reply with its value if that is an output.

        A `StoredBatch` among the arguments is replaced by one of `stored`. Columns of batches by
        reference are fetched, and the columns that the method adds are stored on this node.
        """

        def run() -> Any:
            value, inputs = self._run_method(call, stored)
            method, is_output, *_ = call
            if not is_output:
                return None
            registration = get_registered_methods(type(self._worker))[method]
            return store_outputs(value, inputs, method, registration) if inputs else value

        return _catch_failure(run)

    def call_for_samples(
        self, call: MethodCall, num_objects: int, num_parts: int, *stored: Any
    ) -> list[Any]:
        """Call a method that returns new samples; return the reply and `split_into_objects`.

        The objects are results of this call, so they belong to the caller and outlive this process.
        """
        objects: list[Any] = [None] * (num_objects * (1 + num_parts))

        def run() -> Any:
            batch, _ = self._run_method(call, stored)
            if batch is None:  # the rank makes no samples
                return None
            value, objects[:] = split_into_objects(batch, num_objects, num_parts)
            return value

        return [_catch_failure(run), *objects]

    def _run_method(self, call: MethodCall, stored: Sequence[Any]) -> tuple[Any, list[Batch]]:
        """Return the value of the method, and the batches by reference that were fetched for it."""
        inputs: list[Batch] = []

        def fetch(value: Any) -> Any:
            value = stored[value.index] if isinstance(value, StoredBatch) else value
            if not isinstance(value, RemoteBatch):
                return value
            part = getattr(self._worker, "part", None)
            batch = value if part is None else value.select_part(part)
            inputs.append(fetch_columns(batch, self._fetch_timeout_s))
            return inputs[-1]

        method, _, args, kwargs = call
        fetched = {name: fetch(value) for name, value in kwargs.items()}
        return getattr(self._worker, method)(*map(fetch, args), **fetched), inputs


def store_outputs(
    value: Any, inputs: Sequence[Batch], method: str, registration: Registration
) -> Any:
    """Replace a batch that a method returned, alone or in a tuple, by one by reference.

    Columns of the inputs are left out.

    Raises:
        ValueError: a batch has a column that is neither of the inputs nor of those it writes.
    """
    if isinstance(value, tuple):
        return tuple(store_outputs(entry, inputs, method, registration) for entry in value)
    if not isinstance(value, Batch):
        return value
    unchanged = {n for n, c in value.columns.items() for b in inputs if b.columns.get(n) is c}
    writes = registration.writes
    undeclared = sorted(value.columns.keys() - unchanged - {*writes})
    if undeclared and writes != ANY_COLUMNS:
        raise ValueError(
            f"{method} returned the column {undeclared[0]!r}; it writes "
            f"{', '.join(writes) or 'none'}"
        )
    return store_columns(value, unchanged)


def _catch_failure(run: Callable[[], Any]) -> Reply:
    """Call `run`; reply with its result, or with the exception that it raised."""
    try:
        return Reply(run())
    except Exception as error:  # noqa: BLE001 - whatever it is, the driver raises it again
        trace = "".join(traceback.format_exception(error))
        return Reply(
            failure=Failure(_classify_error(error), type(error).__name__, str(error), trace)
        )


def _classify_error(error: Exception) -> FailureKind:
    if isinstance(error, ConfigError):
        return FailureKind.CONFIG
    if isinstance(error, DiedError):
        return FailureKind.DIED
    return FailureKind.BLAMED if isinstance(error, PeerError) else FailureKind.RAISED
