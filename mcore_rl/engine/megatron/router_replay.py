"""Router replay: the experts of each token and layer, recorded in one pass and used in another.

Two passes over the same tokens with the same weights can choose different experts if a router is
nearly tied: training and rollout use different kernels, and other packs round differently.
Log-probs of such a token then change, and its importance ratio is noise (Ma et al. 2025,
arXiv:2510.11370). Replay uses the experts of an earlier pass; their weights are computed again,
with gradients.

The column "routed_experts" of a batch has, for each sample, integers [prompt and response tokens,
MoE layers, experts per token]: rows in the order of the tokens, layers in the order of the model.
"stage_routed_experts" has the same for the MoE layers of this pipeline rank alone, and is used
instead if the batch has it. The last token of a sample is not scored, so it may have any experts; a
server, which never runs it, may repeat the row before.

A pass wraps every forward call of a chunk. Megatron's RouterReplay holds, for each router, the
targets of the running micro-batch, and a queue of targets of micro-batches whose layers will be
recomputed in the backward pass: Megatron's schedules run both the forward and the backward passes
of a chunk in the order of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.megatron.moe import (
    StrictRouterReplay,
    iter_routers,
    list_moe_layers,
    slice_sequence_parallel,
)
from mcore_rl.engine.megatron.packing import PackedKeys
from mcore_rl.engine.packing import MicroBatch

if TYPE_CHECKING:
    from mcore_rl.engine.megatron.model import PolicyModel

COLUMN, STAGE_COLUMN = "routed_experts", "stage_routed_experts"


class RoutingPass:
    """A pass in which routers choose for themselves; base of the passes that record or replay."""

    def __enter__(self) -> RoutingPass:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Check that all targets were used, unless the pass failed, and release them."""

    @contextmanager
    def wrap_forward(self, chunk: PolicyModel, micro: MicroBatch) -> Iterator[PackedKeys | None]:
        """Wrap the forward call of a chunk for a micro-batch; yield the keys of its indexers."""
        yield None

    def collect_columns(self, batch: Batch) -> dict[str, Jagged]:
        """Return the columns that the pass adds to its batch. Collective over all ranks."""
        return {}


class _ReplayStatePass(RoutingPass):
    """A pass that uses the router_replay object of each router."""

    def __init__(self, chunks: Sequence[PolicyModel]) -> None:
        self.config: TransformerConfig = chunks[0].config
        self.layers = list_moe_layers(self.config)  # of the column
        self.states = [state for chunk in chunks for state in self._list_states(chunk)]

    def _list_states(self, chunk: PolicyModel) -> list[StrictRouterReplay]:
        states = []
        for layer, router in iter_routers(chunk):
            state = router.router_replay
            state.layer = layer
            states.append(state)
        return states

    def _slice_token_indices(self, micro: MicroBatch) -> torch.Tensor:
        """Return the index among the batch's tokens of each of this rank's; -1: padding."""
        return slice_sequence_parallel(self.config, micro.token_indices, dim=0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                for state in self.states:
                    _check_target_used(state)
                    if unused := len(state.replay_backward_list):
                        raise RuntimeError(
                            f"router replay: the router of layer {state.layer} left targets of "
                            f"{unused} micro-batches unused in the backward pass"
                        )
        finally:
            for state in self.states:
                state.clear()


class RecordingPass(_ReplayStatePass):
    """A pass that records the experts that routers choose, as a column."""

    def __init__(
        self, chunks: Sequence[PolicyModel], num_tokens: int, device: torch.device
    ) -> None:
        super().__init__(chunks)
        shape = (num_tokens + 1, len(self.layers), self.config.moe_router_topk)
        # Padding writes to the last row. int32 is the smallest dtype that gloo sums.
        self.recorded = torch.zeros(shape, dtype=torch.int32, device=device)

    @contextmanager
    def wrap_forward(self, chunk: PolicyModel, micro: MicroBatch) -> Iterator[PackedKeys | None]:
        states, tokens = self._list_states(chunk), self._slice_token_indices(micro)
        for state in states:
            state.set_router_replay_action(RouterReplayAction.RECORD)
        yield None
        for state in states:
            if state.recorded_topk_idx is None:
                raise RuntimeError(f"router replay: layer {state.layer} recorded no experts")
            index = self.layers.index(state.layer)
            self.recorded[tokens, index] = state.recorded_topk_idx.int()
            state.clear()

    def collect_columns(self, batch: Batch) -> dict[str, Jagged]:
        """Return the column in the order of the batch, the same on all stages, TP and CP ranks."""
        recorded = self.recorded[:-1]
        for group in (  # each entry was recorded on one rank of all of these
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ):
            if group.size() > 1:
                dist.all_reduce(recorded, group=group)
        values = recorded.cpu().numpy().astype(choose_expert_dtype(self.config.num_moe_experts))
        offsets = np.concatenate([[0], np.cumsum(batch.num_tokens)]).astype(np.int64)
        return {COLUMN: Jagged(values, offsets)}


class ReplayPass(_ReplayStatePass):
    """A pass in which routers use the experts of the batch's column.

    Args:
        has_recompute: Routers run again in the backward pass, once per forward call.

    Raises:
        RuntimeError: The column is missing, or is not of this model and batch.
    """

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        batch: Batch,
        device: torch.device,
        *,
        has_recompute: bool,
    ) -> None:
        super().__init__(chunks)
        self.has_recompute = has_recompute
        topk = self.config.moe_router_topk
        if STAGE_COLUMN in batch:
            self.layers = [state.layer for state in self.states]
        values = validate_experts(batch, self.layers, self.config.num_moe_experts, topk)
        # The last row is for padding, which may use any experts.
        filler = np.broadcast_to(np.arange(topk, dtype=values.dtype), (1, len(self.layers), topk))
        self.experts = torch.as_tensor(np.concatenate([values, filler])).to(device)

    @contextmanager
    def wrap_forward(self, chunk: PolicyModel, micro: MicroBatch) -> Iterator[PackedKeys | None]:
        states, tokens = self._list_states(chunk), self._slice_token_indices(micro)
        for state in states:
            target = self.experts[tokens, self.layers.index(state.layer)].long()
            if self.has_recompute:
                state.set_target_indices(target)
            else:
                state.target_topk_idx = target
            state.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield None
        for state in states:
            _check_target_used(state)
            # From here on only the backward pass runs the router.
            state.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def _check_target_used(state: StrictRouterReplay) -> None:
    if state.target_topk_idx is not None:
        raise RuntimeError(
            f"router replay: the live router of layer {state.layer} did not consume its targets"
        )


def create_routing_pass(
    mode: str,
    chunks: Sequence[PolicyModel],
    batch: Batch,
    device: torch.device,
    *,
    is_scoring: bool,
    forward_only: bool,
) -> RoutingPass:
    """Create the pass of a mode of `moe.router_replay`.

    Args:
        is_scoring: The pass computes log-probs, not a loss.
    """
    config = chunks[0].config
    if mode == "off" or not config.num_moe_experts:
        return RoutingPass()
    if mode == "record" and is_scoring:
        return RecordingPass(chunks, int(batch.num_tokens.sum()), device)
    # Full recompute runs whole layers again, selective recompute routers only with "moe".
    granularity = config.recompute_granularity
    has_recompute = granularity == "full" or (
        granularity == "selective" and "moe" in config.recompute_modules
    )
    return ReplayPass(chunks, batch, device, has_recompute=has_recompute and not forward_only)


def validate_experts(
    batch: Batch, layers: Sequence[int], num_experts: int, topk: int
) -> npt.NDArray[np.integer]:
    """Return the experts of the batch's column: [tokens of the batch, MoE layers, topk].

    Args:
        layers: MoE layers of the column, in order.

    Raises:
        RuntimeError: The column is missing or invalid; the message says how.
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
    # [tokens, MoE layers]
    is_twice = (np.diff(np.sort(values, axis=-1), axis=-1) == 0).any(axis=-1)
    if is_twice.any():
        token, index = np.argwhere(is_twice)[0]
        row = int(np.searchsorted(column.offsets, token, side="right")) - 1
        raise RuntimeError(
            f"router replay: column {name!r} names an expert of a token twice: in layer "
            f"{layers[index]}, token {token - column.offsets[row]} of row {row} of the batch"
        )
    return values


def choose_expert_dtype(num_experts: int) -> npt.DTypeLike:
    """Return the smallest dtype that has all expert ids and that torch can index with."""
    return np.uint8 if num_experts <= 256 else np.int16
