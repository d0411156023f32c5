"""Ranks that torchrun has started, called like a WorkerGroup; no Ray.

Rank 0 runs the job. The others run its calls, until it ends. Calls and results are sent over a
process group of gloo, as tensors, numbers and text: no code is unpickled. Ranks of one machine meet
in a `RendezvousServer`: torchrun's store has no authentication, and listens on every interface.

A rank that fails ends with its error, and torchrun ends the others. A rank that hangs writes its
stacks a little before the others time out.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, cast

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.controller.dispatch import RemoteMethod, get_registered_methods
from mcore_rl.controller.process_cleanup import STOP_SIGNALS, RunStopped
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.observability.stacks import StackTimer
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.network import use_interface_towards
from mcore_rl.parallel.rendezvous import RendezvousServer, fetch_endpoint, share_endpoint
from mcore_rl.parallel.store import join_world

c10d: Any = dist
_STACKS_BEFORE_S = 30.0  # before the timeout of a wait, when a rank writes its stacks
# Variables that differ between launches on the same machine.
_LAUNCH_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)
CreateWorker = Callable[[str, int], Any]  # from name and number, which rank 0 sends


def is_launched() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def get_rank() -> int:
    """Return the world rank of this process."""
    return int(os.environ["RANK"])


def check_world_size(layout: Layout) -> None:
    """Raise ConfigError when torchrun has started more or fewer ranks than the layout has."""
    if (world_size := int(os.environ["WORLD_SIZE"])) != layout.world_size:
        raise ConfigError(
            f"torchrun has started {world_size} ranks, engine.layout has {layout.world_size}; "
            f"allowed: as many (torchrun --nproc-per-node {layout.world_size})"
        )


class TorchrunRanks:
    """All ranks, which rank 0 calls. A context manager; the other ranks call `serve`."""

    def __init__(
        self, backend: str, layout: Layout, timeout_s: float, create_worker: CreateWorker
    ) -> None:
        """Join torch's default group. `timeout_s` limits each wait of one rank for others."""
        self.mesh, self._create_worker = Mesh(layout), create_worker
        self._workers: dict[str, Any] = {}
        self._timeout_s, self._activity, host = timeout_s, "the start", socket.gethostname()
        self._label = f"rank {get_rank()} on {host}"
        self._timer = StackTimer(self._label, timeout_s - min(_STACKS_BEFORE_S, timeout_s / 5))
        with _join_default_group(backend, timeout_s):
            self._calls = c10d.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._hosts: list[str] = []
        self._hosts = self._gather(host)  # of all ranks, on rank 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind in (None, RunStopped):  # after a failure torchrun ends the others
            self._send({"method": ""})
            c10d.destroy_process_group()
        self._timer.stop()

    def create_group(self, name: str, number: int) -> TorchrunGroup:
        """Create a worker on every rank, by `create_worker(name, number)`."""
        self._send({"method": "__init__", "name": name, "number": number})
        self._workers[name] = self._create_worker(name, number)
        self._meet()
        return TorchrunGroup(self, name, self.mesh)

    def serve(self) -> None:
        """Run the calls of rank 0 until it ends. Signals are ignored: rank 0 acts on them."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        while method := (call := self._receive())["method"]:
            self._begin(call)
            if method == "__init__":
                self._workers[call["name"]] = self._create_worker(call["name"], call["number"])
                self._meet()
            else:
                self._gather(self._run(call))
        c10d.destroy_process_group()
        self._timer.stop()

    def call(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method on all ranks, from rank 0; return its gathered result."""
        call = {"method": method, "name": name, "args": _pack(args), "kwargs": _pack(kwargs)}
        self._send(call)
        results = dict(enumerate(self._gather(self._run(call))))
        self._timer.start(f"what follows {self._activity}")  # the other ranks wait for as long
        registration = get_registered_methods(type(self._workers[name]))[method]
        return registration.dispatch_mode.gather(
            registration.scatter(self.mesh, args, kwargs), results
        )

    def _run(self, call: dict[str, Any]) -> Any:
        """Run this rank's part of a call."""
        worker, method = self._workers[call["name"]], call["method"]
        registration = get_registered_methods(type(worker))[method]
        args, kwargs = tuple(_unpack(call["args"])), _unpack(call["kwargs"])
        for part in registration.scatter(self.mesh, args, kwargs):
            if get_rank() in part.ranks:
                try:
                    value = getattr(worker, method)(*part.args, **part.kwargs)
                except Exception as error:
                    error.add_note(f"{self._label}, in {self._activity}")
                    raise
                return value if part.output_rank in (None, get_rank()) else None
        return None

    def _begin(self, call: dict[str, Any]) -> None:
        self._activity = f"{call['name']}.{call['method']}" if call["method"] else "the end"
        self._timer.start(self._activity)

    def _send(self, message: dict[str, Any]) -> None:
        self._begin(message)
        data = _serialize(message)
        # The size first: the others have to allocate the tensor that a broadcast fills.
        c10d.broadcast(torch.tensor([len(data)]), 0, group=self._calls)
        c10d.broadcast(data, 0, group=self._calls)

    def _receive(self) -> dict[str, Any]:
        size, wait = (
            torch.zeros(1, dtype=torch.int64),
            f"the wait for a call after {self._activity}",
        )
        self._timer.start(wait)
        try:
            c10d.broadcast(size, 0, group=self._calls)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._label}: {wait}, which rank 0 has to make in {self._timeout_s:g} s: {error}"
            ) from error
        data = torch.empty(int(size), dtype=torch.uint8)
        c10d.broadcast(data, 0, group=self._calls)
        message: dict[str, Any] = _deserialize(data)
        return message

    def _gather(self, value: Any) -> list[Any]:
        """Gather the values of all ranks on rank 0, by rank.

        Raises:
            RuntimeError: some ranks were not there in time; it names them.
        """
        self._meet()
        data = _serialize(_pack(value))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.mesh.world_size)]
        c10d.all_gather(sizes, torch.tensor([len(data)]), group=self._calls)
        # `gather` takes tensors of one size.
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
        padded[: len(data)] = data
        gathered = [torch.empty_like(padded) for _ in sizes] if get_rank() == 0 else None
        c10d.gather(padded, gathered, 0, group=self._calls)
        return [
            _unpack(_deserialize(entry[: int(size)]))
            for entry, size in zip(gathered or (), sizes, strict=False)
        ]

    def _meet(self) -> None:
        """Wait until all ranks have done their parts."""
        timeout = timedelta(seconds=self._timeout_s)
        try:
            # wait_all_ranks: the error names all late ranks, not only the first.
            c10d.monitored_barrier(self._calls, timeout, wait_all_ranks=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            match = re.search(r"Ranks? ([\d, ]+) failed to pass", reason)
            late = [int(number) for number in match[1].split(",")] if match else []
            hosts = {n: f" on {self._hosts[n]}" if self._hosts else "" for n in late}
            who = ", ".join(f"rank {n}{host}" for n, host in hosts.items())
            raise RuntimeError(
                f"{self._activity}: {who or 'rank 0, or one that it waits for,'} has not ended its "
                f"part; the limit is {self._timeout_s:g} s; reported by {self._label}: {reason}"
            ) from error


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The host of a rank, as in WorkerInfo of a WorkerGroup."""

    host: str


class TorchrunGroup:
    """The workers of one name: their registered methods, called as those of a WorkerGroup."""

    def __init__(self, ranks: TorchrunRanks, name: str, mesh: Mesh) -> None:
        self.name, self.mesh = name, mesh
        self.worker_infos = {0: RankInfo(socket.gethostname())}  # the rank that writes
        self._ranks = ranks

    def call[**P, T](self, method: RemoteMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method on all ranks; return what its mode makes of their results."""
        return cast(T, self._ranks.call(self.name, method.name, args, kwargs))


@contextlib.contextmanager
def _join_default_group(backend: str, timeout_s: float) -> Iterator[None]:
    """Join torch's default group; inside, ranks that come later can still join."""
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        use_interface_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        c10d.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        yield
        return
    launch = "torchrun " + " ".join(map(os.environ.__getitem__, _LAUNCH_VARIABLES))
    if get_rank():
        join_world(backend, timeout_s, fetch_endpoint(launch, timeout_s))
        yield
        return
    server = RendezvousServer("127.0.0.1")  # until this process ends
    with share_endpoint(server.endpoint, launch):
        join_world(backend, timeout_s, server.endpoint)
        yield


def _pack(value: Any) -> Any:
    """Convert a value to types that torch.load accepts with weights_only."""
    if isinstance(value, Batch):
        return {"batch": {name: _pack(column) for name, column in value.columns.items()}}
    if isinstance(value, Jagged):
        return {"values": _pack(value.values), "offsets": _pack(value.offsets)}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    if isinstance(value, dict):
        return {"dict": {name: _pack(entry) for name, entry in value.items()}}
    if isinstance(value, list | tuple):
        return [_pack(entry) for entry in value]
    return value if isinstance(value, str | int | float | None) else None


def _unpack(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, list):
        return [_unpack(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "batch" in value:
        return Batch({name: _unpack(column) for name, column in value["batch"].items()})
    if "dict" in value:
        return {name: _unpack(entry) for name, entry in value["dict"].items()}
    return Jagged(_unpack(value["values"]), _unpack(value["offsets"]))


def _serialize(value: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _deserialize(data: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
