"""Strangers and broken peers of a framed connection: an answer of no, or one kind of error."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from mcore_rl.parallel import network
from mcore_rl.weight_sync.connection import Connection, StreamError, admit, greet
from tests import attacks

TOKEN = "of this update"
UPDATE = {"version": 7, "format": "dense"}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        yield listener


@pytest.fixture
def admitting(listener, pool) -> Callable[[], Future[bool]]:
    """The sender's side for the next connection."""

    def one() -> bool:
        connection = Connection(listener.accept()[0], "receiver")
        is_admitted = admit(connection, TOKEN, UPDATE, 20.0)
        connection.close()
        return is_admitted

    return lambda: pool.submit(one)


def receiver(listener: socket.socket) -> Connection:
    return Connection(socket.create_connection(listener.getsockname(), 20), "sender")


@pytest.mark.parametrize("what", attacks.SENDERS)
def test_a_stranger_is_not_admitted_and_learns_nothing(listener, admitting, what):
    outcome = admitting()
    assert len(attacks.send(listener.getsockname(), what)) <= attacks.SAID_AT_MOST
    assert outcome.result() is False


def test_a_wrong_token_is_not_admitted_and_is_said_to_be_wrong(listener, admitting):
    outcome = admitting()
    with pytest.raises(StreamError, match=r"^sender refused: wrong token$"):
        greet(receiver(listener), "a guess", UPDATE)
    assert outcome.result() is False


def test_one_deadline_is_for_the_whole_handshake(listener, admitting, monkeypatch):
    monkeypatch.setattr(network, "HANDSHAKE_TIMEOUT_S", 0.5)
    outcome = admitting()
    # Its last byte would come after 25 seconds.
    assert 0.3 < attacks.drip(listener.getsockname(), pause_s=0.4, patience_s=30.0) < 15
    assert outcome.result() is False


def test_who_has_the_token_has_no_more_time(listener, admitting, monkeypatch):
    monkeypatch.setattr(network, "HANDSHAKE_TIMEOUT_S", 0.5)
    outcome = admitting()
    slow = receiver(listener)
    network.prove_token(slow.sock, TOKEN, time.monotonic() + 20)
    with pytest.raises(StreamError, match="refused: receiver was not done in time"):
        for byte in attacks.framed(b'{"kind": "hello", "version": 7}')[:-1]:
            slow.sock.sendall(bytes([byte]))
            time.sleep(0.1)
            if outcome.done():
                slow.read_expected("welcome", "waiting")
    assert outcome.result() is False


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (attacks.framed(b'{"kind": "\xff"}'), "a header of peer is not valid JSON: 'utf-8' codec"),
        (attacks.framed(b"[" * 60_000 + b"]" * 60_000), "a header of peer .* nested too deep"),
        (b"\xff\xff\xff\xff", "peer: a header of 4294967295 bytes is not part of this protocol"),
        (attacks.framed(b'{"kind": ' + b"9" * 5000 + b"}"), "a header of peer is not valid JSON"),
        (attacks.framed(b"[1]"), "a header of peer is a JSON list, not an object"),
        (attacks.framed(b'{"version": 1}'), "peer: not a header of this protocol"),
    ],
)
def test_a_header_that_cannot_be_read_is_a_stream_error(sent, message):
    """Of a peer that has the token, too."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(sent)
        with pytest.raises(StreamError, match=f"^{message}"):
            Connection(mine, "peer").read_header("reading")


def test_a_receiver_of_this_version_is_admitted(listener, admitting):
    outcome = admitting()
    greet(receiver(listener), TOKEN, UPDATE)
    assert outcome.result() is True


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (UPDATE | {"version": 6}, "this sends version 7, not 6"),
        (UPDATE | {"format": "sparse"}, "this sends format dense, not sparse"),
        ({"format": "dense"}, "this sends version 7, not None"),
        ({}, "this sends version 7, not None"),
    ],
)
def test_a_receiver_that_wants_another_update_or_says_none_is_refused(
    listener, admitting, wanted, told
):
    outcome = admitting()
    with pytest.raises(StreamError, match=f"^sender refused: {told}$"):
        greet(receiver(listener), TOKEN, wanted)
    assert outcome.result() is False
