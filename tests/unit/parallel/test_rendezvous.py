"""The store behaves as torch's own, and strangers can change nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
import pytest
import torch.distributed

from mcore_rl.config.errors import ConfigError
from mcore_rl.inference.vllm.processes import ServerNodes
from mcore_rl.parallel import network, store
from mcore_rl.parallel.network import Challenge, find_address, find_interface, use_interface_towards
from mcore_rl.parallel.rendezvous import (
    RendezvousClient,
    RendezvousEndpoint,
    RendezvousServer,
    encode_frame,
    end_waits,
)
from mcore_rl.parallel.store import RendezvousStore
from tests import attacks
from tests.operations import count_operations

c10d: Any = torch.distributed


@pytest.fixture(params=["127.0.0.1", attacks.list_other_addresses()[-1]])
def server(request: pytest.FixtureRequest) -> Iterator[RendezvousServer]:
    with RendezvousServer(request.param) as server:
        yield server


@pytest.fixture
def rank_0(server: RendezvousServer) -> Iterator[RendezvousStore]:
    connected = RendezvousStore(server.endpoint, 0, 2, timeout_s=20.0)
    connected.set("address", "of rank 0")
    yield connected
    connected.close()


def address(server: RendezvousServer) -> attacks.Address:
    return server.endpoint.host, server.endpoint.port


def use(keys: Any) -> list[Any]:
    """Run every operation and return the results; the wait for a missing key is short."""
    keys.set("a", "1")
    results: list[Any] = [keys.get("a"), keys.add("n", 5), keys.add("n", -7), keys.get("n")]
    results += [keys.compare_set("c", "", "first"), keys.compare_set("c", "other", "second")]
    results += [keys.compare_set("c", "first", "second"), keys.compare_set("none", "x", "y")]
    results += [keys.check(["a", "c"]), keys.check(["a", "none"]), keys.delete_key("a")]
    results += [keys.delete_key("a"), keys.check(["a"])]
    keys.multi_set(["p", "q"], ["1", "2"])
    keys.append("p", "0")
    keys.append("new", "0")
    keys.wait(["p", "q"], timedelta(seconds=5))
    results += [keys.multi_get(["p", "q", "new"]), keys.has_extended_api()]
    with pytest.raises(c10d.DistStoreError):
        keys.wait(["p", "nobody's"], timedelta(seconds=0.05))
    return results


def test_it_behaves_as_torchs_store(rank_0):
    torch_store = c10d.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert use(rank_0) == use(torch_store)
    # As process groups use it: by C++, behind a prefix.
    assert use(c10d.PrefixStore("p", rank_0)) == use(c10d.PrefixStore("p", torch_store))
    assert c10d.PrefixStore("p", rank_0).num_keys() == rank_0.num_keys() == 11


def test_a_store_stays_while_c_plus_plus_has_it(server):
    prefixed = c10d.PrefixStore("p", RendezvousStore(server.endpoint, 0, 1, 5.0))
    prefixed.set("key", "value")
    clone = prefixed.clone()
    assert clone.get("key") == prefixed.get("key") == b"value"


def test_a_wait_ends_when_the_last_key_comes(server, rank_0):
    rank_1 = RendezvousStore(server.endpoint, 1, 2, 20.0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(rank_1.multi_get, ["x", "y"])
        rank_0.set("y", "2")
        time.sleep(0.05)
        assert not waiting.done()
        rank_0.set("x", "1")
        assert waiting.result(20) == [b"1", b"2"]


def test_a_wait_that_ends_names_its_key_and_the_ranks_that_are_missing(server):
    rank_0 = RendezvousStore(server.endpoint, 0, 3, 0.1)
    with pytest.raises(c10d.DistStoreError) as error:
        c10d.PrefixStore("p", rank_0).get("key")
    where = f"{server.endpoint.host}:{server.endpoint.port}"
    assert str(error.value) == (
        f"rank 0 of 3 waited 0.1 s at {where} for p/key; rank 1, rank 2 never came"
    )
    rank_1 = RendezvousStore(server.endpoint, 1, 3, 0.1)
    RendezvousStore(server.endpoint, 2, 3, 0.1)
    rank_0.set("there", "1")
    rank_1.close()
    with pytest.raises(c10d.DistStoreError, match=r"for key; rank 1 went away$"):
        rank_0.wait(["there", "key"], timedelta(seconds=0.1))


def test_the_clock_offset_of_this_machine_is_zero_within_the_error(server):
    client = RendezvousClient(server.endpoint, 0, 1, 20.0)
    for _ in range(10):
        offset_s, error_s = client.measure_clock_offset()
        assert 0 < error_s < 1 and abs(offset_s) < error_s + 1e-3
    client.close()


def test_many_ranks_count_right(server):
    def count(rank: int) -> None:
        client = RendezvousStore(server.endpoint, rank, 16, 20.0)
        for _ in range(50):
            client.add("total", rank)
        client.close()

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(count, range(16)))
    assert RendezvousStore(server.endpoint, 0, 16, 20.0).get("total") == b"6000"


def test_a_rank_whose_connection_is_lost_connects_again(monkeypatch):
    """Forget the first connection, as the kernel does with SYN cookies and a full backlog."""
    monkeypatch.setattr("mcore_rl.parallel.rendezvous._HANDSHAKE_TRY_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        endpoint = RendezvousEndpoint(*listener.getsockname(), "token")
        connecting = threads.submit(RendezvousClient, endpoint, 0, 1, 20.0)
        with listener.accept()[0], listener.accept()[0] as second:
            deadline = time.monotonic() + 20
            network.challenge_client(second, "token", deadline)
            request = encode_frame(b"join", b"0")
            assert network.read_exactly(second, len(request), deadline) == request
            second.sendall(encode_frame(b"ok"))
            connecting.result(20).close()


def test_a_silent_server_is_reported_at_the_time_limit():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        endpoint = RendezvousEndpoint(host, port, "token")
        with pytest.raises(c10d.DistNetworkError, match=r"rank 1 of 2: .* timed out"):
            RendezvousStore(endpoint, 1, 2, 0.5)


def test_a_value_may_be_large_and_has_a_limit(rank_0):
    large = bytes(range(256)) * (1 << 14)
    rank_0.set("large", large)
    assert rank_0.get("large") == large
    with pytest.raises(ValueError, match="allowed at a rendezvous: 16777216"):
        rank_0.set("larger", bytes(16 << 20))
    assert rank_0.get("large") == large


def test_a_closed_server_is_reported(server, rank_0, caplog):
    server.close()
    assert not caplog.records  # asyncio's, of connections that have ended
    with pytest.raises(c10d.DistNetworkError, match=r"rank 0 of 2: the rendezvous at .* closed"):
        rank_0.get("address")
    with pytest.raises(c10d.DistNetworkError, match="refused"):
        RendezvousStore(server.endpoint, 1, 2, 5.0)


def test_an_address_that_is_not_of_this_machine_is_refused():
    with pytest.raises(ConfigError, match=r"cannot listen on '192\.0\.2\.77'"):
        RendezvousServer("192.0.2.77")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.77 is not an address of this machine"):
        find_interface("192.0.2.77")


def test_an_interface_and_its_address_lead_to_each_other():
    assert find_address("lo") == "127.0.0.1"
    outward = find_address("")
    assert find_address(find_interface(outward)) == outward
    with pytest.raises(ConfigError, match=r"^interface 'typo' has no IPv4 address; allowed: .*lo"):
        find_address("typo")


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def serve_over_several_nodes(server: RendezvousServer) -> None:
    ServerNodes(1, 0, 1, 5.0).build_engine_arguments()


def serve_on_one_node(server: RendezvousServer) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # of the workers' own groups, by build_device_arguments
    use_interface_towards(*address(server))


def train(server: RendezvousServer) -> None:
    with pytest.raises(RuntimeError):  # as the other rank does not come
        store.join_world("gloo", 0.1)


@pytest.mark.parametrize("use", [serve_over_several_nodes, serve_on_one_node, train])
def test_nccl_uses_the_interface_of_the_rendezvous_unless_the_user_names_one(
    server, monkeypatch, use
):
    interface = find_interface(server.endpoint.host)
    for named in ({}, {"NCCL_SOCKET_IFNAME": "ib0"}):
        with monkeypatch.context() as patch:
            world = {"RANK": "0", "WORLD_SIZE": "2", **server.endpoint.to_environment()}
            environment = {n: value for n, value in os.environ.items() if n not in INTERFACES}
            patch.setattr("os.environ", environment | world | named)
            use(server)
            expected = named.get("NCCL_SOCKET_IFNAME", f"={interface}")
            assert os.environ["NCCL_SOCKET_IFNAME"] == expected


def test_without_a_default_route_an_interface_has_to_be_named():
    alone = "from mcore_rl.parallel.network import find_address as f; print(f('')) "
    command = ["unshare", "-Urn", sys.executable, "-c", alone]
    if subprocess.run([*command[:2], "true"], capture_output=True).returncode:
        pytest.skip("a network of one's own is not allowed here")
    done = subprocess.run(command, capture_output=True, text=True)
    assert "no interface is named, and this machine has no default route" in done.stderr


def test_a_process_that_is_no_rank_fails_with_the_missing_variables(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE not set in the environment: ranks are"):
        store.join_world("gloo", 1.0)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RENDEZVOUS_PORT", "1")
    with pytest.raises(ConfigError, match=r"^RENDEZVOUS_HOST, RENDEZVOUS_TOKEN not set"):
        store.join_world("gloo", 1.0)


def test_the_token_is_neither_sent_nor_printed(server):
    token = server.endpoint.token
    assert token not in f"{server.endpoint!r} {server.endpoint}"
    listening, connecting = socket.socketpair()
    with listening, connecting, ThreadPoolExecutor(1) as threads:
        deadline = time.monotonic() + 20
        proving = threads.submit(network.prove_token, connecting, token, deadline)
        challenge = Challenge(token)
        listening.sendall(challenge.nonce)
        answer = network.read_exactly(listening, network.ANSWER_BYTES, deadline)
        is_right, reply = challenge.verify(answer)
        listening.sendall(reply)
        proving.result()
        assert is_right
        sent = challenge.nonce + answer + reply
        assert token.encode() not in sent
        assert bytes.fromhex(token) not in sent
        # A recorded answer is refused by another listener.
        assert Challenge(token).verify(answer) == (False, bytes(32))


def test_a_listener_without_the_token_is_not_believed():
    listening, connecting = socket.socketpair()
    with listening, connecting, ThreadPoolExecutor(1) as threads:
        deadline = time.monotonic() + 20
        proving = threads.submit(network.prove_token, connecting, "token", deadline)
        with pytest.raises(PermissionError):
            network.challenge_client(listening, "another", deadline)
        with pytest.raises(PermissionError):
            proving.result()
        for reply in (lambda answer: b"\1" * 32, lambda answer: answer[32:]):  # what it was shown
            believing = threads.submit(network.prove_token, connecting, "token", deadline)
            listening.sendall(bytes(32))
            listening.sendall(
                reply(network.read_exactly(listening, network.ANSWER_BYTES, deadline))
            )
            with pytest.raises(PermissionError):
                believing.result()


def test_torchs_own_store_does_what_a_stranger_says():
    """Show why this project has another store."""
    torch_store = c10d.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    attacks.send((torch_store.host, torch_store.port), "torch_write", 1.0)
    assert torch_store.get("ours/0") == b"mine"
    assert "ours/0" in attacks.use_as_torch_store((torch_store.host, torch_store.port), list_keys)


def list_keys(keys: Any) -> list[str]:
    return keys.list_keys()


@pytest.mark.parametrize("what", attacks.SENDERS)
def test_strangers_get_nothing_and_change_nothing(server, rank_0, what):
    assert len(attacks.send(address(server), what)) <= attacks.MAX_ANSWER_BYTES
    assert rank_0.get("address") == b"of rank 0"
    assert rank_0.num_keys() == 1


def test_a_wrong_token_is_refused_at_once(server, rank_0):
    with pytest.raises(PermissionError, match="wrong token"):
        attacks.guess_token(address(server))
    wrong = RendezvousEndpoint(*address(server), token="guess")
    with pytest.raises(c10d.DistNetworkError, match=r"rank 1 of 2: .*: wrong token"):
        RendezvousStore(wrong, 1, 2, 20.0)
    assert rank_0.num_keys() == 1


@pytest.mark.parametrize("how", attacks.TORCH_STORE)
def test_a_stranger_with_torchs_client_neither_lists_nor_writes(server, rank_0, how):
    with pytest.raises(RuntimeError):
        attacks.use_as_torch_store(address(server), attacks.TORCH_STORE[how])
    assert rank_0.get("address") == b"of rank 0"
    assert rank_0.num_keys() == 1
    with pytest.raises(NotImplementedError):  # nor do ranks need to
        rank_0.list_keys()


def test_a_byte_now_and_then_does_not_outlast_the_handshake(server, rank_0, monkeypatch):
    monkeypatch.setattr(network, "HANDSHAKE_TIMEOUT_S", 0.5)
    # Its last byte would come after 25 seconds.
    assert 0.3 < attacks.drip(address(server), pause_s=0.4, patience_s=30.0) < 15
    assert rank_0.get("address") == b"of rank 0"


def test_silent_strangers_keep_nobody_out(server, rank_0):
    silent = [socket.create_connection(address(server)) for _ in range(4)]
    try:
        start = time.monotonic()
        RendezvousStore(server.endpoint, 1, 2, 20.0).set("late", "1")
        assert rank_0.get("late") == b"1"
        assert time.monotonic() - start < network.HANDSHAKE_TIMEOUT_S / 2
        # Nor do hundreds: the oldest has to go.
        silent += [socket.create_connection(address(server)) for _ in range(300)]
        RendezvousStore(server.endpoint, 1, 2, 20.0).set("later", "1")
        assert rank_0.get("later") == b"1"
        silent[0].settimeout(5)
        assert silent[0].recv(64)[32:] == silent[0].recv(64) == b""
    finally:
        for sock in silent:
            sock.close()


def test_it_listens_on_the_address_that_was_chosen_and_on_no_other(server):
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    addresses = [c.laddr.ip for c in listening if c.laddr.port == server.endpoint.port]
    assert addresses == [server.endpoint.host]


def test_garbage_from_a_rank_is_its_own_error(server, rank_0):
    with pytest.raises(c10d.DistStoreError, match=r"rank 0: b'add': ValueError"):
        rank_0.add("address", 1)
    with pytest.raises(c10d.DistStoreError, match=r"KeyError"):
        rank_0._call(b"list_keys")
    assert rank_0.num_keys() == 1


def test_a_server_leaves_no_thread():
    before = {*threading.enumerate()}
    server = RendezvousServer("127.0.0.1")
    server.close()
    server.close()
    assert {*threading.enumerate()} <= before


def connect(stores: list[RendezvousStore], _: int) -> None:
    """Do nothing: the ranks are connected already."""


def meet(stores: list[RendezvousStore], rank: int) -> None:
    stores[rank].barrier("here")


def gather(stores: list[RendezvousStore], rank: int) -> None:
    values = stores[rank].all_gather("site", f"of {rank}")
    assert values == [f"of {rank}".encode() for rank in range(len(stores))]


def come_late(stores: list[RendezvousStore], rank: int) -> None:
    with pytest.raises(c10d.DistStoreError, match="for nobody's; all ranks are connected"):
        stores[rank].wait(["nobody's"], timedelta(seconds=0.5))


def count_server_operations(
    use: Callable[[list[RendezvousStore], int], None], num_ranks: int
) -> int:
    with (
        count_operations("rendezvous") as operations,
        RendezvousServer("127.0.0.1") as server,
        ThreadPoolExecutor(num_ranks) as threads,
    ):
        ranks = range(num_ranks)
        stores = [RendezvousStore(server.endpoint, rank, num_ranks, 60.0) for rank in ranks]
        list(threads.map(partial(use, stores), ranks))
        for store_of_rank in stores:
            store_of_rank.close()
    return operations.num


@pytest.mark.job
@pytest.mark.parametrize(
    ("use", "most"), [(connect, 1.15), (meet, 1.15), (gather, 1.15), (come_late, 1.4)]
)
def test_the_work_of_the_server_is_linear_in_the_ranks(use, most):
    few, many = (count_server_operations(use, num_ranks) / num_ranks for num_ranks in (32, 256))
    assert many / few < most


@pytest.mark.job
def test_a_key_that_comes_is_looked_up_once_for_each_that_waits():
    """Wait for a key of every rank, as process groups do in C++."""

    def operations(num_ranks: int) -> int:
        def wait_for_all(stores: list[RendezvousStore], rank: int) -> None:
            keys = [f"key-{peer}" for peer in range(num_ranks)]
            if rank < num_ranks - 1:
                stores[rank].add("entered", 1)
                stores[rank].multi_get(keys)
                return
            while stores[rank].add("entered", 0) < num_ranks - 1:
                time.sleep(0.01)
            time.sleep(0.1)  # until those have been read
            for key in keys:
                stores[rank].set(key, b"")

        return count_server_operations(wait_for_all, num_ranks)

    assert operations(192) / operations(64) < 3**2 * 1.2


def test_keys_that_are_deleted_while_others_are_waited_for_are_waited_for_again(server, rank_0):
    rank_1 = RendezvousStore(server.endpoint, 1, 2, 20.0)
    rank_0.set("x", "old")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(rank_1.multi_get, ["x", "y"])
        time.sleep(0.1)
        rank_0.delete_key("x")
        rank_0.set("y", "2")
        time.sleep(0.05)
        assert not waiting.done()
        rank_0.set("x", "new")
        assert waiting.result(20) == [b"new", b"2"]


def test_a_barrier_names_the_ranks_that_are_connected_and_do_not_come(server):
    stores = [RendezvousStore(server.endpoint, rank, 3, 0.3) for rank in range(3)]
    with pytest.raises(c10d.DistStoreError, match="for here; all ranks are connected; missing: "):
        stores[0].barrier("here")
    with pytest.raises(c10d.DistStoreError, match=r"missing: here-1$"):
        stores[2].barrier("here")
    stores[1].barrier("here")


def test_a_barrier_ends_when_a_rank_is_known_to_be_dead(server, rank_0):
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(rank_0.barrier, "here")
        time.sleep(0.05)
        end_waits(server.endpoint, "rank 1 has died", 5.0)
        with pytest.raises(c10d.DistStoreError, match="rank 1 has died"):
            waiting.result(20)
