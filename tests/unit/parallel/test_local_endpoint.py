"""An endpoint is shared with processes of this user on this machine, and with nobody else."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from mcore_rl.parallel import rendezvous
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, fetch_endpoint, share_endpoint

ENDPOINT = RendezvousEndpoint("127.0.0.1", 7, "secret")


@pytest.fixture
def launch(tmp_path) -> str:
    return str(tmp_path)


def test_early_late_and_repeated_requests_get_the_endpoint(launch):
    with ThreadPoolExecutor(3) as threads:
        early = [threads.submit(fetch_endpoint, launch, 60) for _ in range(2)]
        with share_endpoint(ENDPOINT, launch):
            assert [request.result() for request in early] == [ENDPOINT] * 2
            assert fetch_endpoint(launch, 60) == ENDPOINT
    with pytest.raises(RuntimeError, match=r"rank 0 has not come in 0\.2 s"):
        fetch_endpoint(launch, 0.2)


def test_launches_do_not_meet(launch):
    with share_endpoint(ENDPOINT, launch), pytest.raises(RuntimeError, match="has not come"):
        fetch_endpoint(f"{launch} another", 0.2)
    with (
        share_endpoint(ENDPOINT, launch),
        pytest.raises(RuntimeError, match="another process tells"),
        share_endpoint(ENDPOINT, launch),
    ):
        pass


class OfAnother(socket.socket):
    """A socket whose peer is a process of another user, by the kernel's credentials."""

    def getsockopt(self, *arguments):
        if arguments[1] == socket.SO_PEERCRED:
            pid, user, group = struct.unpack("3i", super().getsockopt(*arguments))
            return struct.pack("3i", pid, user + 1, group)
        return super().getsockopt(*arguments)


def test_an_endpoint_from_a_process_of_another_user_is_refused(launch, monkeypatch):
    with share_endpoint(ENDPOINT, launch):
        monkeypatch.setattr(rendezvous.socket, "socket", OfAnother)
        with pytest.raises(RuntimeError, match="a process of another user answers"):
            fetch_endpoint(launch, 60)


def test_a_process_of_another_user_gets_nothing(launch, monkeypatch):
    monkeypatch.setattr(rendezvous, "_is_same_user", lambda sock: False)
    with share_endpoint(ENDPOINT, launch), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(rendezvous._build_socket_name(launch))
        assert sock.recv(4096) == b""
