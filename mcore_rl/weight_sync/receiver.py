"""The receiving end of a server: slices written into tensors, and compared with their checksums."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import torch

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError, PeerError, StateError
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.reshard import ops
from mcore_rl.reshard.executor import ReceivedSlice
from mcore_rl.weight_sync.spec import (
    Parameters,
    TransferSpec,
    build_generation_side,
    compute_expected_layout,
    read_served_config,
)
from mcore_rl.weight_sync.transport import WeightTransport, WeightUpdate, connect


class ChecksumVerifier:
    """Compares the boxes that slices were copied to with the trainer's checksums."""

    def __init__(self, generation_rank: int) -> None:
        self._rank = generation_rank
        # Slices with a checksum, and the box of the parameter that they were copied to.
        self._written: list[tuple[ReceivedSlice, torch.Tensor]] = []
        # The same slices when the boxes' checksums have been computed.
        self._checksums: list[tuple[list[ReceivedSlice], torch.Tensor]] = []

    def add(self, piece: ReceivedSlice, box: torch.Tensor) -> None:
        """Add a slice that has been copied to a box, if it has a checksum."""
        if piece.checksum is not None:
            self._written.append((piece, box))

    def compute(self) -> None:
        """Compute the checksums of all boxes added, before they are changed or freed."""
        if self._written:
            checksums = ops.compute_checksums((box, box.dtype) for _, box in self._written)
            self._checksums.append(([piece for piece, _ in self._written], checksums))
            self._written = []

    def check(self) -> None:
        """Compute the checksums that are left, and compare all of them; copies from a GPU once.

        Raises:
            ValueError: A checksum is not the trainer's.
        """
        self.compute()
        if not self._checksums:
            return
        values = torch.cat([checksums for _, checksums in self._checksums]).tolist()
        pieces = [piece for batch, _ in self._checksums for piece in batch]
        self._checksums = []
        for piece, value in zip(pieces, values, strict=True):
            if piece.checksum is not None and value != piece.checksum:
                received, expected = (f"{n % (1 << 64):016x}" for n in (value, piece.checksum))
                raise ValueError(
                    f"{piece.target}, box at {piece.offset} of {tuple(piece.data.shape)} from "
                    f"training rank {piece.source_rank}: the checksum on generation rank "
                    f"{self._rank} is {received}, and was {expected}"
                )


class TensorReceiver:
    """Receives all tensors of a checkpoint, whole (ServerFeatures.weight_format="huggingface").

    Args:
        model_path: Checkpoint that both sides started from.
    """

    def __init__(self, model_path: str, device: torch.device) -> None:
        self._model_path, self._device = model_path, device
        self._transport: WeightTransport | None = None
        self._layout: Parameters = {}
        self._rank = 0

    def connect(self, endpoint: RendezvousEndpoint, spec: TransferSpec, rank: int) -> None:
        """Connect generation rank `rank` with all ranks; may be called again.

        Raises:
            ConfigError, StreamError: as transport.connect; the trainer sends another layout.
        """
        self.close()
        if spec.weight_format != "huggingface":
            raise ConfigError(
                f"the trainer sends weights in the layout {spec.weight_format!r}; this server "
                "takes 'huggingface'"
            )
        config = read_served_config(spec, self._model_path)
        ranks, (_, weights) = build_generation_side(config, spec.generation, spec.weight_format)
        self._rank = rank
        self._layout, _ = compute_expected_layout(ranks, weights, rank, spec.dtype)
        self._transport = connect(spec, endpoint, config, spec.num_training + rank, self._device)

    def receive(self, version: int) -> dict[str, torch.Tensor]:
        """Return all tensors of a version by name.

        Raises:
            PeerError: the version did not arrive completely; the connection is closed.
            StateError: `connect` comes first.
            RuntimeError: a checksum is not the trainer's, or elements are missing.
        """
        if self._transport is None:
            raise StateError("the server is connected to no trainer")
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for name, (shape, dtype) in self._layout.items()
        }
        missing = {name: tensor.numel() for name, tensor in tensors.items()}
        verifier = ChecksumVerifier(self._rank)
        try:
            with contextlib.closing(self._transport.receive(WeightUpdate(version))) as buckets:
                for slices in buckets:
                    write_slices(slices, tensors, missing, verifier)
        except PeerError:
            self.close()  # so that peers that wait for this rank fail at once, too
            raise
        except ValueError as error:
            raise RuntimeError(f"version {version}: {error}") from error
        if short := [name for name, count in missing.items() if count]:
            raise RuntimeError(
                f"version {version}: {len(short)} tensors did not arrive completely: {short[:5]}"
            )
        return tensors

    def close(self) -> None:
        """Disconnect; safe to call twice."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


def write_slices(
    slices: Iterable[ReceivedSlice],
    tensors: dict[str, torch.Tensor],
    missing: dict[str, int],
    verifier: ChecksumVerifier,
) -> None:
    """Copy the slices of a bucket into tensors, and verify them.

    Args:
        missing: Elements of each tensor that have not arrived; updated.
    """
    for piece in slices:
        box = tensors[piece.target][piece.slices]
        if box.shape != piece.data.shape or box.dtype != piece.data.dtype:
            raise ValueError(
                f"{piece.target}: {piece.data.dtype} {tuple(piece.data.shape)} does not fit at "
                f"{piece.offset} of {box.dtype} {tuple(tensors[piece.target].shape)}"
            )
        box.copy_(piece.data)
        missing[piece.target] -= box.numel()
        verifier.add(piece, box)
    verifier.check()


def check_same_shapes(path: str | Path, reference: str | Path) -> None:
    """Check that a checkpoint has the tensors of the one that a server started from.

    Raises:
        ConfigError: a tensor is missing, has another shape, or is one too many.
    """
    expected, shapes = (CheckpointReader(p).get_shapes() for p in (reference, path))
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise ConfigError(
                f"{path}: {name} is {shapes.get(name, 'missing')}; the checkpoint that the "
                f"server started from has {expected.get(name, 'no such tensor')}"
            )
