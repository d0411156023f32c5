"""Strangers at the ports of gloo: what they cost a rank, and whether groups form beside them."""

from __future__ import annotations

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

from mcore_rl.parallel.gloo import GlooDevice, GuardedGloo, guard_gloo
from tests.unit.agents.test_program import num_sockets

TIMEOUT = timedelta(seconds=20)


def listening() -> set[int]:
    """Ports at which this process listens, at any address."""
    inodes = {
        fields[9]: int(fields[1].rpartition(":")[2], 16)
        for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]
        if (fields := line.split())[3] == "0A"
    }
    found = set[int]()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            name = str(link.readlink()).removeprefix("socket:[").removesuffix("]")
            found |= {inodes[name]} & {*inodes.values()} if name in inodes else set()
    return found


@contextmanager
def group_of_two(
    kind: type, *devices: GlooDevice, store: dist.Store | None = None
) -> Iterator[list[dist.ProcessGroupGloo]]:
    """Both ranks in this process, with a device each if there are any."""
    store, found = store or dist.HashStore(), [None, None]

    def join(rank: int) -> None:
        more = ([devices[rank]],) if devices else ()
        found[rank] = kind(store, rank, 2, TIMEOUT, *more)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    yield found


def total(group: list[dist.ProcessGroupGloo]) -> list[float]:
    tensors = [torch.ones(3) * (rank + 1) for rank in range(2)]
    work = [one.allreduce([tensor]) for one, tensor in zip(group, tensors, strict=True)]
    for one in work:
        one.wait()
    return [float(tensor[0]) for tensor in tensors]


@contextmanager
def strangers(ports: set[int], says: bytes = b"x") -> Iterator[None]:
    """Thirty at each port, that try to connect for a while."""
    found = []
    for port in ports:
        for _ in range(30):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
            found.append(sock)
    time.sleep(0.2)
    for sock in found:
        with suppress(OSError):
            sock.send(says)
    time.sleep(0.1)
    try:
        yield
    finally:
        for sock in found:
            sock.close()


def own_devices() -> list[GlooDevice]:
    return [GlooDevice(hostname="127.0.0.1") for _ in range(2)]


@pytest.mark.parametrize("says", [b"", b"x", b"\0" * 64], ids=["nothing", "a byte", "much"])
def test_a_group_keeps_no_sockets_of_strangers(says):
    before = listening()
    devices = own_devices()
    ports = listening() - before
    assert len(ports) == 2
    with group_of_two(GuardedGloo, *devices) as group:
        own = sum(map(num_sockets, ports))
        with strangers(ports, says):
            assert sum(map(num_sockets, ports)) == own
            assert total(group) == [3.0, 3.0]
        # The devices take part in further groups.
        with group_of_two(GuardedGloo, *devices) as another:
            assert total(another) == [3.0, 3.0]
            with strangers(ports, says):
                assert total(group) == [3.0, 3.0]


def test_a_device_lets_nobody_in_before_its_first_group():
    before = listening()
    devices = own_devices()
    ports = listening() - before
    with strangers(ports):
        assert not any(map(num_sockets, ports))
    with group_of_two(GuardedGloo, *devices) as group:
        assert total(group) == [3.0, 3.0]


def test_a_group_that_does_not_form_leaves_its_port_closed():
    before = listening()
    device = GlooDevice(hostname="127.0.0.1")
    ports = listening() - before
    with pytest.raises(RuntimeError):
        GuardedGloo(dist.HashStore(), 0, 2, timedelta(seconds=0.3), [device])
    with strangers(ports):
        assert not any(map(num_sockets, ports))


def test_all_groups_that_torch_makes_are_guarded(monkeypatch):
    """And share one listener, whichever way they are asked for."""
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", dist.ProcessGroupGloo)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = listening()
    guard_gloo()
    guard_gloo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = [dist.new_group([0], backend="gloo") for _ in range(3)]
        ports = listening() - before
        assert len(ports) <= 1  # none where an earlier test of the process has made the device
        with strangers(ports):
            assert not any(map(num_sockets, ports))
        tensor = torch.ones(1)
        for group in groups:
            dist.all_reduce(tensor, group=group)
    finally:
        dist.destroy_process_group()


def test_threads_make_devices_at_the_same_time():
    """As ranks do that are threads of one process, which have all met at the same moment."""
    with ThreadPoolExecutor(8) as threads:
        devices = list(threads.map(lambda _: GlooDevice(hostname="127.0.0.1"), range(160)))
    assert len({device._fd for device in devices}) == len(devices)
