"""Processes of a vLLM server: on several nodes by vLLM's own `nnodes`, and stopped by a signal.

The first node has the engine, its scheduler and the first workers. The others have workers only, or
engines of further data-parallel ranks (its headless mode). All nodes are ranks of one worker group
and get the same calls, but the engine passes a call on to all workers: the other nodes return when
the first one has.

All sockets listen on the address by which the ranks have met. vLLM's queues between nodes (ZeroMQ)
and gloo's or NCCL's connections are neither authenticated nor encrypted.

This module does not import vLLM: a server imports it when it is prepared.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import torch.distributed

from mcore_rl.config.errors import PeerError
from mcore_rl.parallel.network import use_interface_of
from mcore_rl.parallel.rendezvous import (
    RendezvousClient,
    RendezvousConnectionError,
    RendezvousEndpoint,
    RendezvousServer,
    RendezvousTimeoutError,
)
from mcore_rl.parallel.store import RendezvousStore

STOPPED_S = 10.0  # py-spy and gdb stop a process for less
_POLL_S = 1.0


class ServerNodes:
    """The nodes of one server, as seen by one of them.

    They are consecutive ranks of a group, and meet at its rendezvous (RENDEZVOUS_* in the
    environment).
    """

    def __init__(self, count: int, rank: int, world_size: int, timeout_s: float) -> None:
        self.count, self.timeout_s = count, timeout_s
        self.server, self.node_rank = divmod(rank, count)
        endpoint = RendezvousEndpoint.read_environment()
        self._store = RendezvousClient(endpoint, rank, world_size, timeout_s)
        self._num_calls = 0
        self._rendezvous: RendezvousServer | None = None  # for the workers; on the first node

    @property
    def is_first(self) -> bool:
        return self.node_rank == 0

    def build_engine_arguments(self) -> dict[str, Any]:
        """Return vLLM's engine arguments of this node, and set the environment of its workers.

        Waits until the first node has published the workers' rendezvous.
        """
        address = self._store.own_address
        os.environ["VLLM_HOST_IP"] = address
        use_interface_of(address)
        key = f"rendezvous of the workers of server {self.server}"
        if self.is_first:
            self._rendezvous = RendezvousServer(address)
            with socket.create_server((address, 0)) as free:  # vLLM binds it soon
                rpc_port = free.getsockname()[1]
            value = [asdict(self._rendezvous.endpoint), rpc_port]
            self._store.set(key, json.dumps(value).encode())
        (encoded,) = self._store.get([key], self.timeout_s)
        fields, rpc_port = json.loads(encoded)
        endpoint = RendezvousEndpoint(**fields)
        os.environ |= endpoint.to_environment()
        return {
            "nnodes": self.count,
            "node_rank": self.node_rank,
            "master_addr": endpoint.host,
            "master_port": endpoint.port,
            "data_parallel_rpc_port": rpc_port,  # at which engines of further nodes report
        }

    def synchronize_call(self) -> None:
        """Make further nodes wait until the first node has finished the current call.

        Raises:
            PeerError: on a further node, if the first one has died (it has the rendezvous) or is
                late.
        """
        self._num_calls += 1
        last, this = (f"call {self._num_calls - i} of server {self.server}" for i in (1, 0))
        if self.is_first:
            self._store.set(this, b"")
            # A group begins a call when all ranks have finished the one before.
            self._store.call(b"delete_key", last.encode())
        else:
            try:
                self._store.get([this], self.timeout_s)
            except (RendezvousConnectionError, RendezvousTimeoutError) as error:
                raise PeerError(f"the first node of server {self.server}: {error}") from error


def use_worker_rendezvous() -> None:
    """Make workers on several nodes meet at the rendezvous in their environment (RENDEZVOUS_*).

    vLLM's store for them listens on all addresses, without authentication
    (distributed/parallel_state.py:1855).
    """
    from vllm.distributed import parallel_state

    def meet(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[RendezvousStore, int, int]]:
        query = parse_qs(urlsplit(url).query)
        rank, world_size = (int(query[name][0]) for name in ("rank", "world_size"))
        endpoint = RendezvousEndpoint.read_environment()
        yield RendezvousStore(endpoint, rank, world_size, timeout.total_seconds()), rank, world_size

    c10d: Any = torch.distributed  # it has no type stubs
    c10d.register_rendezvous_handler("mcore-rl", meet)
    parallel_state.get_distributed_init_method = lambda ip, port: f"mcore-rl://{ip}:{port}"


class StoppedProcesses:
    """Kills an engine's processes, and their children, that a signal has stopped for too long.

    vLLM notices a process that died; a stopped one holds up all others until they run into time
    limits. If a whole job is suspended and continued nothing is killed: this process is suspended
    with it.

    Args:
        pids: The engine's processes.
        coordinator: Process without which data-parallel ranks would wait for ever, and which vLLM
            does not watch: the engine's processes are killed when it has ended.
    """

    def __init__(
        self, pids: Sequence[int], limit_s: float = STOPPED_S, *, coordinator: int | None = None
    ) -> None:
        self._pids, self._limit_s = list(pids), limit_s
        self._coordinator = None if coordinator is None else psutil.Process(coordinator)
        self.reason = ""  # why processes were killed
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stopped-processes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch."""
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        stopped_since: dict[psutil.Process, float] = {}
        last_s, pause_s = time.monotonic(), min(_POLL_S, self._limit_s / 4)
        while not self._is_over.wait(pause_s):
            if self._coordinator is not None and not _is_running(self._coordinator):
                engines = [psutil.Process(pid) for pid in self._pids if psutil.pid_exists(pid)]
                self._kill(engines, f"its coordinator (pid {self._coordinator.pid}) has ended")
                return
            time_s = time.monotonic()
            if time_s - last_s > self._limit_s / 2:  # this process was stopped, or starved, itself
                stopped_since.clear()
            last_s = time_s
            stopped_since = {p: stopped_since.get(p, time_s) for p in self._find_stopped()}
            for process, start_s in stopped_since.items():
                if time_s - start_s >= self._limit_s:
                    reason = f"had been stopped by a signal for {self._limit_s:g} s"
                    self._kill([process], f"{_describe(process)} {reason}")

    def _find_stopped(self) -> list[psutil.Process]:
        stopped = []
        coordinator = [] if self._coordinator is None else [self._coordinator.pid]
        for pid in (*self._pids, *coordinator):
            try:
                process = psutil.Process(pid)
                family = [process, *process.children(recursive=True)]
                stopped += [member for member in family if member.status() == psutil.STATUS_STOPPED]
            except psutil.Error:  # it has ended
                continue
        return stopped

    def _kill(self, processes: Sequence[psutil.Process], reason: str) -> None:
        self.reason = self.reason or reason
        print(f"vLLM's engine is ended: {reason}", file=sys.stderr, flush=True)
        for process in processes:
            with contextlib.suppress(psutil.Error):  # it has ended
                process.kill()


def _describe(process: psutil.Process) -> str:
    """Return the name of a process, as vLLM sets it, and its pid."""
    try:
        name = process.name()
    except psutil.Error:  # it has ended
        name = "one"
    return f"its process {name} (pid {process.pid})"


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
