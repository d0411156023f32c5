"""Router replay: the experts of each token and layer, recorded in one pass and used in another.

Two passes over the same tokens with the same weights can choose different experts where a router is
nearly tied: training and rollout use different kernels, and other packs round differently.
Log-probs of such a token then change, and its importance ratio is noise (Ma et al. 2025,
arXiv:2510.11370). Replay takes the experts of an earlier pass; their weights are computed again,
with gradients.

The column "routed_experts" of a batch has, for each sample, integers [prompt and response tokens,
MoE layers, experts a token]: rows in the order of the tokens, layers in the order of the model.
"stage_routed_experts" has the same for the MoE layers of this pipeline rank alone, and goes first.
The last token of a sample is not scored, so any experts are allowed there; a server, which never
runs it, may repeat the row before.

A pass wraps every forward call of a chunk. Megatron's RouterReplay keeps, for each router, the
targets of the micro-batch that runs, and those of micro-batches whose layers will be computed again
in the backward pass, first in first out: Megatron's schedules run both the forward and the backward
passes of a chunk in the order of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.megatron.moe import ReplaySlot, moe_layers, routers, sequence_share
from mcore_rl.engine.megatron.packing import MicroBatch

COLUMN, STAGE_COLUMN = "routed_experts", "stage_routed_experts"


class NoReplay:
    """A pass in which routers choose. Also what the other passes have in common."""

    def __enter__(self) -> NoReplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Checks that all was used, unless the pass failed, and lets go of everything."""

    @contextmanager
    def around(self, chunk: Any, micro: MicroBatch) -> Iterator[None]:
        """Around the forward call of a chunk for a micro-batch."""
        yield

    def columns(self, batch: Batch) -> dict[str, Jagged]:
        """What the pass adds to its batch; all ranks take part."""
        return {}


class _SlotPass(NoReplay):
    def __init__(self, chunks: Sequence[Any]) -> None:
        self.config: TransformerConfig = chunks[0].config
        self.place = _places(moe_layers(self.config))
        self.slots = [slot for chunk in chunks for slot in self._slots_of(chunk)]

    def _slots_of(self, chunk: Any) -> list[ReplaySlot]:
        slots = []
        for layer, router in routers(chunk):
            slot = router.router_replay
            slot.layer = layer
            slots.append(slot)
        return slots

    def _own_tokens(self, micro: MicroBatch) -> torch.Tensor:
        """Index into the batch's tokens for each that the routers of this rank see; -1: padding."""
        return sequence_share(self.config, micro.tokens, dim=0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                for slot in self.slots:
                    _check_nothing_left(slot)
        finally:
            for slot in self.slots:
                slot.clear()


class Recording(_SlotPass):
    """Routers choose, and what they chose becomes the column."""

    def __init__(self, chunks: Sequence[Any], num_tokens: int, device: torch.device) -> None:
        super().__init__(chunks)
        shape = (num_tokens + 1, len(self.place), self.config.moe_router_topk)
        # Padding writes to the last row. int32 is the smallest that gloo sums.
        self.recorded = torch.zeros(shape, dtype=torch.int32, device=device)

    @contextmanager
    def around(self, chunk: Any, micro: MicroBatch) -> Iterator[None]:
        slots, tokens = self._slots_of(chunk), self._own_tokens(micro)
        for slot in slots:
            slot.set_router_replay_action(RouterReplayAction.RECORD)
        yield
        for slot in slots:
            if slot.recorded_topk_idx is None:
                raise RuntimeError(f"router replay: layer {slot.layer} recorded no experts")
            self.recorded[tokens, self.place[slot.layer]] = slot.recorded_topk_idx.int()
            slot.clear()

    def columns(self, batch: Batch) -> dict[str, Jagged]:
        """The column, in the order of the batch, the same on all stages and TP and CP ranks."""
        recorded = self.recorded[:-1]
        for group in (  # each entry was recorded on one rank of all of these
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ):
            if group.size() > 1:
                dist.all_reduce(recorded, group=group)
        values = recorded.cpu().numpy().astype(expert_dtype(self.config.num_moe_experts))
        return {COLUMN: Jagged(values, _offsets(batch))}


class Replay(_SlotPass):
    """Routers take the experts of the column.

    `recomputes` says whether routers run again in the backward pass, once for each forward call.
    Raises RuntimeError for a column that is missing or is not one of this model and batch.
    """

    def __init__(
        self, chunks: Sequence[Any], batch: Batch, device: torch.device, *, recomputes: bool
    ) -> None:
        super().__init__(chunks)
        self.recomputes = recomputes
        topk = self.config.moe_router_topk
        layers = list(self.place)
        if STAGE_COLUMN in batch:
            layers = [slot.layer for slot in self.slots]
            self.place = _places(layers)
        values = checked_column(batch, layers, self.config.num_moe_experts, topk)
        # The last row is for padding, which may go anywhere.
        filler = np.broadcast_to(np.arange(topk, dtype=values.dtype), (1, len(self.place), topk))
        self.experts = torch.as_tensor(np.concatenate([values, filler])).to(device)

    @contextmanager
    def around(self, chunk: Any, micro: MicroBatch) -> Iterator[None]:
        slots, tokens = self._slots_of(chunk), self._own_tokens(micro)
        for slot in slots:
            target = self.experts[tokens, self.place[slot.layer]].long()
            if self.recomputes:
                slot.set_target_indices(target)
            else:
                slot.target_topk_idx = target
            slot.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        for slot in slots:
            _check_target_used(slot)
            # What runs the router from here on is the backward pass.
            slot.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def routing_of(
    mode: str,
    chunks: Sequence[Any],
    batch: Batch,
    device: torch.device,
    *,
    scoring: bool,
    forward_only: bool,
) -> NoReplay:
    """The pass that `moe.router_replay` asks for; `scoring`: it gives log-probs, not a loss."""
    config = chunks[0].config
    if mode == "off" or not config.num_moe_experts:
        return NoReplay()
    if mode == "record" and scoring:
        return Recording(chunks, int(batch.num_tokens.sum()), device)
    recomputes = not forward_only and _recomputes_routers(config)
    return Replay(chunks, batch, device, recomputes=recomputes)


def checked_column(
    batch: Batch, layers: Sequence[int], num_experts: int, topk: int
) -> npt.NDArray[np.integer]:
    """[tokens of the batch, MoE layers, experts a token] of the column, which is of `layers`.

    Raises RuntimeError naming the column and what is wrong with it.
    """
    name = STAGE_COLUMN if STAGE_COLUMN in batch else COLUMN
    if name not in batch:
        raise RuntimeError(
            f"router replay: the batch has no column {COLUMN!r}, which moe.router_replay='record' "
            f"takes from infer_batch, and no {STAGE_COLUMN!r} of what servers have recorded, which "
            "'rollout' takes"
        )
    column = batch.jagged(name)
    values = column.values
    if not np.array_equal(column.lengths, batch.num_tokens):
        raise RuntimeError(
            f"router replay: column {name!r} does not run along prompt and response tokens"
        )
    if len(values) == 0:
        return np.empty((0, len(layers), topk), dtype=np.int16)
    if values.shape[1:] != (len(layers), topk) or not np.issubdtype(values.dtype, np.integer):
        raise RuntimeError(
            f"router replay: column {name!r} has {values.dtype} {values.shape[1:]} per token; "
            f"the model needs integers [MoE layers, experts per token] = {(len(layers), topk)}"
        )
    if values.size and (values.min() < 0 or values.max() >= num_experts):
        raise RuntimeError(
            f"router replay: column {name!r} has experts {values.min()} to {values.max()}; "
            f"allowed: 0 to {num_experts - 1}"
        )
    twice = (np.diff(np.sort(values, axis=-1), axis=-1) == 0).any(axis=-1)  # [tokens, MoE layers]
    if twice.any():
        token, place = np.argwhere(twice)[0]
        row = int(np.searchsorted(column.offsets, token, side="right")) - 1
        raise RuntimeError(
            f"router replay: column {name!r} names an expert of a token twice: in layer "
            f"{layers[place]}, token {token - column.offsets[row]} of row {row} of the batch"
        )
    return values


def expert_dtype(num_experts: int) -> npt.DTypeLike:
    """The smallest that torch indexes with and that has all ids."""
    return np.uint8 if num_experts <= 256 else np.int16


def _places(layers: Sequence[int]) -> dict[int, int]:
    return {layer: index for index, layer in enumerate(layers)}


def _offsets(batch: Batch) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(batch.num_tokens)]).astype(np.int64)


def _recomputes_routers(config: TransformerConfig) -> bool:
    """Full recompute runs whole layers again; selective recompute routers only with "moe"."""
    if config.recompute_granularity == "selective":
        return "moe" in config.recompute_modules
    return config.recompute_granularity == "full"


def _check_target_used(slot: ReplaySlot) -> None:
    if slot.target_topk_idx is not None:
        raise RuntimeError(
            f"router replay: the live router of layer {slot.layer} did not consume its targets"
        )


def _check_nothing_left(slot: ReplaySlot) -> None:
    _check_target_used(slot)
    unused = len(slot.replay_backward_list)
    if unused:
        raise RuntimeError(
            f"router replay: the router of layer {slot.layer} left targets of {unused} "
            "micro-batches unused in the backward pass"
        )
