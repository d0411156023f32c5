"""A WeightTransport to the vLLM worker on the same device, through two buckets of shared memory.

The training ranks exchange missing shards in their process group; then each sends its buckets to
the generation rank that shares its device. Messages go over a unix socket with an abstract name;
the client must run as the same user. After the handshake of parallel/network.py:

    receiver: hello (the update)      sender: welcome      receiver: ready
    sender:   memory (how to map the buckets)              receiver: mapped
    sender:   bucket (which of the two, slices)            receiver: free (it may be overwritten)
    ...
    sender:   end (count, version)                         receiver: done

A frame is a length (4 bytes, big endian) and a JSON header. Nothing is pickled, so a peer can send
wrong numbers but no code. Every wait has a timeout, and the death of either side is a `StreamError`
at the other.

On a CPU the memory is an anonymous file (memfd): nothing is in /dev/shm, and nothing remains after
the end of both processes. On a GPU it is torch's CUDA IPC.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import parse_json_object
from mcore_rl.models.base import HFConfig
from mcore_rl.parallel import network
from mcore_rl.parallel.rendezvous import WAITS_ENDED_KEY, RendezvousEndpoint
from mcore_rl.parallel.store import RendezvousStore
from mcore_rl.reshard.buckets import schedule
from mcore_rl.reshard.executor import (
    Bucket,
    Exchange,
    GroupTransport,
    LocalWeights,
    ReceivedSlice,
)
from mcore_rl.reshard.planner import Plan
from mcore_rl.weight_sync.spec import TransferSpec, group_memory_domains, is_checked, plan_transfer
from mcore_rl.weight_sync.transport import (
    POLL_S,
    IsLost,
    StreamError,
    WeightTransport,
    WeightUpdate,
)

_MAX_SLICES_BYTES = 64 << 20  # of a header with the slices of a bucket
_MAX_HEADER_BYTES = 1 << 20


def connect_shared_memory(
    spec: TransferSpec,
    endpoint: RendezvousEndpoint,
    model: HFConfig,
    rank: int,
    device: torch.device,
) -> WeightTransport:
    """Connect a rank: all ranks exchange memory domains, and generation ranks get an endpoint."""
    timeout_s, dtype = spec.settings.timeout_s, getattr(torch, spec.dtype)
    generation_rank = rank - spec.num_training
    try:
        store = RendezvousStore(endpoint, rank, spec.world_size, timeout_s)
        location = json.dumps([get_memory_domain(device), socket.gethostname()])
        locations = store.all_gather("locations", location)
        if generation_rank >= 0:
            fields = json.loads(store.get(f"endpoint-{generation_rank}"))
            store.close()
            return _RolloutTransport(ShardEndpoint(**fields), device)
        pairs = [tuple(json.loads(encoded)) for encoded in locations]
        domains = group_memory_domains(pairs, spec.num_training)
        plan = plan_transfer(spec, model, dtype.itemsize, domains)
        sender = None
        if rank in plan.devices.generation:
            generation_rank = plan.devices.generation.index(rank)
            sender = ShardSender(generation_rank, timeout_s, lambda: store.check([WAITS_ENDED_KEY]))
            store.set(f"endpoint-{generation_rank}", json.dumps(asdict(sender.endpoint)))
        return _TrainerTransport(spec, plan, device, store, sender)
    except RuntimeError as error:
        raise StreamError(f"rank {rank} of the weight transport: {error}") from error


class _TrainerTransport(WeightTransport):
    """The end of a training rank. All training ranks connect and send together."""

    def __init__(
        self,
        spec: TransferSpec,
        plan: Plan,
        device: torch.device,
        store: RendezvousStore,
        sender: ShardSender | None,
    ) -> None:
        self._verify, self._device = spec.settings.verify, device
        self._store, self._sender = store, sender
        half = spec.settings.bucket_bytes // 2  # the other half is for messages to send
        transport = GroupTransport(torch.distributed.group.WORLD, spec.settings.timeout_s, device)
        rounds = schedule(plan, transport.rank, half)
        dtype = getattr(torch, spec.dtype)
        self._exchange = Exchange(rounds, half, dtype, transport, self._allocate)

    def send(self, weights: LocalWeights, update: WeightUpdate) -> None:
        memory = create_shared_buckets(self._device)
        buckets = self._exchange.run(
            weights, memory.allocate, lambda name: is_checked(self._verify, name, update.version)
        )
        if self._sender is not None:
            self._sender.send(buckets, memory, update)
        else:
            for _ in buckets:
                raise RuntimeError("a bucket arrived on a device without a generation rank")

    def receive(self, update: WeightUpdate) -> Generator[list[ReceivedSlice], None, None]:
        raise RuntimeError("a training rank receives no weights")

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._store.close()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class _RolloutTransport(WeightTransport):
    """The end of a generation rank."""

    def __init__(self, endpoint: ShardEndpoint, device: torch.device) -> None:
        self._endpoint, self._device = endpoint, device

    def send(self, weights: LocalWeights, update: WeightUpdate) -> None:
        raise RuntimeError("a generation rank sends no weights")

    def receive(self, update: WeightUpdate) -> Generator[list[ReceivedSlice], None, None]:
        return receive_shards(self._endpoint, update, self._device)

    def close(self) -> None:
        """Do nothing: each update has a separate connection."""


@dataclass(frozen=True, slots=True)
class ShardEndpoint:
    """Address of the sender of a generation rank, as plain fields."""

    name: str  # of an abstract unix socket
    token: str = field(repr=False)  # a secret: it allows to receive
    timeout_s: float  # of each wait for the other side
    generation_rank: int


class ShardSender:
    """The trainer's socket for a generation rank; each `send` accepts a connection."""

    def __init__(
        self, generation_rank: int, timeout_s: float, is_lost: IsLost | None = None
    ) -> None:
        """Bind the socket; `is_lost` ends the wait for a connection."""
        self._is_lost = is_lost or (lambda: False)
        name = f"mcore_rl-weights-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{name}")  # an abstract name: nothing to unlink after a crash
        self._listener.listen()
        self.endpoint = ShardEndpoint(name, secrets.token_hex(32), timeout_s, generation_rank)

    def send(self, buckets: Iterator[Bucket], memory: SharedBuckets, update: WeightUpdate) -> None:
        """Send every bucket, allocated in `memory`.

        If the receiver fails, the other buckets are still consumed, since the exchanges of other
        ranks depend on it. Raises StreamError after that.
        """
        connection = None
        try:
            connection = self._accept(update)
            count = self._send_buckets(connection, buckets, memory)
            connection.send({"kind": "end", "count": count, "version": update.version})
            connection.read_expected("done", "waiting for the receiver's last word")
        except BaseException as error:
            if connection is not None:
                connection.report_failure(f"{type(error).__name__}: {error}")
            if isinstance(error, StreamError):
                for _ in buckets:
                    continue
            raise
        finally:
            memory.close()
            if connection is not None:
                connection.close()

    def _send_buckets(
        self, connection: Connection, buckets: Iterator[Bucket], memory: SharedBuckets
    ) -> int:
        """Send each bucket when the receiver has placed the one before; return their number."""
        count = 0
        for bucket in buckets:
            if not count:  # the exchange allocates its memory before that
                connection.send({"kind": "memory", "buckets": memory.describe()})
                # Descriptors travel beside at least one byte; on a GPU there are none.
                socket.send_fds(connection.sock, [b"\0"], memory.descriptors)
                connection.read_expected("mapped", "waiting for the buckets to be mapped")
            memory.finish_writes()  # the other process reads without a stream of this one
            doing = f"bucket {count}"
            slices = [_describe_slice(received, bucket.memory) for received in bucket]
            connection.send(
                {"kind": "bucket", "memory": bucket.index % 2, "slices": slices}, doing=doing
            )
            connection.read_expected("free", f"waiting until {doing} was placed")
            count += 1
        return count

    def _accept(self, update: WeightUpdate) -> Connection:
        """Accept the connection of a receiver of this user that has the token and this update."""
        endpoint = self.endpoint
        deadline = time.monotonic() + endpoint.timeout_s
        receiver = f"version {update.version}: generation rank {endpoint.generation_rank}"
        while True:
            try:
                self._listener.settimeout(min(POLL_S, max(0.001, deadline - time.monotonic())))
                sock, _ = self._listener.accept()
            except TimeoutError:
                if self._is_lost():
                    raise StreamError(f"{receiver} did not come: a server has died") from None
                if time.monotonic() < deadline:
                    continue
                raise StreamError(
                    f"{receiver} did not come within {endpoint.timeout_s:g} s"
                ) from None
            connection = Connection(sock, f"generation rank {endpoint.generation_rank}")
            if _get_peer_user(sock) != os.getuid():
                connection.close()
            elif admit_receiver(connection, endpoint.token, asdict(update), endpoint.timeout_s):
                return connection

    def close(self) -> None:
        self._listener.close()


def _get_peer_user(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


def _describe_slice(received: ReceivedSlice, memory: torch.Tensor) -> list[Any]:
    """Return a slice as JSON values, for `_build_slice`; its data by their offset in `memory`."""
    start = received.data.data_ptr() - memory.data_ptr()
    dtype = str(received.data.dtype).removeprefix("torch.")
    sizes = list(received.data.shape)
    origin = [received.source_rank, received.checksum]
    return [received.target, list(received.offset), sizes, dtype, start, *origin]


def receive_shards(
    endpoint: ShardEndpoint, update: WeightUpdate, device: torch.device
) -> Generator[list[ReceivedSlice], None, None]:
    """Yield the slices of each bucket, in memory of `device`.

    Copy them before the generator continues, which overwrites the memory. It ends normally only if
    every bucket of the update has arrived. Raises StreamError otherwise.
    """
    connection, version = _connect(endpoint), update.version
    is_complete = False
    failure = "the receiver stopped"
    try:
        greet_sender(connection, endpoint.token, asdict(update))
        count = 0
        memories: list[torch.Tensor] = []
        while True:
            doing = f"version {version} broke off after {count} buckets"
            header = connection.read_header(doing, _MAX_SLICES_BYTES)
            if header["kind"] == "memory":
                memories = _receive_memory(connection, header["buckets"], device)
                connection.send({"kind": "mapped"})
                continue
            if header["kind"] != "bucket":
                break
            memory = memories[header["memory"]]
            yield [_build_slice(entry, memory) for entry in header["slices"]]
            if device.type == "cuda":  # the copies out of the bucket have only been queued
                torch.cuda.current_stream(device).synchronize()
            connection.send({"kind": "free"})
            count += 1
        if header["kind"] != "end":
            raise StreamError(f"{doing}: the sender reports {get_reason(header)}")
        if (header["count"], header["version"]) != (count, version):
            raise StreamError(
                f"expected version {version}, got {count} buckets; the sender says it sent "
                f"{header['count']} of version {header['version']}"
            )
        connection.send({"kind": "done"})
        is_complete = True
    except StreamError as error:
        failure = str(error)
        raise
    finally:
        if not is_complete:
            connection.report_failure(failure)
        connection.close()


def _connect(endpoint: ShardEndpoint) -> Connection:
    peer = "the trainer on this device"
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(endpoint.timeout_s)
    try:
        sock.connect(f"\0{endpoint.name}")
    except OSError as error:
        sock.close()
        raise StreamError(f"cannot reach {peer}: {error}") from error
    return Connection(sock, peer)


def _receive_memory(
    connection: Connection, descriptions: list[dict[str, Any]], device: torch.device
) -> list[torch.Tensor]:
    """Map the sender's buckets; on a CPU their file descriptors follow the frame."""
    try:
        _, descriptors, _, _ = socket.recv_fds(connection.sock, 1, 2)
    except OSError as error:
        raise StreamError(f"{connection.peer} sent no memory: {error}") from error
    if device.type != "cuda" and len(descriptors) != len(descriptions):
        raise StreamError(f"{connection.peer} went away before its memory was mapped")
    return map_buckets(descriptions, descriptors, device)


def _build_slice(entry: list[Any], memory: torch.Tensor) -> ReceivedSlice:
    target, offset, sizes, name, start, source_rank, checksum = entry
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StreamError(f"{target}: unknown dtype {name!r}")
    end = start + math.prod(sizes) * dtype.itemsize
    data = memory[start:end].view(dtype).view(sizes)
    return ReceivedSlice(target, tuple(offset), data, source_rank, checksum)


class Connection:
    """A socket with frames. Every failure is a StreamError that names the peer."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self.sock = sock
        self._deadline: float | None = None
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of each read and write."""
        self._deadline = None
        self.sock.settimeout(timeout_s)

    def set_deadline(self, deadline: float) -> None:
        """Set a deadline of all reads, by time.monotonic(), until the next `set_timeout`."""
        self._deadline = deadline

    def send(self, header: dict[str, Any], doing: str = "sending") -> None:
        """Send a frame; `doing` describes the operation in errors."""
        encoded = json.dumps(header).encode()
        try:
            self.sock.sendall(struct.pack(">I", len(encoded)) + encoded)
        except OSError as error:
            raise self.build_error(doing, error) from error

    def read_header(self, doing: str, limit_bytes: int = _MAX_HEADER_BYTES) -> dict[str, Any]:
        """Read a frame."""
        prefix = bytearray(4)
        self.read_into(memoryview(prefix), doing)
        (length,) = struct.unpack(">I", prefix)
        if length > limit_bytes:
            raise StreamError(
                f"{self.peer}: a header of {length} bytes is not part of this protocol"
            )
        encoded = bytearray(length)
        self.read_into(memoryview(encoded), doing)
        try:
            header = parse_json_object(bytes(encoded), f"a header of {self.peer}")
        except ConfigError as error:
            raise StreamError(str(error)) from error
        if "kind" not in header:
            raise StreamError(f"{self.peer}: not a header of this protocol")
        return header

    def read_expected(self, kind: str, doing: str) -> dict[str, Any]:
        """Read a frame of a kind; raise StreamError for another one."""
        header = self.read_header(doing)
        if header["kind"] != kind:
            raise StreamError(f"{self.peer} refused: {get_reason(header)}")
        return header

    def read_into(self, view: memoryview, doing: str) -> None:
        """Fill memory with received bytes."""
        try:
            while view.nbytes:
                if self._deadline is not None:
                    network.set_deadline(self.sock, self._deadline)
                received = self.sock.recv_into(view)
                if received == 0:
                    raise StreamError(f"{self.peer} closed the connection: {doing}")
                view = view[received:]
        except OSError as error:
            raise self.build_error(doing, error) from error

    def report_failure(self, reason: str) -> None:
        """Send the reason of a failure, if the peer can still receive it."""
        with contextlib.suppress(StreamError, OSError):
            self.set_timeout(1.0)
            self.send({"kind": "failed", "reason": reason})

    def close(self) -> None:
        self.sock.close()

    def build_error(self, doing: str, error: OSError) -> StreamError:
        """Return the error for a failed read or write."""
        if isinstance(error, PermissionError):
            return StreamError(f"{self.peer} refused: {error}")
        if isinstance(error, TimeoutError) and self._deadline is not None:
            return StreamError(f"{self.peer} was not done in time: {doing}")
        if isinstance(error, TimeoutError):
            return StreamError(f"{self.peer} made no move for {self.sock.gettimeout()} s: {doing}")
        return StreamError(f"{self.peer} went away ({error}): {doing}")


def admit_receiver(
    connection: Connection, token: str, update: Mapping[str, object], timeout_s: float
) -> bool:
    """Run the sender's side of the handshake.

    Returns:
        Whether the peer has the token, requests this update and is alive. Otherwise the connection
        is closed; a peer with the token gets the reason.
    """
    deadline = time.monotonic() + min(network.HANDSHAKE_TIMEOUT_S, timeout_s)
    try:
        network.challenge_client(connection.sock, token, deadline)
    except OSError:
        connection.close()
        return False
    connection.set_deadline(deadline)
    try:
        hello = connection.read_expected("hello", "waiting for hello")
        for name, value in update.items():
            if hello.get(name) != value:
                raise StreamError(f"this sends {name} {value}, not {hello.get(name)}")
        connection.send({"kind": "welcome"})
        # Fails for a connection that died while it was queued.
        connection.read_expected("ready", "waiting for ready")
    except StreamError as error:
        connection.report_failure(str(error))
        connection.close()
        return False
    connection.set_timeout(timeout_s)
    return True


def greet_sender(connection: Connection, token: str, update: Mapping[str, object]) -> None:
    """Run the receiver's side of the handshake; raise StreamError if the sender refuses."""
    timeout_s = connection.sock.gettimeout() or 0.0
    doing = "waiting for the sender to take the connection"
    try:
        network.prove_token(connection.sock, token, time.monotonic() + timeout_s)
    except OSError as error:
        connection.set_timeout(timeout_s)
        raise connection.build_error(doing, error) from error
    connection.set_timeout(timeout_s)
    connection.send({"kind": "hello", **update})
    connection.read_expected("welcome", "waiting for the sender's welcome")
    connection.send({"kind": "ready"})


def get_reason(header: dict[str, Any]) -> str:
    """Return why the other side gave up, from its last header."""
    return str(header.get("reason", f"an unexpected {header['kind']!r} frame"))


def check_allocator() -> None:
    """Raise ConfigError for settings of torch that prevent sharing of GPU memory."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if "expandable_segments:true" in value.replace(" ", "").lower():
            raise ConfigError(
                f"{name}={value!r}: expandable segments cannot be shared with the servers, as "
                "weight_sync.method='colocated' does; allowed: without expandable_segments, or "
                "another weight_sync.method"
            )


class SharedBuckets(Protocol):
    """Shared memory, allocated by the trainer."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate [num_bytes] uint8."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """Return a description of each allocation, in order, for `map_buckets`, as JSON values."""
        ...

    @property
    def descriptors(self) -> list[int]:
        """File descriptors that the other process needs with the description."""
        ...

    def finish_writes(self) -> None:
        """Wait until the other process can read everything written."""

    def close(self) -> None:
        """Release resources of the trainer."""


def create_shared_buckets(device: torch.device) -> SharedBuckets:
    """Return the shared memory of a device, without allocations."""
    return _CudaBuckets(device) if device.type == "cuda" else _FileBuckets()


def map_buckets(
    descriptions: list[dict[str, Any]], descriptors: list[int], device: torch.device
) -> list[torch.Tensor]:
    """Map shared memory into this process; close the descriptors."""
    if device.type == "cuda":
        return [_open_handle(entry, device) for entry in descriptions]
    try:
        pairs = zip(descriptions, descriptors, strict=True)
        return [_map_file(descriptor, entry["num_bytes"]) for entry, descriptor in pairs]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def get_memory_domain(device: torch.device) -> str:
    """Return a name that is equal for processes that can share memory on their devices."""
    if device.type == "cuda":
        return f"GPU {torch.cuda.get_device_properties(device).uuid}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Containers of a host with separate networks cannot connect to each other's sockets.
    return f"host {boot}, network {os.stat('/proc/self/ns/net').st_ino}"


class _FileBuckets:
    """Anonymous files (memfd), mapped by both processes."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self._sizes: list[int] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        descriptor = os.memfd_create("weights")
        os.ftruncate(descriptor, num_bytes)
        self.descriptors.append(descriptor)
        self._sizes.append(num_bytes)
        return _map_file(descriptor, num_bytes)

    def describe(self) -> list[dict[str, Any]]:
        return [{"num_bytes": num_bytes} for num_bytes in self._sizes]

    def finish_writes(self) -> None:
        """Do nothing: copies on a CPU are complete when they return."""

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


def _map_file(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Map a file; the mapping lives as long as the tensor."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


class _CudaBuckets:
    """CUDA memory, shared as by torch.multiprocessing (reductions.py), without pickles."""

    def __init__(self, device: torch.device) -> None:
        check_allocator()
        self.descriptors: list[int] = []
        self._device = device
        self._tensors: list[torch.Tensor] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._tensors.append(tensor)
        return tensor

    def describe(self) -> list[dict[str, Any]]:
        return [_export_handle(tensor) for tensor in self._tensors]

    def finish_writes(self) -> None:
        """Wait for an event after the bucket's writes, not for the device.

        Every write is in the current stream, or that stream waits for it (NCCL). Transfers of the
        next bucket, in other streams, continue.
        """
        stream: Any = torch.cuda.current_stream(self._device)
        stream.record_event().synchronize()

    def close(self) -> None:
        self._tensors.clear()


_HANDLE = (
    "device", "handle", "size_bytes", "offset_bytes", "ref_counter_handle", "ref_counter_offset",
    "event_handle", "event_sync_required",
)  # fmt: skip


def _export_handle(tensor: torch.Tensor) -> dict[str, Any]:
    storage: Any = tensor.untyped_storage()
    fields = dict(zip(_HANDLE, storage._share_cuda_(), strict=True))
    fields["num_bytes"] = tensor.numel()
    return {n: v.hex() if isinstance(v, bytes) else v for n, v in fields.items()}


def _open_handle(entry: dict[str, Any], device: torch.device) -> torch.Tensor:
    fields = [bytes.fromhex(entry[n]) if "handle" in n else entry[n] for n in _HANDLE]
    storage: Any = torch.UntypedStorage
    # Index of the device in this process: the trainer may have other visible devices.
    shared = storage._new_shared_cuda(device.index or 0, *fields[1:])
    tensor = torch.empty(0, dtype=torch.uint8, device=device)
    return tensor.set_(shared)[: entry["num_bytes"]]
