"""An endpoint told on this machine: to whom, and to whom not."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from mcore_rl.parallel import local_endpoint
from mcore_rl.parallel.local_endpoint import ask, told
from mcore_rl.parallel.rendezvous import RendezvousEndpoint

ENDPOINT = RendezvousEndpoint("127.0.0.1", 7, "secret")


@pytest.fixture
def launch(tmp_path) -> str:
    return str(tmp_path)


def test_who_asks_early_late_or_again_is_told(launch):
    with ThreadPoolExecutor(3) as threads:
        early = [threads.submit(ask, launch, 60) for _ in range(2)]
        with told(ENDPOINT, launch):
            assert [one.result() for one in early] == [ENDPOINT] * 2
            assert ask(launch, 60) == ENDPOINT
    with pytest.raises(RuntimeError, match=r"rank 0 has not come in 0\.2 s"):
        ask(launch, 0.2)


def test_launches_do_not_meet(launch):
    with told(ENDPOINT, launch), pytest.raises(RuntimeError, match="has not come"):
        ask(f"{launch} another", 0.2)
    with (
        told(ENDPOINT, launch),
        pytest.raises(RuntimeError, match="another process tells"),
        told(ENDPOINT, launch),
    ):
        pass


class OfAnother(socket.socket):
    """As the kernel shows the process at the other end when it is another user's."""

    def getsockopt(self, *asked):
        if asked[1] == socket.SO_PEERCRED:
            pid, user, group = struct.unpack("3i", super().getsockopt(*asked))
            return struct.pack("3i", pid, user + 1, group)
        return super().getsockopt(*asked)


def test_another_user_s_process_is_believed_nothing(launch, monkeypatch):
    with told(ENDPOINT, launch):
        monkeypatch.setattr(local_endpoint.socket, "socket", OfAnother)
        with pytest.raises(RuntimeError, match="a process of another user answers"):
            ask(launch, 60)


def test_another_user_s_process_is_told_nothing(launch, monkeypatch):
    monkeypatch.setattr(local_endpoint, "_is_ours", lambda sock: False)
    with told(ENDPOINT, launch), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(local_endpoint._name(launch))
        assert sock.recv(4096) == b""
