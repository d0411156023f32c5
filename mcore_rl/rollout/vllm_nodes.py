"""One vLLM server over several nodes, by vLLM's own `nnodes`: this node's part of it.

The first node has the engine, its scheduler and the first workers. The others have workers only,
which vLLM calls headless. All are ranks of one group and are called alike, but what a server is
asked for, the engine tells all workers: the other nodes return when the first one has.

All that listens is on the address by which the ranks have met. vLLM's queues between nodes (ZeroMQ)
and gloo's or NCCL's connections are neither authenticated nor encrypted.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed

from mcore_rl.config.errors import PeerError
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer, use_interface_of
from mcore_rl.parallel.rendezvous_client import LateError, LostError, RendezvousClient
from mcore_rl.parallel.store import RendezvousStore
from mcore_rl.rollout.stopped_processes import StoppedProcesses

if TYPE_CHECKING:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from mcore_rl.rollout.vllm_server import VLLMServer


class ServerNodes:
    """The `count` nodes of a server, which are ranks in a row of a group, as one of them sees them.

    The ranks meet at the rendezvous of their group (RENDEZVOUS_* in the environment).
    """

    def __init__(self, count: int, rank: int, world_size: int, timeout_s: float) -> None:
        self.count, self.timeout_s = count, timeout_s
        self.server, self.node_rank = divmod(rank, count)
        endpoint = RendezvousEndpoint.from_environment()
        self._store = RendezvousClient(endpoint, rank, world_size, timeout_s)
        self._num_calls = 0
        self._rendezvous: RendezvousServer | None = None  # of the workers, on the first node

    @property
    def is_first(self) -> bool:
        return self.node_rank == 0

    def engine_arguments(self) -> dict[str, Any]:
        """vLLM's arguments of a node, whose workers inherit the environment that is set here.

        Returns when the first node has told where all workers meet (meet_at_our_rendezvous).
        """
        address = self._store.own_address
        os.environ["VLLM_HOST_IP"] = address
        use_interface_of(address)
        key = f"rendezvous of the workers of server {self.server}"
        if self.is_first:
            self._rendezvous = RendezvousServer(address)
            self._store.set(key, json.dumps(asdict(self._rendezvous.endpoint)).encode())
        (told,) = self._store.get([key], self.timeout_s)
        endpoint = RendezvousEndpoint(**json.loads(told))
        os.environ |= endpoint.environment()
        return {
            "nnodes": self.count,
            "node_rank": self.node_rank,
            "master_addr": endpoint.host,
            "master_port": endpoint.port,
        }

    def called(self) -> None:
        """The first node tells the others that a call has ended; they wait until it has.

        Raises PeerError on these when it does not tell: it has the rendezvous, so that is gone when
        it has died.
        """
        self._num_calls += 1
        last, this = (f"call {self._num_calls - i} of server {self.server}" for i in (1, 0))
        if self.is_first:
            self._store.set(this, b"")
            self._store.call(
                b"delete_key", last.encode()
            )  # a group begins a call when all are done
        else:
            try:
                self._store.get([this], self.timeout_s)
            except (LostError, LateError) as error:
                raise PeerError(f"the first node of server {self.server}: {error}") from error


class HeadlessWorkers:
    """The workers of a further node, as long as the server is there."""

    def __init__(self, server: VLLMServer) -> None:
        """`server` is the whole one, as its first node has it."""
        self._server = server
        self._executor: MultiprocExecutor | None = None
        self._stop_watch: StoppedProcesses | None = None

    async def start(self, *, reads_weights: bool = True) -> None:
        """As VLLMServer.start; return when the engine has met them."""
        config, name = self._server.engine_config(headless=True, reads_weights=reads_weights)
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        from mcore_rl.rollout import vllm_worker

        def launch() -> MultiprocExecutor:
            with vllm_worker.owned_processes(name):
                return MultiprocExecutor(config)

        with ThreadPoolExecutor(1, "vllm-start") as fresh:
            executor = await asyncio.get_running_loop().run_in_executor(fresh, launch)
        # The engine would wait for a worker that has died: so the rank dies, and the run is told.
        executor.register_failure_callback(lambda: os._exit(1))
        self._stop_watch = StoppedProcesses([worker.proc.pid for worker in executor.workers])
        self._executor = executor

    def close(self) -> None:
        executor, self._executor = self._executor, None
        if self._stop_watch is not None:
            self._stop_watch.close()
        if executor is not None:
            executor.shutdown()


def meet_at_our_rendezvous() -> None:
    """Workers on several nodes meet where their environment says (RENDEZVOUS_*).

    Upstream's store for them listens on all addresses and lets anybody in
    (distributed/parallel_state.py:1855).
    """
    from vllm.distributed import parallel_state

    def meet(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[RendezvousStore, int, int]]:
        query = parse_qs(urlsplit(url).query)
        rank, world_size = (int(query[name][0]) for name in ("rank", "world_size"))
        endpoint = RendezvousEndpoint.from_environment()
        yield RendezvousStore(endpoint, rank, world_size, timeout.total_seconds()), rank, world_size

    c10d: Any = torch.distributed  # it has no type stubs
    c10d.register_rendezvous_handler("mcore-rl", meet)
    parallel_state.get_distributed_init_method = lambda ip, port: f"mcore-rl://{ip}:{port}"
