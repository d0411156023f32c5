"""A WeightTransport over NIXL: a receiver reads its messages from the sender's memory.

NIXL uses the fastest link of the machines: InfiniBand, RoCE, shared memory or TCP, also for GPU
memory. A sender packs a message and notifies its receiver, which reads it; NIXL notifies the sender
when the read is complete. The notification contains version and format of the update, and
checksums. Each rank gets the metadata of its peers in the plan at a rendezvous and connects only to
them. A rank that refuses an update notifies its peers, which notify theirs, so that no rank waits
for it. NIXL does not authenticate: use it, like NCCL, only in a trusted network.

NIXL's progress thread is off: it polls without a pause, which takes a core of each rank all the
time (nixl 1.5.1). So messages progress only while their rank is in a call of this file; over TCP
also those that peers read from it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any

import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import HFConfig
from mcore_rl.parallel.network import find_interface
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.parallel.store import RendezvousStore
from mcore_rl.reshard.buckets import list_peers
from mcore_rl.reshard.executor import MessageTransport, Pending, Transfer
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import ExchangeTransport, StreamError, WeightUpdate

_POLL_S = 0.0005
_REFUSING_S = 1.0  # to connect to peers without a message so far
_REFUSAL = -1, -1  # key in place of peer and bucket
Notices = dict[tuple[int, int, int], dict[str, Any]]  # by version, peer and bucket


class NixlTransport(ExchangeTransport):
    """A transport over NIXL. Its staging memory, of two buckets, is registered once."""

    def __init__(
        self,
        spec: TransferSpec,
        endpoint: RendezvousEndpoint,
        model: HFConfig,
        rank: int,
        device: torch.device,
    ) -> None:
        """Connect; return when all peers have published their metadata."""
        super().__init__(spec, model, rank, device)
        api = import_nixl()
        self._timeout_s = spec.settings.timeout_s
        try:
            keys = RendezvousStore(endpoint, rank, spec.world_size, self._timeout_s)
            _restrict_to_loopback(keys.own_address)
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = api.nixl_agent(str(rank), config)
            self._staging = torch.empty(2 * self._half, dtype=torch.uint8, device=device)
            self._registered = self._agent.register_memory(self._staging)
            self._peers = list_peers(self._rounds)
            self._exchange_metadata(keys)
            keys.close()
        except RuntimeError as error:
            raise StreamError(f"rank {rank} of the weight transport: {error}") from error
        self._used = 0  # bytes of the staging memory, in the current version
        self._notices: Notices = {}

    def _exchange_metadata(self, keys: RendezvousStore) -> None:
        """Publish this rank's NIXL metadata, and wait for the metadata of its peers."""
        keys.set(f"agent-{self._rank}", self._agent.get_agent_metadata())
        for metadata in keys.multi_get([f"agent-{peer}" for peer in self._peers]):
            self._agent.add_remote_agent(metadata)

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)
        del self._agent, self._staging

    @contextmanager
    def _open_messages(self, update: WeightUpdate) -> Iterator[MessageTransport]:
        self._used = 0
        for key in [key for key in self._notices if key[0] < update.version]:
            del self._notices[key]
        messages = _NixlMessages(self._agent, self._peers, update, self._notices, self._timeout_s)
        yield messages
        messages.progress(0)  # the last notices leave only while NIXL is called

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        start, self._used = self._used, self._used + num_bytes
        return self._staging[start : self._used]


def import_nixl() -> Any:
    """Import NIXL's Python API; raise ConfigError if it is not installed."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        import nixl._api
    except ImportError as error:
        raise ConfigError(
            f"weight_sync.transport='nixl': its package cannot be imported ({error}); to install "
            "it: pip install 'mcore-rl[nixl]'"
        ) from error
    return nixl._api


def _restrict_to_loopback(own_address: str) -> None:
    """Restrict UCX, which listens on every network device, if all ranks are on one machine."""
    if ip_address(own_address).is_loopback:
        os.environ.setdefault("UCX_NET_DEVICES", find_interface(own_address))


class _NixlMessages:
    """Messages of one update."""

    is_ordered = False

    def __init__(
        self,
        agent: Any,
        peers: Sequence[int],
        update: WeightUpdate,
        notices: Notices,
        timeout_s: float,
    ) -> None:
        """Begin an update; `notices`: those received, also of the next version."""
        self._agent, self._peers = agent, peers
        self._update, self._timeout_s = update, timeout_s
        self._notices = notices
        self.sent_bytes = self.received_bytes = 0

    def start(self, transfers: Sequence[Transfer]) -> Sequence[Pending]:
        sends = (transfer for transfer in transfers if transfer.is_send)
        for (peer, bucket), parts in itertools.groupby(sends, lambda t: (t.peer, t.bucket)):
            self._offer_message(peer, bucket, list(parts))
        return [_Transfer(self, transfer) for transfer in transfers]

    def _offer_message(self, peer: int, bucket: int, parts: Sequence[Transfer]) -> None:
        """Notify the receiver of the address of a message, and its checksums."""
        [data] = (part.data for part in parts if not part.is_checksums)
        checksums = [part.data.view(torch.int64).tolist() for part in parts if part.is_checksums]
        notice = {
            **asdict(self._update),
            "bucket": bucket,
            "address": data.data_ptr(),
            "device": max(data.get_device(), 0),  # torch says -1 for the CPU
            "checksums": checksums[0] if checksums else [],
        }
        _synchronize(data.device)  # the peer's read does not wait for streams of this device
        self._agent.send_notif(str(peer), json.dumps(notice).encode())
        self.sent_bytes += data.numel()

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer that `start` started."""
        peer, bucket, data = transfer.peer, transfer.bucket, transfer.data
        if transfer.is_send and transfer.is_checksums:  # sent in the notice
            return
        notice = self._wait_for_notice(peer, bucket)
        if transfer.is_checksums:
            data.copy_(torch.tensor(notice["checksums"], dtype=torch.int64).view(torch.uint8))
        elif not transfer.is_send:
            self._read(peer, bucket, data, notice)

    def _wait_for_notice(self, peer: int, bucket: int) -> dict[str, Any]:
        """Wait for a peer's notice of a bucket: it is ready (of a sender), or read (a receiver)."""
        deadline = time.monotonic() + self._timeout_s
        version = self._update.version
        key = version, peer, bucket
        while key not in self._notices:
            self._receive_notices()
            if refusal := self._notices.get((version, *_REFUSAL)):
                self._refuse(refusal["reason"])
                raise StreamError(f"a rank of the transport refused: {refusal['reason']}")
            if time.monotonic() > deadline:
                versions = {version for version, name, _ in self._notices if name == peer}
                hint = f"; it is at version {max(versions)}" if versions else ""
                raise StreamError(
                    f"version {version}, bucket {bucket}: rank {peer} of the transport "
                    f"made no move for {self._timeout_s:g} s{hint}"
                )
            time.sleep(_POLL_S)
        self._check_update(peer, self._notices[key])
        return self._notices[key]

    def progress(self, seconds: float) -> None:
        """Receive notices for some seconds, at least once, so that the last messages are sent."""
        deadline = time.monotonic() + seconds
        self._receive_notices()
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._receive_notices()

    def _receive_notices(self) -> None:
        """Record the notices that have arrived, without waiting."""
        for name, texts in self._agent.get_new_notifs().items():
            for notice in map(json.loads, texts):
                key = _REFUSAL if "reason" in notice else (int(name), notice["bucket"])
                self._notices[notice["version"], *key] = notice

    def _check_update(self, peer: int, notice: dict[str, Any]) -> None:
        """Raise StreamError for another update, and notify the peers, which would wait."""
        try:
            self._update.check_equal(peer, notice)
        except StreamError as error:
            self._refuse(str(error))
            raise

    def _refuse(self, reason: str) -> None:
        """Notify all peers that this rank refuses the update."""
        refusal = json.dumps({"version": self._update.version, "reason": reason}).encode()
        for peer in self._peers:
            self._agent.send_notif(str(peer), refusal)
        self.progress(_REFUSING_S)

    def _read(self, peer: int, bucket: int, data: torch.Tensor, notice: dict[str, Any]) -> None:
        """Read a message from the memory of its sender; NIXL then notifies the sender."""
        remote = [(notice["address"], data.numel(), notice["device"])]
        kind = "DRAM" if data.device.type == "cpu" else "VRAM"
        done = json.dumps({**asdict(self._update), "bucket": bucket}).encode()
        _synchronize(data.device)  # with work on the previous content of the memory
        agent = self._agent
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(data), agent.get_xfer_descs(remote, kind), str(peer), done
        )
        deadline = time.monotonic() + self._timeout_s
        state = agent.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            state = agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise StreamError(f"reading bucket {bucket} from rank {peer} ended with {state}")
        self.received_bytes += data.numel()


@dataclass(frozen=True, slots=True)
class _Transfer:
    transport: _NixlMessages
    transfer: Transfer

    def wait(self) -> None:
        self.transport.wait(self.transfer)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
