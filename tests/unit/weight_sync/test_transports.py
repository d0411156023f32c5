"""Every transport between devices brings each generation rank what is its own.

Real servers take versions by each of them in e2e/test_parallel_server.py.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import routes

from mcore_rl.config.allowed import TRANSPORTS
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import TransferSpec, plan_transfer
from mcore_rl.weight_sync.transport import StreamError, WeightUpdate
from tests.nightly import all_but

LAYOUTS = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2, first_stage_layers=1),
    "pp2vpp2": Layout(pp=2, vpp=2),
    "dp2ep2": Layout(dp=2, ep=2),
    "tp2ep2": Layout(tp=2, ep=2),
    "tp2etp2": Layout(tp=2, etp=2),
    "tp2pp2vpp2ep2": Layout(tp=2, pp=2, vpp=2, ep=2),
    "pp2dp2ep2": Layout(pp=2, dp=2, ep=2),
    "tp2pp2etp2": Layout(tp=2, pp=2, etp=2),
}
SERVERS = {
    "tp1": GenerationLayout(),
    "tp2": GenerationLayout(tp=2),
    "ep2": GenerationLayout(tp=2, ep=2),
}
BUCKET_BYTES = 64 << 10  # some dozen buckets
CASES = all_but(
    [
        ("process_group", "pp2", "tp1"), ("process_group", "tp2ep2", "ep2"),
        ("process_group", "tp2pp2vpp2ep2", "tp2"), ("process_group", "tp2etp2", "ep2"),
        ("nixl", "pp2vpp2", "tp1"), ("nixl", "tp2ep2", "tp2"), ("nixl", "tp2etp2", "ep2"),
    ],
    [(t, layout, server) for t in TRANSPORTS for layout in LAYOUTS for server in SERVERS],
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return routes.save_model(tmp_path_factory.mktemp("routes") / "model")


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return routes.save_model(tmp_path_factory.mktemp("routes") / "latent", "deepseek_v3")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_versions_arrive_whole_while_ranks_go_on_at_their_own_pace(checkpoint, transport):
    route = routes.Route(checkpoint, transport)
    check_received(route, route.sync((1, 2, 3)))


@pytest.mark.parametrize(("transport", "layout", "server"), CASES)
def test_servers_of_every_layout_get_what_is_theirs_from_trainers_of_every_layout(
    checkpoint, transport, layout, server
):
    sides = LAYOUTS[layout], SERVERS[server]
    route = routes.Route(checkpoint, transport, 60.0, *sides, bucket_bytes=BUCKET_BYTES)
    check_received(route, route.sync((1,)))


@pytest.mark.nightly
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", ["tp2pp2vpp2ep2", "pp2dp2ep2", "tp2pp2etp2"])
def test_latent_attention_and_a_dense_first_layer_arrive_too(latent, transport, layout):
    sides = LAYOUTS[layout], SERVERS["ep2"]
    route = routes.Route(latent, transport, 60.0, *sides, bucket_bytes=BUCKET_BYTES)
    check_received(route, route.sync((1,)))


def check_received(route: routes.Route, received: list[list[dict[str, torch.Tensor]]]) -> None:
    """Compare with the checkpoint, bit for bit."""
    assert len(received) == route.generation.world_size
    for rank, versions in enumerate(received):
        expected = route.read_expected(rank)
        for parameters in versions:
            assert parameters.keys() == expected.keys()
            for name, tensor in expected.items():
                same = {"rtol": 0, "atol": 0, "equal_nan": True}
                torch.testing.assert_close(parameters[name], tensor, **same, msg=name)


@pytest.mark.parametrize("transport", ["process_group", "nixl"])
def test_all_that_listens_for_a_route_is_on_the_address_that_was_chosen(checkpoint, transport):
    before = listening()
    route = routes.Route(checkpoint, transport)
    addresses = listening() - before
    assert route.rendezvous.endpoint.port in {port for _, port in addresses}
    assert len(addresses) > len(route.ends)
    assert {address for address, _ in addresses} == {"127.0.0.1"}


def test_the_group_of_the_weights_uses_the_interface_of_its_rendezvous(checkpoint, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # put back in the end
        monkeypatch.delenv(name)
    routes.Route(checkpoint, "process_group")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_have_nothing_to_move_take_no_core(checkpoint, transport):
    route = routes.Route(checkpoint, transport)
    check_received(route, route.sync((1,)))
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.5
    assert len(route.ends) > 1


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def test_a_format_that_is_not_known_is_refused_by_name():
    with pytest.raises(StreamError, match="version 3 comes in the format 'delta'; known: 'dense'"):
        WeightUpdate(3, "delta")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_format_that_receivers_do_not_know_ends_every_rank_by_name_and_brings_nothing(
    checkpoint, transport
):
    route, arrived = routes.Route(checkpoint, transport, timeout_s=60.0), []

    def receive(rank: int) -> None:
        for slices in route.ends[2 + rank].receive(WeightUpdate(3)):
            arrived.extend(slices)

    begun = time.monotonic()
    calls = [partial(route.send, 3, rank, routes.build_newer_update(3)) for rank in range(2)]
    calls += [partial(receive, rank) for rank in range(2)]
    for end in routes.run_to_end(calls):
        with pytest.raises(StreamError, match="version 3 comes in the format 'delta'; known: 'den"):
            end.result()
    assert not arrived
    assert time.monotonic() - begun < 60.0  # nobody has waited for a rank that had refused


def test_in_a_process_group_a_rank_that_is_at_another_version_is_named(checkpoint):
    route = routes.Route(checkpoint, "process_group", timeout_s=60.0)
    calls = [partial(route.send, 5, rank) for rank in range(2)]
    calls += [partial(route.receive, 4, rank) for rank in range(2)]
    *_, receiver = routes.run_to_end(calls)
    with pytest.raises(StreamError, match=r"version 4 \(dense\), but rank 0 .* version 5 "):
        receiver.result()


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch):
    from mcore_rl.weight_sync.nixl import import_nixl

    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    with pytest.raises(ConfigError, match=r"transport='nixl'.*pip install 'mcore-rl\[nixl\]'"):
        import_nixl()


@pytest.mark.nightly  # the test of a process group above has the contract
def test_over_nixl_a_rank_that_is_at_another_version_is_named(checkpoint):
    route = routes.Route(checkpoint, "nixl", timeout_s=8.0)  # also for them to meet
    calls = [lambda rank=rank: route.send(5, rank) for rank in range(2)]
    calls += [lambda rank=rank: route.receive(4, rank) for rank in range(2)]
    with pytest.raises(StreamError, match=r"made no move for 8 s"):
        routes.run_together(calls)
    with pytest.raises(StreamError, match=r"version 4, bucket 0: rank [01] .* is at version 5"):
        route.receive(4, 0)


@pytest.mark.parametrize(
    ("layout", "server"),
    [
        (Layout(tp=2), GenerationLayout(tp=2)),
        (Layout(pp=2), GenerationLayout(pp=2)),
        (Layout(dp=2, ep=2), GenerationLayout(tp=2, ep=2)),
        (Layout(dp=4), GenerationLayout(dp=2)),
    ],
    ids=["tp2", "pp2", "ep2", "dp4"],
)
def test_over_nixl_ranks_connect_to_those_that_they_exchange_messages_with(
    checkpoint, monkeypatch, layout, server
):
    from mcore_rl.weight_sync.nixl import import_nixl

    agent = import_nixl().nixl_agent
    connect, connected = agent.add_remote_agent, []

    def add_remote_agent(self, metadata):
        peer = connect(self, metadata)
        connected.append((int(self.name), int(peer)))
        return peer

    monkeypatch.setattr(agent, "add_remote_agent", add_remote_agent)
    route = routes.Route(checkpoint, "nixl", training=layout, generation=server)
    spec = TransferSpec(layout, 0, server, "float32", route.settings)
    sent = plan_transfer(spec, route.reader.read_config(), 4).list_transfers()
    pairs = {(source, spec.num_training + target) for source, target, _ in sent}
    assert sorted(connected) == sorted(pairs | {(target, source) for source, target in pairs})
    check_received(route, route.sync((1, 2)))


def test_over_nixl_a_refusal_reaches_ranks_through_those_that_they_exchange_with(checkpoint):
    """Let one of the senders send a newer format."""
    two = {"training": Layout(tp=2), "generation": GenerationLayout(dp=2)}
    route = routes.Route(checkpoint, "nixl", timeout_s=60.0, **two)
    begun = time.monotonic()
    calls = [partial(route.send, 3, 0), partial(route.send, 3, 1, routes.build_newer_update(3))]
    calls += [partial(route.receive, 3, rank) for rank in range(2)]
    for end in routes.run_to_end(calls):
        with pytest.raises(StreamError, match="format 'delta'; known: 'dense'"):
            end.result()
    assert time.monotonic() - begun < 60.0
