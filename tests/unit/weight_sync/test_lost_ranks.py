"""Whoever waits for a rank that is gone learns of it at once, at every stage of a connection."""

from __future__ import annotations

import sys
import threading
import time
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
            store.barrier("here")

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
        config = CheckpointReader(checkpoint).read_config()
        ends = [
            threads.submit(connect, spec, server.endpoint, config, rank, routes.CPU)
            for rank in range(3)
        ]
        for end in ends:
            assert isinstance(end.exception(LONG_S), PeerError)
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("stage", ["agreeing", "sending"])
def test_who_waits_in_a_transfer_for_a_rank_that_makes_no_move_ends_when_it_is_told(
    checkpoint, monkeypatch, stage
):
    """As gloo leaves a wait, when it has missed the end of a connection."""
    route = routes.Route(checkpoint, "process_group", timeout_s=LONG_S)
    told, start = threading.Event(), GroupTransport.start

    def silent(transport, transfers):
        if transport.rank == 3:
            told.wait(LONG_S)
            raise ReshardError("it is gone")
        return start(transport, transfers)

    monkeypatch.setattr(GroupTransport, "start", silent)
    parts = [lambda rank=rank: route.send(1, rank) for rank in range(2)]
    parts += [lambda rank=rank: route.receive(1, rank) for rank in range(1 + (stage == "sending"))]
    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(part) for part in parts]
        time.sleep(0.5)
        assert not any(part.done() for part in found)
        begun = time.monotonic()
        end_waits(route.rendezvous.endpoint, "a server has died", LONG_S)
        wait(found[:3], SOON_S)
        took = time.monotonic() - begun
        told.set()
        for part in found[:3]:
            with pytest.raises(PeerError, match="a peer has died"):
                part.result(LONG_S)
    assert took < SOON_S
