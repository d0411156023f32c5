"""Conformance of a weight transport: `check_transport` runs one between processes of its own.

    from mcore_rl.testing import check_transport

    if __name__ == "__main__":
        check_transport("path/to/file.py:MyTransport")

Trainers of one and two ranks send versions of a small model of uneven shapes to servers of two and
one workers, over one machine. No model and no server is started.
"""

from __future__ import annotations

import functools
import multiprocessing
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed

from mcore_rl.config.errors import ConfigError, PeerError
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer
from mcore_rl.parallel.store import RendezvousStore
from mcore_rl.reshard import ops
from mcore_rl.reshard.executor import (
    LocalWeights,
    MessageTransport,
    Pending,
    ReceivedSlice,
    Transfer,
)
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.reshard.rules import Block
from mcore_rl.testing.trainer_rank import fill_parameters
from mcore_rl.weight_sync.spec import (
    TransferSpec,
    WeightFormat,
    build_generation_side,
    build_training_side,
    is_checked,
)
from mcore_rl.weight_sync.transport import (
    ExchangeTransport,
    WeightTransport,
    WeightUpdate,
    connect,
)
from mcore_rl.weight_sync.transport import (
    check_transport as check_transport_name,
)

SHARED_MEMORY = "shared_memory"  # the transport of weight_sync.method=colocated
NUM_RANKS = 3
# Two layers, one of them dense; a vocabulary that no number of ranks divides.
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 131,
    "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    "num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "norm_topk_prob": True,
    "mlp_only_layers": [0], "rms_norm_eps": 1e-6, "rope_theta": 1e4, "attention_bias": False,
    "tie_word_embeddings": False, "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip


@dataclass(frozen=True)
class Order:
    """The task of every rank of a run."""

    endpoint: dict[str, Any]  # fields of a RendezvousEndpoint
    spec: dict[str, Any]  # TransferSpec.to_dict
    versions: tuple[int, ...] = (1,)
    flips: bool = False  # a bit of a message, on its way to each generation rank
    silent_rank: int | None = None  # it connects, and then makes no move
    other_version: int | None = None  # what training ranks send in place of the version


@dataclass(frozen=True)
class Outcome:
    """The end of a rank: an error, or the number of slices that its checksums have refused."""

    error: str = ""
    is_peer_error: bool = False
    num_refused: int = 0


def check_transport(
    transport: str,
    *,
    timeout_s: float = 4.0,
    start_s: float = 120.0,
    only: Collection[str] = (),
) -> list[str]:
    """Put a weight transport through the contract of `WeightTransport`.

    Args:
        transport: A value of weight_sync.transport, such as an import path; "shared_memory" is that
            of weight_sync.method=colocated, whose servers have at most as many workers as the
            trainer has ranks.
        timeout_s: Limit of its waits where a peer is absent (weight_sync.timeout_s).
        start_s: Limit of the start of processes, which import torch.
        only: Names of checks to run; all without it.

    Returns:
        Names of the checks that were run.

    Raises:
        AssertionError: The transport breaks a rule; a sentence says what is wrong.
        ConfigError: There is no such transport, or `only` names no check.
    """
    if transport != SHARED_MEMORY:
        check_transport_name(transport)
    if unknown := sorted({*only} - CHECKS.keys()):
        raise ConfigError(f"only={unknown}; allowed: {', '.join(CHECKS)}")
    names = [name for name in CHECKS if name in (only or CHECKS)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_RANKS, context) as processes:
        checks = TransportChecks(transport, timeout_s, processes, start_s)
        try:
            for name in names:
                CHECKS[name](checks)
        except BaseException:
            for process in [*processes._processes.values()]:  # one may wait for ever
                process.kill()
            raise
    return names


@dataclass
class TransportChecks:
    """Runs a transport between processes, a rank in each."""

    transport: str
    timeout_s: float
    processes: ProcessPoolExecutor
    start_s: float = 120.0

    def run(
        self,
        training: Layout,
        generation: GenerationLayout,
        *,
        weight_format: WeightFormat = "vllm",
        verify: str = "full",
        limit_s: float = 60.0,
        absent_rank: int | None = None,
        **order: Any,
    ) -> dict[int, Outcome]:
        """Return the outcome of each rank.

        Args:
            limit_s: Limit of the transport's waits.
            absent_rank: A rank that does not connect.
        """
        settings = WeightSyncConfig(
            method="colocated" if self.transport == SHARED_MEMORY else "disaggregated",
            transport=self.transport,
            verify=verify,
            bucket_bytes=8 << 10,  # some dozen buckets
            timeout_s=limit_s,
        )
        spec = TransferSpec(
            training, 0, generation, "float32", settings, weight_format=weight_format
        )
        with RendezvousServer("127.0.0.1") as rendezvous:
            endpoint = asdict(rendezvous.endpoint)
            futures = {
                self.processes.submit(
                    run_rank, Order(endpoint, spec.to_dict(), **order), rank
                ): rank
                for rank in range(spec.world_size)
                if rank != absent_rank
            }
            limit_s += self.start_s + limit_s
            done, waiting = wait(futures, limit_s)
        assert not waiting, (
            f"rank {', '.join(str(futures[f]) for f in waiting)} still waits {limit_s:g} s after "
            f"the start; weight_sync.timeout_s is {settings.timeout_s:g}"
        )
        return {futures[future]: future.result() for future in done}

    def run_whole(self, *layouts: Any, **options: Any) -> None:
        """Run versions that arrive; raise AssertionError for an error of a rank."""
        check_success(self.run(*layouts, **options))


def check_layouts(checks: TransportChecks) -> None:
    """Check that versions arrive bit for bit, each element once, with their checksums."""
    checks.run_whole(Layout(tp=2), GenerationLayout(), versions=(1, 2, 3))
    checks.run_whole(Layout(tp=2), GenerationLayout(), weight_format="huggingface", verify="off")
    if checks.transport != SHARED_MEMORY:
        checks.run_whole(Layout(), GenerationLayout(tp=2), versions=(1, 2))


def check_verification(checks: TransportChecks) -> None:
    """Check that a bit that flips on the way is found by a checksum of its training rank."""
    outcomes = checks.run(Layout(tp=2), GenerationLayout(), flips=True)
    check_success(outcomes)
    assert outcomes[2].num_refused in (1, -1), (
        "verify='full': a bit that flips in a message is not found: checksums are those of the "
        "values that arrive; the contract says those of the values on the training rank"
    )


def check_versions(checks: TransportChecks) -> None:
    """Check that ranks at different updates end with an error."""
    outcomes = checks.run(
        Layout(tp=2), GenerationLayout(), versions=(4,), other_version=5, limit_s=checks.timeout_s
    )
    _check_failures({2: outcomes[2]}, "its trainer sends another version")


def check_absent_rank(checks: TransportChecks) -> None:
    """Check that ranks name one that does not connect, within the limit of their waits."""
    outcomes = checks.run(Layout(tp=2), GenerationLayout(), absent_rank=2, limit_s=checks.timeout_s)
    _check_failures(outcomes, "rank 2 does not connect", name="2")


def check_silent_rank(checks: TransportChecks) -> None:
    """Check that ranks do not wait for ever for one that makes no move in an update."""
    outcomes = checks.run(Layout(tp=2), GenerationLayout(), silent_rank=0, limit_s=checks.timeout_s)
    _check_failures({2: outcomes[2]}, "rank 0 makes no move")


CHECKS: dict[str, Callable[[TransportChecks], None]] = {
    "layouts": check_layouts,
    "verification": check_verification,
    "versions": check_versions,
    "absent_rank": check_absent_rank,
    "silent_rank": check_silent_rank,
}


def check_success(outcomes: dict[int, Outcome]) -> None:
    """Raise AssertionError for the error of a rank, the cause before those that blame a peer."""
    for rank, outcome in sorted(outcomes.items(), key=lambda item: item[1].is_peer_error):
        assert not outcome.error, f"rank {rank}: {outcome.error}"


def _check_failures(outcomes: dict[int, Outcome], what: str, name: str = "") -> None:
    """Check that ranks raise a PeerError, which names a rank."""
    for rank, outcome in outcomes.items():
        assert outcome.error, f"rank {rank} goes on though {what}; the contract says StreamError"
        assert outcome.is_peer_error, (
            f"rank {rank} raises {outcome.error} as {what}; the contract says StreamError"
        )
        assert re.search(rf"(?<![\d.]){name}(?![\d.]\d)", outcome.error), (
            f"rank {rank} does not name rank {name} as {what}: {outcome.error}"
        )


# On the ranks.


def run_rank(order: Order, rank: int) -> Outcome:
    """Connect a rank, and send or receive all versions of an order."""
    torch.set_num_threads(1)
    spec, endpoint = TransferSpec.parse(order.spec), RendezvousEndpoint(**order.endpoint)
    transport = None
    try:
        if spec.settings.method == "colocated" and rank < spec.num_training:
            _join_trainers(spec, endpoint, rank)
        transport = connect(spec, endpoint, dict(MODEL), rank, torch.device("cpu"))
        if rank == order.silent_rank:
            time.sleep(2 * spec.settings.timeout_s)
            return Outcome()
        if rank < spec.num_training:
            _send_versions(order, spec, transport, rank)
            return Outcome()
        return _receive_versions(order, spec, transport, rank)
    except Exception as error:  # noqa: BLE001 (the suite judges it)
        text = f"{type(error).__name__}: {error}"
        return Outcome(text, is_peer_error=isinstance(error, PeerError))
    finally:
        if transport is not None:
            transport.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _join_trainers(spec: TransferSpec, endpoint: RendezvousEndpoint, rank: int) -> None:
    """Create the default group of the training ranks, which shared memory needs."""
    store = RendezvousStore(endpoint, rank, spec.world_size, spec.settings.timeout_s)
    options: dict[str, Any] = {"rank": rank, "world_size": spec.num_training, "store": store}
    torch.distributed.init_process_group("gloo", **options)


def read_block(block: Block, version: int) -> torch.Tensor:
    """Return a box of a tensor of the model, whose values differ by version."""
    seed = zlib.crc32(f"{block.tensor.name} {version}".encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(block.tensor.shape, generator=generator)[block.box.slices]


def _send_versions(order: Order, spec: TransferSpec, transport: WeightTransport, rank: int) -> None:
    side = build_training_side(MODEL, spec.training, 0)
    for version in order.versions:
        parameters = fill_parameters(side, rank, functools.partial(read_block, version=version))
        update = WeightUpdate(order.other_version or version)
        transport.send(LocalWeights(parameters), update)


def _receive_versions(
    order: Order, spec: TransferSpec, transport: WeightTransport, rank: int
) -> Outcome:
    """Receive all versions, also after a fault, since training ranks would wait."""
    _, side = build_generation_side(MODEL, spec.generation, spec.weight_format)
    generation_rank, faults, num_refused = rank - spec.num_training, list[str](), 0
    if order.flips and not isinstance(transport, ExchangeTransport):
        num_refused = -1  # there are no messages in which a bit could be flipped
    elif order.flips:
        _flip_bit(transport)
    for version in order.versions:
        expected = fill_parameters(
            side, generation_rank, functools.partial(read_block, version=version)
        )
        arrived = {name: torch.zeros_like(t, dtype=torch.int32) for name, t in expected.items()}
        for slices in transport.receive(WeightUpdate(version)):
            for piece in slices:
                if piece.target not in expected:
                    faults.append(f"{piece.target} is no parameter of this rank")
                    continue
                arrived[piece.target][piece.slices] += 1
                values = expected[piece.target][piece.slices]
                if order.flips:
                    num_refused += piece.checksum != _compute_checksum(piece.data)
                elif fault := find_fault(
                    piece, values, is_checked(spec.settings.verify, piece.target, version)
                ):
                    faults.append(f"version {version}, {piece.target} at {piece.offset}: {fault}")
        for name, counts in arrived.items():
            if num_wrong := int(((counts != 1) & ~expected[name].isnan()).sum()):
                faults.append(
                    f"version {version}: {num_wrong} elements of {name} did not arrive, or more "
                    "than once; the contract says each once"
                )
    return Outcome(faults[0] if faults else "", num_refused=num_refused)


def find_fault(piece: ReceivedSlice, values: torch.Tensor, is_verified: bool) -> str:
    """Return what is wrong with a slice of these values; "" for nothing."""
    if not torch.equal(piece.data, values):
        return "other values arrive than were sent"
    if is_verified and piece.checksum is None:
        return "the parameter is verified, and the slice has no checksum"
    if piece.checksum not in (None, sent := _compute_checksum(values)):
        return f"the checksum is {piece.checksum}, that of the values sent is {sent}"
    return ""


def _compute_checksum(values: torch.Tensor) -> int:
    [checksum] = ops.compute_checksums([(values.contiguous(), values.dtype)]).tolist()
    return int(checksum)


def _flip_bit(transport: Any) -> None:
    """Make the first message that a rank receives arrive with another bit."""
    open_messages = transport._open_messages

    @contextmanager
    def open_flipped(update: WeightUpdate) -> Iterator[MessageTransport]:
        with open_messages(update) as messages:
            yield _FlippedMessages(messages)

    transport._open_messages = open_flipped


class _FlippedMessages:
    """Messages of an update, the first of which arrives with another bit."""

    def __init__(self, messages: Any) -> None:
        self._messages, self._has_flipped = messages, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._messages, name)

    def start(self, transfers: Sequence[Transfer]) -> Sequence[Pending]:
        pending = [*self._messages.start(transfers)]
        for index, transfer in enumerate(transfers):
            is_values = not transfer.is_send and not transfer.is_checksums
            if is_values and transfer.data.numel() and not self._has_flipped:
                self._has_flipped = True
                pending[index] = _FlippedTransfer(pending[index], transfer)
        return pending


@dataclass(frozen=True)
class _FlippedTransfer:
    pending: Any
    transfer: Transfer

    def wait(self) -> None:
        self.pending.wait()
        self.transfer.data[0] ^= 1
