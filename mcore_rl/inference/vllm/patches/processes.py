"""Calls between a server and its engines, and what their processes share.

Upstream lines are those of vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from typing import Any

from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

_POLL_S = 1.0  # how often a call checks that its engine lives


@functools.cache
def end_calls_of_dead_engines() -> None:
    """Make calls other than `generate` raise EngineDeadError when the engine dies.

    vLLM does not fail their futures (v1/engine/core_client.py:1291): they would wait for ever.
    """
    upstream = AsyncMPClient._call_utility_async

    async def call(client: AsyncMPClient, *args: Any, **kwargs: Any) -> Any:
        answer = asyncio.ensure_future(upstream(client, *args, **kwargs))
        try:
            while not (await asyncio.wait({answer}, timeout=_POLL_S))[0]:
                if client.resources.engine_dead:
                    raise EngineDeadError
            return answer.result()
        finally:
            answer.cancel()

    AsyncMPClient._call_utility_async = call


@functools.cache
def return_all_answers() -> None:
    """Make a call on workers return the answers of all ranks, in their order.

    vLLM drops those of further ranks, their errors too (v1/engine/core_client.py:1699).
    """
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    async def call(
        client: Any, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        answers = await client.call_utility_all_async(
            "collective_rpc", method, timeout, args, kwargs
        )
        return [answer for rank_answers in answers for answer in rank_answers]

    DPLBAsyncMPClient.collective_rpc_async = call


@functools.cache
def bind_stores() -> None:
    """Make the stores in which ranks meet listen on the ranks' address alone.

    Two of vLLM's (v1/engine/utils.py:1261, distributed/parallel_state.py:1875) listen on all.
    """
    from vllm.distributed import parallel_state, utils

    upstream = utils.create_tcp_store

    def create(host: str, port: int, listen_socket: Any = None, **options: Any) -> Any:
        if options.get("is_master") and listen_socket is None:
            listen_socket = socket.create_server((host, port))
            port = listen_socket.getsockname()[1]
        return upstream(host, port, listen_socket, **options)

    utils.create_tcp_store = parallel_state.create_tcp_store = create


def set_up_coordinator(server: Any) -> None:
    """Set up a coordinator process that is spawned: its arguments have no config to unpickle.

    Args:
        server: ServerName, whose unpickling sets up a process.
    """
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    _get_upstream_coordinator()
    target = functools.partial(_run_coordinator, server)
    DPCoordinatorProc.run_coordinator = staticmethod(target)


def _run_coordinator(_: Any, **arguments: Any) -> None:
    _get_upstream_coordinator()(**arguments)


@functools.cache  # called before the patch, too
def _get_upstream_coordinator() -> Any:
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    return DPCoordinatorProc.run_coordinator


def name_shared_memory(server: str) -> None:
    """Put the server's name into the names of the workers' shared memory.

    vLLM's name is empty under `external_launcher` (v1/worker/cpu_worker.py:148), so that segments
    of two jobs collide, and random otherwise, so that leftovers belong to no server.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    upstream = _CPUSHMDistributed.make_group_name

    def make_group_name(communicator: Any) -> str:
        return f"mcore_rl_{server}_{upstream(communicator)}".replace("/", "_")

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
