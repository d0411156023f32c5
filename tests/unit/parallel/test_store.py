"""Strangers at gloo's ports: they cost a rank nothing, and groups form at the same time."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mcore_rl.parallel import store as store_module
from mcore_rl.parallel.store import GlooDevice, GuardedGloo, guard_gloo
from tests.unit.agents.test_program import num_sockets

TIMEOUT = timedelta(seconds=20)


def list_listening_ports() -> set[int]:
    """Return the ports at which this process listens, at any address."""
    inodes = {
        fields[9]: int(fields[1].rpartition(":")[2], 16)
        for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]
        if (fields := line.split())[3] == "0A"
    }
    ports = set[int]()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            name = str(link.readlink()).removeprefix("socket:[").removesuffix("]")
            ports |= {inodes[name]} & {*inodes.values()} if name in inodes else set()
    return ports


@contextmanager
def create_group_of_two(
    kind: type, *devices: GlooDevice, store: dist.Store | None = None
) -> Iterator[list[dist.ProcessGroupGloo]]:
    """Create both ranks in this process, each with its device if `devices` are given."""
    store, groups = store or dist.HashStore(), [None, None]

    def join(rank: int) -> None:
        more = ([devices[rank]],) if devices else ()
        groups[rank] = kind(store, rank, 2, TIMEOUT, *more)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    yield groups


def all_reduce(group: list[dist.ProcessGroupGloo]) -> list[float]:
    tensors = [torch.ones(3) * (rank + 1) for rank in range(2)]
    pending = [rank.allreduce([tensor]) for rank, tensor in zip(group, tensors, strict=True)]
    for work in pending:
        work.wait()
    return [float(tensor[0]) for tensor in tensors]


@contextmanager
def connect_strangers(ports: set[int], says: bytes = b"x") -> Iterator[None]:
    """Connect thirty sockets to each port for a while."""
    sockets = []
    for port in ports:
        for _ in range(30):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
            sockets.append(sock)
    time.sleep(0.2)
    for sock in sockets:
        with suppress(OSError):
            sock.send(says)
    time.sleep(0.1)
    try:
        yield
    finally:
        for sock in sockets:
            sock.close()


@pytest.fixture(params=["a filter", "a signature"])
def guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close ports as with CAP_NET_ADMIN, or as without it on kernels that want it for filters."""

    def refuse(sock: socket.socket) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if request.param == "a signature":
        monkeypatch.setattr(store_module, "_attach_filter", refuse)


def create_devices() -> list[GlooDevice]:
    return [GlooDevice(hostname="127.0.0.1") for _ in range(2)]


@pytest.mark.parametrize("says", [b"", b"x", b"\0" * 64], ids=["nothing", "a byte", "much"])
@pytest.mark.usefixtures("guard")
def test_a_group_keeps_no_sockets_of_strangers(says):
    before = list_listening_ports()
    devices = create_devices()
    ports = list_listening_ports() - before
    assert len(ports) == 2
    with create_group_of_two(GuardedGloo, *devices) as group:
        num_before = sum(map(num_sockets, ports))
        with connect_strangers(ports, says):
            assert sum(map(num_sockets, ports)) == num_before
            assert all_reduce(group) == [3.0, 3.0]
        # The devices take part in further groups.
        with create_group_of_two(GuardedGloo, *devices) as another:
            assert all_reduce(another) == [3.0, 3.0]
            with connect_strangers(ports, says):
                assert all_reduce(group) == [3.0, 3.0]


@pytest.mark.usefixtures("guard")
def test_a_device_lets_nobody_in_before_its_first_group():
    before = list_listening_ports()
    devices = create_devices()
    ports = list_listening_ports() - before
    with connect_strangers(ports):
        assert not any(map(num_sockets, ports))
    with create_group_of_two(GuardedGloo, *devices) as group:
        assert all_reduce(group) == [3.0, 3.0]


@pytest.mark.usefixtures("guard")
def test_a_group_that_does_not_form_leaves_its_port_closed():
    before = list_listening_ports()
    device = GlooDevice(hostname="127.0.0.1")
    ports = list_listening_ports() - before
    with pytest.raises(RuntimeError):
        GuardedGloo(dist.HashStore(), 0, 2, timedelta(seconds=0.3), [device])
    with connect_strangers(ports):
        assert not any(map(num_sockets, ports))


def test_all_groups_that_torch_makes_are_guarded(monkeypatch):
    """Check that groups share one listener, however they are created."""
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", dist.ProcessGroupGloo)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = list_listening_ports()
    guard_gloo()
    guard_gloo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = [dist.new_group([0], backend="gloo") for _ in range(3)]
        ports = list_listening_ports() - before
        assert len(ports) <= 1  # none where an earlier test of the process has made the device
        with connect_strangers(ports):
            assert not any(map(num_sockets, ports))
        tensor = torch.ones(1)
        for group in groups:
            dist.all_reduce(tensor, group=group)
    finally:
        dist.destroy_process_group()


def test_threads_make_devices_at_the_same_time():
    """Create devices as ranks that are threads of one process do."""
    with ThreadPoolExecutor(8) as threads:
        devices = list(threads.map(lambda _: GlooDevice(hostname="127.0.0.1"), range(160)))
    assert len({device._fd for device in devices}) == len(devices)
