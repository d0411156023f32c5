"""Data-parallel attention ranks of a server: an engine each, with a KV cache of its own.

vLLM runs them in lock step, since each step exchanges tokens of all ranks with the experts: a rank
without requests computes a dummy batch (v1/engine/core.py:2143). A coordinator process tells idle
ranks that one has requests. Upstream lines are those of vLLM 0.32.
"""

from __future__ import annotations

import functools
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MAX_GROUPS = 1 << 16  # that a router remembers


class RankRouter:
    """Chooses the rank of each request: that of its group, or the least loaded.

    Args:
        num_ranks: Number of data-parallel ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._tokens = [0] * num_ranks  # of running requests
        self._ranks: dict[str, int] = {}  # by group
        self._num_groups = Counter[int]()  # by rank

    @contextmanager
    def route(self, group: str, num_tokens: int) -> Iterator[int | None]:
        """Yield the rank of a request, which runs in the with block; None if there is one rank.

        Args:
            group: See `SamplingParams.group`.
            num_tokens: Tokens of prompt and responses, at most.
        """
        if len(self._tokens) == 1:
            yield None
            return
        rank = self._choose(group)
        self._tokens[rank] += num_tokens
        try:
            yield rank
        finally:
            self._tokens[rank] -= num_tokens

    def forget_groups(self) -> None:
        """Let groups go to other ranks, since no rank has their prefixes any more."""
        self._ranks.clear()
        self._num_groups.clear()

    def _choose(self, group: str) -> int:
        if group in self._ranks:
            return self._ranks[group]
        ranks = range(len(self._tokens))
        rank = min(ranks, key=lambda rank: (self._tokens[rank], self._num_groups[rank]))
        if group:
            self._ranks[group] = rank
            self._num_groups[rank] += 1
            if len(self._ranks) > _MAX_GROUPS:
                self._num_groups[self._ranks.pop(next(iter(self._ranks)))] -= 1
        return rank


@functools.cache
def patch_clients() -> None:
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
