"""Every transport between devices brings each generation rank what is its own.

Real servers take versions by each of them in e2e/test_parallel_server.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import routes

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import TRANSPORTS
from mcore_rl.weight_sync.connection import StreamError
from mcore_rl.weight_sync.transport import WeightUpdate


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return routes.save_model(tmp_path_factory.mktemp("routes") / "model")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_versions_arrive_whole_while_ranks_go_on_at_their_own_pace(checkpoint, transport):
    route = routes.Route(checkpoint, transport)

    def send(rank: int) -> None:
        for version in (1, 2, 3):
            route.send(version, rank)

    def receive(rank: int) -> list[dict[str, torch.Tensor]]:
        return [route.receive(version, rank) for version in (1, 2, 3)]

    sends = [lambda rank=rank: send(rank) for rank in range(2)]
    receives = [lambda rank=rank: receive(rank) for rank in range(2)]
    _, _, *received = routes.together([*sends, *receives])
    for rank, versions in enumerate(received):
        wanted = route.wanted(rank)
        for found in versions:
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                same = {"rtol": 0, "atol": 0, "equal_nan": True}
                torch.testing.assert_close(found[name], tensor, **same, msg=name)


@pytest.mark.parametrize("transport", ["process_group", "nixl"])
def test_all_that_listens_for_a_route_is_on_the_address_that_was_chosen(checkpoint, transport):
    before = listening()
    route = routes.Route(checkpoint, transport)
    found = listening() - before
    assert route.rendezvous.endpoint.port in {port for _, port in found}
    assert len(found) > len(route.ends)
    assert {address for address, _ in found} == {"127.0.0.1"}


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def test_a_format_that_is_not_known_is_refused_by_name():
    with pytest.raises(StreamError, match="version 3 comes in the format 'delta'; known: 'dense'"):
        WeightUpdate(3, "delta")


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch):
    from mcore_rl.weight_sync.nixl import nixl_api

    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    with pytest.raises(ConfigError, match=r"transport='nixl'.*pip install 'mcore-rl\[nixl\]'"):
        nixl_api()


def test_over_nixl_a_rank_that_is_at_another_version_is_named(checkpoint):
    route = routes.Route(checkpoint, "nixl", timeout_s=8.0)  # also for them to meet
    calls = [lambda rank=rank: route.send(5, rank) for rank in range(2)]
    calls += [lambda rank=rank: route.receive(4, rank) for rank in range(2)]
    with pytest.raises(StreamError, match=r"made no move for 8 s"):
        routes.together(calls)
    with pytest.raises(StreamError, match=r"version 4, bucket 0: rank [01] .* is at version 5"):
        route.receive(4, 0)
