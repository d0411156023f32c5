"""Ranks that torchrun has started, called like a WorkerGroup; no Ray.

Rank 0 runs the job. The others run what it calls, until it ends. Calls and results travel over a
process group of gloo, as tensors, numbers and text: nothing that is received is run. Ranks of one
machine meet in a rendezvous of ours: torchrun's store answers whoever asks, on every interface.

A rank that fails ends with its error. torchrun then ends the others. A rank that does not get on
writes its stacks a little before the others give up on it.
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
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.controller.dispatch import registered_methods
from mcore_rl.controller.stop_signals import SIGNALS, RunStopped
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.observability.stacks import StackTimer
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.network import use_interface_towards
from mcore_rl.parallel.rendezvous import RendezvousServer, fetch_endpoint, share_endpoint
from mcore_rl.parallel.store import join_world

c10d: Any = dist
_STACKS_BEFORE_S = 30.0  # how long before the limit of a wait a rank writes its stacks
# What tells the ranks of one launch from those of another on the same machine.
_OF_A_LAUNCH = "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
# Makes the worker of a name on this rank; the number is one that rank 0 has for it.
Build = Callable[[str, int], Any]


def is_launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def rank() -> int:
    return int(os.environ["RANK"])


def check_world(layout: Layout) -> None:
    """Raises ConfigError when torchrun has started more or fewer ranks than the layout has."""
    if (found := int(os.environ["WORLD_SIZE"])) != layout.world_size:
        raise ConfigError(
            f"torchrun has started {found} ranks, engine.layout has {layout.world_size}; allowed: "
            f"as many (torchrun --nproc-per-node {layout.world_size})"
        )


class TorchrunRanks:
    """All ranks, as rank 0 sees them. A context manager; the others call `serve`."""

    def __init__(self, backend: str, layout: Layout, timeout_s: float, build: Build) -> None:
        """Joins torch's default group. `timeout_s` limits each wait of one rank for others."""
        self.mesh, self._build = Mesh(layout), build
        self._workers: dict[str, Any] = {}
        self._timeout_s, self._doing, host = timeout_s, "the start", socket.gethostname()
        self._me = f"rank {rank()} on {host}"
        self._timer = StackTimer(self._me, timeout_s - min(_STACKS_BEFORE_S, timeout_s / 5))
        with _joined(backend, timeout_s):
            self._calls = c10d.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._hosts: list[str] = []
        self._hosts = self._collected(host)  # of all ranks, on rank 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind in (None, RunStopped):  # after a failure torchrun ends the others
            self._send({"method": ""})
            c10d.destroy_process_group()
        self._timer.stop()

    def group(self, name: str, number: int) -> TorchrunGroup:
        """The workers that `build` makes of these on every rank."""
        self._send({"method": "__init__", "name": name, "number": number})
        self._workers[name] = self._build(name, number)
        self._meet()
        return TorchrunGroup(self, name, self.mesh, type(self._workers[name]))

    def serve(self) -> None:
        """Of ranks above 0: returns when rank 0 has ended. Signals are its business."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        while method := (call := self._received())["method"]:
            self._begin(call)
            if method == "__init__":
                self._workers[call["name"]] = self._build(call["name"], call["number"])
                self._meet()
            else:
                self._collected(self._run(call))
        c10d.destroy_process_group()
        self._timer.stop()

    def call(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of rank 0: what the method gives, over all ranks."""
        call = {"method": method, "name": name, "args": _packed(args), "kwargs": _packed(kwargs)}
        self._send(call)
        found = dict(enumerate(self._collected(self._run(call))))
        self._timer.start(f"what follows {self._doing}")  # as long the others wait
        registration = registered_methods(type(self._workers[name]))[method]
        return registration.dispatch_mode.gather(
            registration.scatter(self.mesh, args, kwargs), found
        )

    def _run(self, call: dict[str, Any]) -> Any:
        """This rank's part of a call."""
        worker, method = self._workers[call["name"]], call["method"]
        registration = registered_methods(type(worker))[method]
        args, kwargs = tuple(_unpacked(call["args"])), _unpacked(call["kwargs"])
        for part in registration.scatter(self.mesh, args, kwargs):
            if rank() in part.ranks:
                try:
                    value = getattr(worker, method)(*part.args, **part.kwargs)
                except Exception as error:
                    error.add_note(f"{self._me}, in {self._doing}")
                    raise
                return value if part.output_rank in (None, rank()) else None
        return None

    def _begin(self, call: dict[str, Any]) -> None:
        self._doing = f"{call['name']}.{call['method']}" if call["method"] else "the end"
        self._timer.start(self._doing)

    def _send(self, message: dict[str, Any]) -> None:
        self._begin(message)
        data = _bytes_of(message)
        c10d.broadcast(torch.tensor([len(data)]), 0, group=self._calls)
        c10d.broadcast(data, 0, group=self._calls)

    def _received(self) -> dict[str, Any]:
        size, wait = torch.zeros(1, dtype=torch.int64), f"the wait for a call after {self._doing}"
        self._timer.start(wait)
        try:
            c10d.broadcast(size, 0, group=self._calls)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._me}: {wait}, which rank 0 has to make in {self._timeout_s:g} s: {error}"
            ) from error
        data = torch.empty(int(size), dtype=torch.uint8)
        c10d.broadcast(data, 0, group=self._calls)
        found: dict[str, Any] = _value_of(data)
        return found

    def _collected(self, value: Any) -> list[Any]:
        """Of all ranks, by rank; on rank 0.

        Raises:
            RuntimeError: some have not come in time, and which.
        """
        self._meet()
        data = _bytes_of(_packed(value))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.mesh.world_size)]
        c10d.all_gather(sizes, torch.tensor([len(data)]), group=self._calls)
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
        padded[: len(data)] = data
        found = [torch.empty_like(padded) for _ in sizes] if rank() == 0 else None
        c10d.gather(padded, found, 0, group=self._calls)
        return [_unpacked(_value_of(f[: int(n)])) for f, n in zip(found or (), sizes, strict=False)]

    def _meet(self) -> None:
        """All ranks have done their parts."""
        timeout = timedelta(seconds=self._timeout_s)
        try:
            c10d.monitored_barrier(self._calls, timeout, wait_all_ranks=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            found = re.search(r"Ranks? ([\d, ]+) failed to pass", reason)
            late = [int(number) for number in found[1].split(",")] if found else []
            hosts = {n: f" on {self._hosts[n]}" if self._hosts else "" for n in late}
            who = ", ".join(f"rank {n}{host}" for n, host in hosts.items())
            raise RuntimeError(
                f"{self._doing}: {who or 'rank 0, or one that it waits for,'} has not ended its "
                f"part; the limit is {self._timeout_s:g} s; told by {self._me}: {reason}"
            ) from error


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank lives, as WorkerInfo of a WorkerGroup says it."""

    host: str


class TorchrunGroup:
    """The workers of one name: their registered methods, called as those of a WorkerGroup."""

    def __init__(self, ranks: TorchrunRanks, name: str, mesh: Mesh, worker_class: type) -> None:
        self.name, self.mesh = name, mesh
        self.worker_infos = {0: Place(socket.gethostname())}  # the rank that writes
        self._ranks, self._methods = ranks, registered_methods(worker_class)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self.__dict__.get("_methods", {}):
            raise AttributeError(f"the group has no registered method {name!r}")
        return lambda *args, **kwargs: self._ranks.call(self.name, name, args, kwargs)


@contextlib.contextmanager
def _joined(backend: str, timeout_s: float) -> Iterator[None]:
    """In torch's default group; inside, ranks that come later can still join."""
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        use_interface_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        c10d.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        yield
        return
    launch = "torchrun " + " ".join(map(os.environ.__getitem__, _OF_A_LAUNCH))
    if rank():
        join_world(backend, timeout_s, fetch_endpoint(launch, timeout_s))
        yield
        return
    server = RendezvousServer("127.0.0.1")  # until this process ends
    with share_endpoint(server.endpoint, launch):
        join_world(backend, timeout_s, server.endpoint)
        yield


def _packed(value: Any) -> Any:
    """What torch.load takes without running anything."""
    if isinstance(value, Batch):
        return {"batch": {name: _packed(column) for name, column in value.columns.items()}}
    if isinstance(value, Jagged):
        return {"values": _packed(value.values), "offsets": _packed(value.offsets)}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    if isinstance(value, dict):
        return {"dict": {name: _packed(entry) for name, entry in value.items()}}
    if isinstance(value, list | tuple):
        return [_packed(entry) for entry in value]
    return value if isinstance(value, str | int | float | None) else None


def _unpacked(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, list):
        return [_unpacked(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "batch" in value:
        return Batch({name: _unpacked(column) for name, column in value["batch"].items()})
    if "dict" in value:
        return {name: _unpacked(entry) for name, entry in value["dict"].items()}
    return Jagged(_unpacked(value["values"]), _unpacked(value["offsets"]))


def _bytes_of(value: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _value_of(data: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
