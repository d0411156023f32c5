"""A WeightTransport over NIXL: a receiver reads its messages out of the sender's memory.

NIXL uses the fastest link that the machines have: InfiniBand, RoCE, shared memory or TCP, with GPU
memory too. A sender packs a message and notifies its receiver, which reads it; NIXL notifies the
sender when that is done. Version and format of the update and checksums travel in the notification.
Each rank finds at a rendezvous how to reach those that it exchanges messages with by the plan, and
connects to these alone. A rank that refuses an update tells them, and each tells those that it
exchanges with: so all learn of it that would wait. NIXL does not authenticate: use it only in a
network that can be trusted, as NCCL does.

NIXL's progress thread is off: it polls without a pause, which takes a core of each rank all the
time (nixl 1.5.1). So messages move on only while their rank is in a call of this file; over TCP
that holds for what others read from it, too.
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
from mcore_rl.reshard.buckets import peers_of
from mcore_rl.reshard.transport import Pending, Transfer, Transport
from mcore_rl.weight_sync.connection import StreamError
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import ExchangeTransport, WeightUpdate

_POLL_S = 0.0005
_REFUSING_S = 1.0  # to reach others, who may not have been spoken to yet
_REFUSAL = -1, -1  # in the place of peer and bucket
Notices = dict[tuple[int, int, int], dict[str, Any]]  # by version, peer and bucket


class NixlTransport(ExchangeTransport):
    """Its staging memory, twice the size of a bucket, is registered once and kept."""

    def __init__(
        self,
        spec: TransferSpec,
        endpoint: RendezvousEndpoint,
        model: HFConfig,
        rank: int,
        device: torch.device,
    ) -> None:
        """Returns when all ranks of its messages have published how to reach them."""
        super().__init__(spec, model, rank, device)
        api = nixl_api()
        self._timeout_s = spec.settings.timeout_s
        try:
            keys = RendezvousStore(endpoint, rank, spec.world_size, self._timeout_s)
            _stay_on_loopback(keys.own_address)
            how = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = api.nixl_agent(str(rank), how)
            self._staging = torch.empty(2 * self._half, dtype=torch.uint8, device=device)
            self._registered = self._agent.register_memory(self._staging)
            self._peers = peers_of(self._rounds)
            self._meet(keys)
            keys.close()
        except RuntimeError as error:
            raise StreamError(f"rank {rank} of the weight transport: {error}") from error
        self._used = 0  # of the staging memory, by the current version
        self._notices: Notices = {}

    def _meet(self, keys: RendezvousStore) -> None:
        keys.set(f"agent-{self._rank}", self._agent.get_agent_metadata())
        for metadata in keys.multi_get([f"agent-{peer}" for peer in self._peers]):
            self._agent.add_remote_agent(metadata)

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)
        del self._agent, self._staging

    @contextmanager
    def _messages(self, update: WeightUpdate) -> Iterator[Transport]:
        self._used = 0
        for key in [key for key in self._notices if key[0] < update.version]:
            del self._notices[key]
        messages = _NixlMessages(self._agent, self._peers, update, self._notices, self._timeout_s)
        yield messages
        messages.progress(0)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        start, self._used = self._used, self._used + num_bytes
        return self._staging[start : self._used]


def nixl_api() -> Any:
    """NIXL's Python interface. Raises ConfigError when it is not installed."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        import nixl._api
    except ImportError as error:
        raise ConfigError(
            f"weight_sync.transport='nixl': its package cannot be imported ({error}); to install "
            "it: pip install 'mcore-rl[nixl]'"
        ) from error
    return nixl._api


def _stay_on_loopback(own_address: str) -> None:
    """UCX listens on every network device; if all ranks are on one machine, only on loopback."""
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
        """`notices` are those that have come, also of the next version: a peer may be ahead."""
        self._agent, self._peers = agent, peers
        self._update, self._timeout_s = update, timeout_s
        self._notices = notices
        self.sent_bytes = self.received_bytes = 0

    def start(self, transfers: Sequence[Transfer]) -> Sequence[Pending]:
        sends = (transfer for transfer in transfers if transfer.is_send)
        for (peer, bucket), parts in itertools.groupby(sends, lambda t: (t.peer, t.bucket)):
            self._offer(peer, bucket, list(parts))
        return [_Transfer(self, transfer) for transfer in transfers]

    def _offer(self, peer: int, bucket: int, parts: Sequence[Transfer]) -> None:
        """Tell the receiver of a message where it can be read, and the checksums in it."""
        [data] = (part.data for part in parts if not part.is_checksums)
        checksums = [part.data.view(torch.int64).tolist() for part in parts if part.is_checksums]
        notice = {
            **asdict(self._update),
            "bucket": bucket,
            "address": data.data_ptr(),
            "device": max(data.get_device(), 0),
            "checksums": checksums[0] if checksums else [],
        }
        _finish_work_on(data.device)
        self._agent.send_notif(str(peer), json.dumps(notice).encode())
        self.sent_bytes += data.numel()

    def wait(self, transfer: Transfer) -> None:
        peer, bucket, data = transfer.peer, transfer.bucket, transfer.data
        if transfer.is_send and transfer.is_checksums:  # are in the notice
            return
        notice = self._notice(peer, bucket)
        if transfer.is_checksums:
            data.copy_(torch.tensor(notice["checksums"], dtype=torch.int64).view(torch.uint8))
        elif not transfer.is_send:
            self._read(peer, bucket, data, notice)

    def _notice(self, peer: int, bucket: int) -> dict[str, Any]:
        """What a peer says of a bucket: a sender that it is ready, a receiver that it was read."""
        deadline = time.monotonic() + self._timeout_s
        version = self._update.version
        key = version, peer, bucket
        while key not in self._notices:
            self._take_notices()
            if refusal := self._notices.get((version, *_REFUSAL)):
                self._refuse(refusal["reason"])
                raise StreamError(f"a rank of the transport refused: {refusal['reason']}")
            if time.monotonic() > deadline:
                others = {version for version, name, _ in self._notices if name == peer}
                at = f"; it is at version {max(others)}" if others else ""
                raise StreamError(
                    f"version {version}, bucket {bucket}: rank {peer} of the transport "
                    f"made no move for {self._timeout_s:g} s{at}"
                )
            time.sleep(_POLL_S)
        self._agree(peer, self._notices[key])
        return self._notices[key]

    def progress(self, seconds: float) -> None:
        """For so long, but once at least: what was sent last leaves."""
        deadline = time.monotonic() + seconds
        self._take_notices()
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._take_notices()

    def _take_notices(self) -> None:
        for name, texts in self._agent.get_new_notifs().items():
            for notice in map(json.loads, texts):
                about = _REFUSAL if "reason" in notice else (int(name), notice["bucket"])
                self._notices[notice["version"], *about] = notice

    def _agree(self, peer: int, notice: dict[str, Any]) -> None:
        """Raises StreamError for another update than ours; peers, who would wait, are told."""
        try:
            self._update.agree_with(peer, notice)
        except StreamError as error:
            self._refuse(str(error))
            raise

    def _refuse(self, reason: str) -> None:
        refusal = json.dumps({"version": self._update.version, "reason": reason}).encode()
        for peer in self._peers:
            self._agent.send_notif(str(peer), refusal)
        self.progress(_REFUSING_S)

    def _read(self, peer: int, bucket: int, data: torch.Tensor, notice: dict[str, Any]) -> None:
        remote = [(notice["address"], data.numel(), notice["device"])]
        kind = "DRAM" if data.device.type == "cpu" else "VRAM"
        done = json.dumps({**asdict(self._update), "bucket": bucket}).encode()
        _finish_work_on(data.device)  # on what was in the memory before
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


def _finish_work_on(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
