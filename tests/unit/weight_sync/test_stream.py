"""The stream gives back every bit, and every way of breaking it ends in an error that says so."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from mcore_rl.parallel import handshake
from mcore_rl.weight_sync.connection import StreamError
from mcore_rl.weight_sync.stream import StreamSender, receive


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "float": torch.randn(33, 7, generator=generator),
        "bfloat": torch.randn(5, 3, generator=generator).bfloat16(),
        "long": torch.arange(12).reshape(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "view": torch.randn(8, 6, generator=generator).t()[::2],
        "flag": torch.tensor([True, False]),
    }


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as executor:
        yield executor


def _sender(num_receivers: int = 1, timeout_s: float = 5.0) -> StreamSender:
    return StreamSender("127.0.0.1", num_receivers, timeout_s)


def test_every_receiver_gets_every_bit_in_order(pool):
    weights = _weights()
    with _sender(num_receivers=2) as sender:
        for version in (1, 2):
            futures = [
                pool.submit(lambda v: list(receive(sender.endpoint, v)), version) for _ in range(2)
            ]
            sender.send(weights.items(), version)
            for future in futures:
                received = future.result()
                assert [name for name, _ in received] == list(weights)
                for name, tensor in received:
                    assert tensor.dtype == weights[name].dtype
                    assert torch.equal(tensor, weights[name])


def test_a_wrong_token_is_refused_and_the_rightful_receiver_served(pool):
    with _sender() as sender:
        intruder = pool.submit(
            lambda: list(receive(replace(sender.endpoint, token="guess"), version=1))
        )
        sending = pool.submit(sender.send, _weights().items(), 1)
        with pytest.raises(StreamError, match="wrong token"):
            intruder.result()
        assert len(list(receive(sender.endpoint, 1))) == len(_weights())
        sending.result()


def test_the_token_stays_out_of_the_printed_endpoint():
    with _sender() as sender:
        assert sender.endpoint.token not in repr(sender.endpoint)


def test_a_receiver_of_another_version_is_refused(pool):
    with _sender(timeout_s=2.0) as sender:
        sending = pool.submit(sender.send, _weights().items(), 3)
        with pytest.raises(StreamError, match="sends version 3, not 2"):
            list(receive(sender.endpoint, 2))
        with pytest.raises(StreamError, match="0 of 1 receivers came"):
            sending.result()


def test_a_source_that_fails_half_way_is_named_on_both_sides(pool):
    def tensors():
        yield "first", torch.zeros(2)
        raise OSError("disk gone")

    with _sender() as sender:
        sending = pool.submit(sender.send, tensors(), 1)
        with pytest.raises(StreamError, match=r"after 1 tensors \(last: first\).*disk gone"):
            list(receive(sender.endpoint, 1))
        with pytest.raises(OSError, match="disk gone"):
            sending.result()


def test_a_receiver_that_stops_early_fails_the_sender(pool):
    big = torch.zeros(1 << 22)
    with _sender() as sender:
        sending = pool.submit(sender.send, ((f"t{i}", big) for i in range(8)), 1)
        stream = receive(sender.endpoint, 1)
        next(stream)
        stream.close()
        with pytest.raises(StreamError, match="receiver 127"):
            sending.result()


def test_receivers_that_do_not_come_end_the_wait_and_tell_those_that_did(pool):
    with _sender(num_receivers=2, timeout_s=2.0) as sender:
        sending = pool.submit(sender.send, _weights().items(), 1)
        patient = replace(sender.endpoint, timeout_s=20.0)
        with pytest.raises(StreamError, match="other receivers did not come"):
            list(receive(patient, 1))
        with pytest.raises(StreamError, match=r"1 of 2 receivers came within 2 s"):
            sending.result()


def test_a_receiver_without_a_sender_gives_up_in_time():
    with _sender(timeout_s=0.3) as sender:
        start = time.monotonic()
        with pytest.raises(StreamError, match=r"made no move for 0\.3 s"):
            list(receive(sender.endpoint, 1))
        assert time.monotonic() - start < 10
        endpoint = sender.endpoint
    with pytest.raises(StreamError, match="cannot reach weight sender"):
        list(receive(endpoint, 1))


def test_a_connection_that_died_in_the_queue_is_not_taken_for_a_receiver(pool):
    with _sender() as sender:
        with pytest.raises(
            StreamError
        ):  # leaves a dead connection with the right token and version
            list(receive(replace(sender.endpoint, timeout_s=0.1), 1))
        sending = pool.submit(sender.send, _weights().items(), 1)
        assert len(list(receive(sender.endpoint, 1))) == len(_weights())
        sending.result()


def _frame(header: dict[str, object]) -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack(">I", len(encoded)) + encoded


def _serve_raw(listener: socket.socket, token: str, payload: bytes) -> None:
    """A sender that welcomes its receiver, writes `payload` and dies."""
    sock, _ = listener.accept()
    with sock:
        handshake.challenge(sock, token, time.monotonic() + 20)
        sock.recv(4096)
        sock.sendall(_frame({"kind": "welcome", "version": 1}))
        sock.recv(4096)
        sock.sendall(payload)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(4096)


_TENSOR = {"kind": "tensor", "name": "w", "dtype": "float32", "shape": [2], "nbytes": 8}
_GOOD = _frame(_TENSOR | {"crc32": 0x6522DF69}) + bytes(8)  # crc32 of eight zero bytes


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        pytest.param(
            _GOOD, r"closed the connection: .*after 1 tensors \(last: w\)", id="dies_between"
        ),
        pytest.param(_GOOD[:-3], "closed the connection: in the middle of w", id="dies_inside"),
        pytest.param(_frame(_TENSOR | {"crc32": 1}) + bytes(8), "w: the checksum", id="damaged"),
        pytest.param(
            _frame(_TENSOR | {"crc32": 0, "shape": [3]}),
            r"w: 8 bytes are not a float32",
            id="shape",
        ),
        pytest.param(
            _frame(_TENSOR | {"crc32": 0, "dtype": "load"}), "w: unknown dtype 'load'", id="dtype"
        ),
        pytest.param(
            _GOOD + _frame({"kind": "end", "count": 2, "version": 1}), "sent 2 tensors", id="count"
        ),
        pytest.param(
            _GOOD + _frame({"kind": "end", "count": 1, "version": 7}), "of version 7", id="version"
        ),
        pytest.param(struct.pack(">I", 1 << 31), "not part of this protocol", id="header_size"),
        pytest.param(struct.pack(">I", 2) + b"{]", "is not valid JSON", id="not_json"),
    ],
)
def test_a_broken_stream_never_passes_for_a_whole_one(payload, message):
    with _sender() as owner, socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=_serve_raw, args=(listener, owner.endpoint.token, payload))
        server.start()
        endpoint = replace(owner.endpoint, port=listener.getsockname()[1])
        with pytest.raises(StreamError, match=message):
            list(receive(endpoint, 1))
        server.join()


def test_a_silent_stranger_does_not_keep_the_receivers_out(pool, monkeypatch):
    monkeypatch.setattr("mcore_rl.parallel.handshake.TIMEOUT_S", 0.2)
    with _sender() as sender:
        address = (sender.endpoint.host, sender.endpoint.port)
        with socket.create_connection(address):
            sending = pool.submit(sender.send, _weights().items(), 1)
            assert len(list(receive(sender.endpoint, 1))) == len(_weights())
            sending.result()
