"""Whoever waits for a rank that is gone learns of it at once, at every stage of a connection."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import routes

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import PeerError
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.parallel.rendezvous import RendezvousServer, end_waits
from mcore_rl.parallel.store import RendezvousStore
from mcore_rl.reshard.executor import GroupTransport, ReshardError
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync import process_group
from mcore_rl.weight_sync.process_group import watch_peers
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import StreamError, connect

LONG_S = 60.0  # what ranks would wait for
SOON_S = 10.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return routes.save_model(tmp_path_factory.mktemp("lost") / "model")


def test_a_rank_that_never_comes_is_not_waited_for_when_its_death_is_known():
    with RendezvousServer("127.0.0.1") as server, ThreadPoolExecutor(2) as threads:

        def meet(rank: int) -> None:
            store = RendezvousStore(server.endpoint, rank, 3, LONG_S)
            store.barrier("here")

        begun = time.monotonic()
        early = threads.submit(meet, 0)
        RendezvousStore(server.endpoint, 0, 3, LONG_S).get("here-arrived")
        end_waits(server.endpoint, "a server has died", LONG_S)
        late = threads.submit(meet, 1)  # who comes afterwards waits for nobody either
        for met in (early, late):
            with pytest.raises(RuntimeError, match="a server has died"):
                met.result(LONG_S)
        assert time.monotonic() - begun < SOON_S


def test_a_rank_that_dies_before_it_has_connected_to_all_ends_the_others_soon(
    checkpoint, monkeypatch
):
    """Let a rank die after the rendezvous, where no socket of its peers closes."""
    create = process_group._create_group

    def create_or_die(store, rank, *arguments):
        if rank == 2:
            raise RuntimeError("this rank is gone")
        return create(store, rank, *arguments)

    monkeypatch.setattr(process_group, "_create_group", create_or_die)
    monkeypatch.setattr(process_group, "_MESH_S", 1.0)
    begun = time.monotonic()
    with RendezvousServer("127.0.0.1") as server, ThreadPoolExecutor(3) as threads:
        spec = TransferSpec(
            Layout(), 0, GenerationLayout(dp=2), "float32",
            WeightSyncConfig(method="disaggregated", timeout_s=LONG_S),
        )  # fmt: skip
        config = CheckpointReader(checkpoint).read_config()
        ends = [
            threads.submit(connect, spec, server.endpoint, config, rank, routes.CPU)
            for rank in range(3)
        ]
        for end in ends:
            assert isinstance(end.exception(LONG_S), PeerError)
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("stage", ["agreeing", "sending"])
def test_a_wait_for_a_rank_that_makes_no_move_ends_with_end_waits(checkpoint, monkeypatch, stage):
    """Wait as gloo does when it has missed that a connection was closed."""
    route = routes.Route(checkpoint, "process_group", timeout_s=LONG_S)
    is_over, start = threading.Event(), GroupTransport.start

    def silent(transport, transfers):
        if transport.rank == 3:
            is_over.wait(LONG_S)
            raise ReshardError("it is gone")
        return start(transport, transfers)

    monkeypatch.setattr(GroupTransport, "start", silent)
    parts = [lambda rank=rank: route.send(1, rank) for rank in range(2)]
    parts += [lambda rank=rank: route.receive(1, rank) for rank in range(1 + (stage == "sending"))]
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(part) for part in parts]
        time.sleep(0.5)
        assert not any(part.done() for part in futures)
        begun = time.monotonic()
        end_waits(route.rendezvous.endpoint, "a server has died", LONG_S)
        wait(futures[:3], SOON_S)
        took = time.monotonic() - begun
        is_over.set()
        for part in futures[:3]:
            with pytest.raises(PeerError, match="a peer has died"):
                part.result(LONG_S)
    assert took < SOON_S


def steps(num: int, created: list[int], error: Exception | None = None) -> Iterator[int]:
    for number in range(num):
        created.append(number)
        yield number
    if error is not None:
        raise error


def test_steps_are_in_order_each_created_on_request_and_the_thread_ends():
    created: list[int] = []
    before = {*threading.enumerate()}
    for number, results in enumerate(watch_peers(steps(3, created), lambda: True)):
        assert results == number and created == [*range(number + 1)]
    assert {*threading.enumerate()} <= before


def test_an_error_of_a_step_is_raised_by_the_iterator():
    error = StreamError("version 3 broke off")
    before, watched = {*threading.enumerate()}, watch_peers(steps(1, [], error), lambda: False)
    assert next(watched) == 0
    with pytest.raises(StreamError, match="version 3 broke off") as raised:
        next(watched)
    assert raised.value is error
    assert {*threading.enumerate()} <= before


def test_a_consumer_that_stops_ends_the_thread():
    before, watched = {*threading.enumerate()}, watch_peers(steps(3, []), lambda: False)
    assert next(watched) == 0
    watched.close()
    assert {*threading.enumerate()} <= before


def test_a_step_that_does_not_come_ends_when_a_peer_is_known_to_be_gone():
    goes_on, is_lost = threading.Event(), threading.Event()

    def stuck() -> Iterator[int]:
        yield 0
        goes_on.wait(60)

    watched = watch_peers(stuck(), is_lost.is_set)
    assert next(watched) == 0
    begun = time.monotonic()
    threading.Timer(0.7, is_lost.set).start()
    with pytest.raises(StreamError, match="a peer has died"):
        next(watched)
    assert 0.7 <= time.monotonic() - begun < 10
    goes_on.set()
