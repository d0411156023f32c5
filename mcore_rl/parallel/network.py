"""The network of ranks: interfaces of this machine, and authentication of connections.

Both sides of a connection prove that they have a token, which is never sent:

    listening:   a nonce of 32 bytes
    connecting:  a nonce of 32 bytes, and the HMAC-SHA256 of both nonces under the token
    listening:   an HMAC of both, or 32 zero bytes, which refuse

Nothing else is read from a connection before. A side has one deadline for the whole handshake, so
that a client that sends a byte now and then is closed as soon as one that sends nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import time

import psutil

from mcore_rl.config.errors import ConfigError

HANDSHAKE_TIMEOUT_S = 10.0  # of the listening side
ANSWER_BYTES = 64
_NONCE_BYTES = _PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)


def find_interface(address: str) -> str:
    """Return the interface of this machine that has an address, as for GLOO_SOCKET_IFNAME."""
    for interface, addresses in psutil.net_if_addrs().items():
        if address in (entry.address.partition("%")[0] for entry in addresses):
            return str(interface)
    raise ConfigError(f"{address} is not an address of this machine")


def use_interface_of(address: str) -> None:
    """Make gloo and NCCL of this process use the interface that has an address.

    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are kept if the user has set them. Call it before the
    first group of the process: NCCL reads its variable once.
    """
    interface = find_interface(address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": exact name, not a prefix


def use_interface_towards(host: str, port: int) -> None:
    """Make gloo and NCCL use the interface by which this machine reaches another one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, port))  # sends nothing
        use_interface_of(sock.getsockname()[0])


def find_address(interface: str) -> str:
    """Return the IPv4 address of an interface of this machine; "" is that of the default route.

    Raises:
        ConfigError: There is none.
    """
    if not interface:
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as sock:
            sock.connect(("203.0.113.1", 9))  # a reserved address (RFC 5737); nothing is sent
            return str(sock.getsockname()[0])
        raise ConfigError(
            "no interface is named, and this machine has no default route that would say by which "
            "address others reach it"
        )
    addresses = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    if not addresses.get(interface):
        allowed = ", ".join(sorted(name for name in addresses if addresses[name]))
        raise ConfigError(f"interface {interface!r} has no IPv4 address; allowed: {allowed}")
    return str(addresses[interface][0])


class Challenge:
    """State of the listening side of a handshake, for one connection."""

    def __init__(self, token: str) -> None:
        self._token = token
        self.nonce = secrets.token_bytes(_NONCE_BYTES)

    def verify(self, answer: bytes) -> tuple[bool, bytes]:
        """Verify the answer, of ANSWER_BYTES.

        Returns:
            Whether the other side has the token, and the reply to send.
        """
        client_nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        nonces = self.nonce + client_nonce
        if not hmac.compare_digest(proof, _sign(self._token, b"connecting", nonces)):
            return False, _REFUSED
        return True, _sign(self._token, b"listening", nonces)


def challenge_client(sock: socket.socket, token: str, deadline: float) -> None:
    """Authenticate both sides, as the listening one. Sets the timeout of the socket.

    Args:
        deadline: Of the whole handshake, by time.monotonic().

    Raises:
        PermissionError: The other side does not have the token.
        OSError: It disconnected, or the deadline has passed (TimeoutError).
    """
    challenge = Challenge(token)
    _send(sock, challenge.nonce, deadline)
    is_right, reply = challenge.verify(read_exactly(sock, ANSWER_BYTES, deadline))
    _send(sock, reply, deadline)
    if not is_right:
        raise PermissionError("wrong token")


def prove_token(sock: socket.socket, token: str, deadline: float) -> None:
    """Authenticate both sides, as the connecting one. Raises as `challenge_client` does."""
    server_nonce = read_exactly(sock, _NONCE_BYTES, deadline)
    nonces = server_nonce + secrets.token_bytes(_NONCE_BYTES)
    _send(sock, nonces[_NONCE_BYTES:] + _sign(token, b"connecting", nonces), deadline)
    reply = read_exactly(sock, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(reply, _sign(token, b"listening", nonces)):
        raise PermissionError("wrong token")


def _sign(token: str, side: bytes, nonces: bytes) -> bytes:
    """Compute the HMAC of the nonces. It includes the side, so that it cannot be sent back."""
    return hmac.digest(token.encode(), side + nonces, "sha256")


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    set_deadline(sock, deadline)
    sock.sendall(data)


def read_exactly(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Receive exactly `num_bytes`; raise OSError unless all of them arrive by `deadline`."""
    data = bytearray()
    while len(data) < num_bytes:
        set_deadline(sock, deadline)
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the other side closed the connection")
        data += part
    return bytes(data)


def set_deadline(sock: socket.socket, deadline: float) -> None:
    """Set the socket's timeout to the time until `deadline`; raise TimeoutError if it is past."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(remaining_s)
