"""A RendezvousServer as a torch.distributed store, for process groups."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from mcore_rl.parallel import rendezvous
from mcore_rl.parallel.gloo import guard_gloo
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.parallel.rendezvous_client import LateError, LostError, RendezvousClient

c10d: Any = torch.distributed  # whose stores have no type stubs
_open: set[RendezvousStore] = set()  # C++ keeps no reference to what is Python of a store


def join_world(backend: str, timeout_s: float, endpoint: RendezvousEndpoint | None = None) -> None:
    """Make torch's default group as RANK and WORLD_SIZE say, at the endpoint or at RENDEZVOUS_*.

    gloo and NCCL then listen on the interface over which this process reached the rendezvous, but
    for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of the user's.

    Raises:
        ConfigError: this process was not started as a rank.
        RuntimeError: the rendezvous cannot be reached, or other ranks did not come in time.
    """
    rank, world_size = map(int, rendezvous.of_rank("RANK", "WORLD_SIZE"))
    endpoint = endpoint or RendezvousEndpoint.from_environment()
    store = RendezvousStore(endpoint, rank, world_size, timeout_s)
    rendezvous.use_interface_of(store.own_address)
    guard_gloo()
    c10d.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


class RendezvousStore(c10d.Store):  # type: ignore[misc]
    """A rank's connection. It stays open until `close`, and with it what C++ made of it.

    Methods are those of torch.distributed.Store. Errors are its, too: DistStoreError names the keys
    that were waited for and the ranks that are missing, DistNetworkError is a lost connection.
    """

    def __init__(
        self, endpoint: RendezvousEndpoint, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """
        Raises:
            DistNetworkError: no server answers, or it has another token.
        """
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._endpoint, self._rank, self._world_size = endpoint, rank, world_size
        with _torchs_errors():
            self._client = RendezvousClient(endpoint, rank, world_size, timeout_s)
        self.own_address = self._client.own_address
        _open.add(self)

    def close(self) -> None:
        _open.discard(self)
        self._client.close()

    def clone(self) -> RendezvousStore:
        """With its own connection: a wait keeps others from using it."""
        timeout_s = self.timeout.total_seconds()
        return RendezvousStore(self._endpoint, self._rank, self._world_size, timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        self._call(b"set", key.encode(), _bytes(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        both = [(key.encode(), _bytes(value)) for key, value in zip(keys, values, strict=True)]
        self._call(b"set", *(one for pair in both for one in pair))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._call_for(b"get", keys, self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._call_for(b"wait", keys, self.timeout if timeout is None else timeout)

    def barrier(self, name: str) -> None:
        """Wait until every rank has called this; a name serves once.

        Raises:
            DistStoreError: ranks are missing, which it names, or the server was told of a death.
        """
        self.all_gather(name, b"")

    def all_gather(self, name: str, value: str | bytes) -> list[bytes]:
        """Return the values of all ranks, by rank; a name serves once.

        The rank that comes last joins the values into the one that all others wait for: so the
        server's work is linear in the ranks. Waits of each for each would make it quadratic, as are
        the bytes, so values are compressed: most are alike.

        Raises:
            DistStoreError: as `barrier`.
        """
        keys = [f"{name}-{rank}" for rank in range(self._world_size)]
        self.set(keys[self._rank], value)
        if self.add(f"{name}-arrived", 1) == self._world_size:
            values = self.multi_get(keys)
            self.set(name, zlib.compress(rendezvous.frame(*values), 1) if any(values) else b"")
        try:
            joined = self.get(name)
        except c10d.DistStoreError as error:
            missing = self._missing(keys)
            raise c10d.DistStoreError(f"{error}; missing: {', '.join(missing)}") from error
        if not joined:
            return [b""] * self._world_size
        return rendezvous.fields_of(zlib.decompress(joined)[4:])

    def add(self, key: str, amount: int) -> int:
        return int(self._call(b"add", key.encode(), b"%d" % amount)[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._call(b"append", key.encode(), _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values = _bytes(expected), _bytes(desired)
        return self._call(b"compare_set", key.encode(), *values)[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(b"check", *(key.encode() for key in keys)) == [b"1"]

    def delete_key(self, key: str) -> bool:
        return self._call(b"delete_key", key.encode()) == [b"1"]

    def num_keys(self) -> int:
        return int(self._call(b"num_keys")[0])

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set."""
        return True

    deleteKey, getNumKeys = delete_key, num_keys

    def _missing(self, keys: Sequence[str]) -> Sequence[str]:
        try:
            self._client.wait_for(b"wait", keys, 0.0)
        except (LateError, LostError) as error:
            return getattr(error, "keys", ()) or ["unknown"]
        return ()

    def _call_for(self, operation: bytes, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        with _torchs_errors():
            return self._client.wait_for(operation, keys, timeout.total_seconds())

    def _call(self, operation: bytes, *arguments: bytes) -> list[bytes]:
        with _torchs_errors():
            timeout_s = self.timeout.total_seconds()
            return self._client.call(operation, *arguments, timeout_s=timeout_s)


@contextlib.contextmanager
def _torchs_errors() -> Iterator[None]:
    try:
        yield
    except LateError as error:
        raise c10d.DistStoreError(str(error)) from error
    except LostError as error:
        raise c10d.DistNetworkError(str(error)) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
