"""Requests of a group go to one data-parallel rank, groups to the least loaded."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from vllm.distributed.utils import create_tcp_store
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from mcore_rl.inference.vllm.data_parallel import RankRouter
from mcore_rl.inference.vllm.patches import processes


def test_a_group_stays_on_its_rank_and_the_next_goes_to_the_least_loaded():
    router = RankRouter(3)
    with ExitStack() as running:
        ranks = [running.enter_context(router.route(group, 10)) for group in "aabbc"]
        assert ranks == [0, 0, 1, 1, 2]
        assert running.enter_context(router.route("d", 10)) == 2
        assert running.enter_context(router.route("", 1)) == 0  # all have 20 tokens, 2 two groups
    with router.route("b", 1) as rank:  # a later turn
        assert rank == 1
    router.forget_groups()
    with router.route("b", 1) as rank:
        assert rank == 0


def test_requests_that_have_failed_load_no_rank():
    router = RankRouter(2)
    for _ in range(2):
        try:
            with router.route("", 100) as rank:
                raise ValueError
        except ValueError:
            assert rank == 0


def test_a_server_of_one_rank_routes_nothing():
    with RankRouter(1).route("a", 10) as rank:
        assert rank is None


def test_a_call_on_workers_returns_the_answers_of_every_rank(monkeypatch):
    monkeypatch.setattr(DPLBAsyncMPClient, "collective_rpc_async", None)
    processes.return_all_answers.__wrapped__()

    async def call_all(*args: Any) -> list[list[str]]:
        assert args == ("collective_rpc", "attempt", None, ("update",), None)
        return [["0", "1"], ["2", "failed"]]

    client = SimpleNamespace(call_utility_all_async=call_all)
    call = DPLBAsyncMPClient.collective_rpc_async(client, "attempt", args=("update",))
    assert asyncio.run(call) == ["0", "1", "2", "failed"]


def test_stores_listen_on_the_address_of_the_ranks(monkeypatch):
    from vllm.distributed import parallel_state, utils

    monkeypatch.setattr(utils, "create_tcp_store", create_tcp_store)
    monkeypatch.setattr(parallel_state, "create_tcp_store", create_tcp_store)
    processes.bind_stores.__wrapped__()
    store = utils.create_tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.2", store.port)):  # refused if it listened on all
        pass
