"""Whoever waits for a rank that is gone learns of it at once, at every stage of a connection."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import routes

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import PeerError
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.parallel.rendezvous import RendezvousServer
from mcore_rl.parallel.rendezvous_client import end_waits
from mcore_rl.parallel.store import RendezvousStore
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.reshard.transport import GroupTransport, ReshardError
from mcore_rl.weight_sync import process_group
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import connect

LONG_S = 60.0  # what ranks would wait for
SOON_S = 10.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return routes.save_model(tmp_path_factory.mktemp("lost") / "model")


def test_a_rank_that_never_comes_is_not_waited_for_when_its_death_is_known():
    with RendezvousServer("127.0.0.1") as server, ThreadPoolExecutor(2) as threads:

        def meet(rank: int) -> None:
            store = RendezvousStore(server.endpoint, rank, 3, LONG_S)
            process_group._meet(store, rank, 3)

        begun = time.monotonic()
        early = threads.submit(meet, 0)
        while not server._waiting:
            time.sleep(0.01)
        end_waits(server.endpoint, "a server has died", LONG_S)
        late = threads.submit(meet, 1)  # who comes afterwards waits for nobody either
        for met in (early, late):
            with pytest.raises(RuntimeError, match="a server has died"):
                met.result(LONG_S)
        assert time.monotonic() - begun < SOON_S


def test_a_rank_that_dies_before_it_has_connected_to_all_ends_the_others_soon(
    checkpoint, monkeypatch
):
    """It was there, so the rendezvous has nothing to wait for; no socket tells that it is gone."""
    made = process_group._joined

    def joined(store, rank, *others):
        if rank == 2:
            raise RuntimeError("this rank is gone")
        return made(store, rank, *others)

    monkeypatch.setattr(process_group, "_joined", joined)
    monkeypatch.setattr(process_group, "_MESH_S", 1.0)
    begun = time.monotonic()
    with RendezvousServer("127.0.0.1") as server, ThreadPoolExecutor(3) as threads:
        spec = TransferSpec(
            Layout(), 0, GenerationLayout(dp=2), "float32",
            WeightSyncConfig(method="disaggregated", timeout_s=LONG_S),
        )  # fmt: skip
        config = CheckpointReader(checkpoint).config()
        ends = [
            threads.submit(connect, spec, server.endpoint, config, rank, routes.CPU)
            for rank in range(3)
        ]
        for end in ends:
            assert isinstance(end.exception(LONG_S), PeerError)
    assert time.monotonic() - begun < SOON_S


def test_the_connections_of_a_rank_that_failed_end_though_its_error_is_kept(
    checkpoint, monkeypatch
):
    """A rank that fails in a transfer closes its end; those that wait for it fail, one by one."""
    route = routes.Route(checkpoint, "process_group", timeout_s=LONG_S)
    start, kept = GroupTransport.start, threading.Event()

    def broken(transport, transfers):
        if transport.rank == 3 and kept.is_set():
            raise ReshardError("this rank has lost a peer")
        if transport.rank == 3:
            kept.set()  # it fails in its second round, with messages under way
        return start(transport, transfers)

    monkeypatch.setattr(GroupTransport, "start", broken)

    def part(rank: int) -> None:
        try:
            route.send(1, rank) if rank < 2 else route.receive(1, rank - 2)
        except PeerError:
            route.ends[rank].close()
            raise

    begun = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        parts: list[Future[None]] = [threads.submit(part, rank) for rank in range(4)]
        wait(parts, SOON_S)  # the futures keep the errors
        took = time.monotonic() - begun
        assert all(isinstance(part.exception(LONG_S), PeerError) for part in parts)
    assert took < SOON_S
