"""Authentication of both sides of a connection, by a token that is never sent.

    listening:   a nonce of 32 bytes
    connecting:  a nonce of 32 bytes, and the HMAC-SHA256 of both nonces under the token
    listening:   its own HMAC of both, or 32 zero bytes, which refuse

Nothing else is read from a connection before that. A side has one deadline for all of it, so that
a client that sends a byte now and then is closed as soon as one that sends nothing.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

TIMEOUT_S = 10.0  # time that a listener gives a client
ANSWER_BYTES = 64
_NONCE_BYTES = _PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)


class Challenge:
    """The listening side, for one connection."""

    def __init__(self, token: str) -> None:
        self._token = token
        self.nonce = secrets.token_bytes(_NONCE_BYTES)

    def verdict(self, answer: bytes) -> tuple[bool, bytes]:
        """Whether ANSWER_BYTES of the other side prove the token, and what to reply."""
        theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        both = self.nonce + theirs
        if not hmac.compare_digest(proof, _proof(self._token, b"connecting", both)):
            return False, _REFUSED
        return True, _proof(self._token, b"listening", both)


def challenge(sock: socket.socket, token: str, deadline: float) -> None:
    """The listening side, until `deadline` of time.monotonic(); leaves a time-out on the socket.

    Raises:
        PermissionError: the other side does not have the token.
        OSError: it went away, or was not done in time (TimeoutError).
    """
    mine = Challenge(token)
    _send(sock, mine.nonce, deadline)
    is_right, reply = mine.verdict(read_exactly(sock, ANSWER_BYTES, deadline))
    _send(sock, reply, deadline)
    if not is_right:
        raise PermissionError("wrong token")


def prove(sock: socket.socket, token: str, deadline: float) -> None:
    """The connecting side; raises as `challenge` does."""
    theirs = read_exactly(sock, _NONCE_BYTES, deadline)
    both = theirs + secrets.token_bytes(_NONCE_BYTES)
    _send(sock, both[_NONCE_BYTES:] + _proof(token, b"connecting", both), deadline)
    reply = read_exactly(sock, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(reply, _proof(token, b"listening", both)):
        raise PermissionError("wrong token")


def _proof(token: str, side: bytes, nonces: bytes) -> bytes:
    """Names the side: neither can send the other's proof back."""
    return hmac.digest(token.encode(), side + nonces, "sha256")


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    set_deadline(sock, deadline)
    sock.sendall(data)


def read_exactly(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Raises OSError when they do not come by `deadline`, however many do."""
    data = bytearray()
    while len(data) < num_bytes:
        set_deadline(sock, deadline)
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the other side closed the connection")
        data += part
    return bytes(data)


def set_deadline(sock: socket.socket, deadline: float) -> None:
    """Let the next call end at `deadline` of time.monotonic(); TimeoutError when that is past."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(left_s)
