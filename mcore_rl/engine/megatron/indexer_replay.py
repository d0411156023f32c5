"""Index replay: the keys that sparse attention's indexers pick in one pass, used in another.

Near a tie an indexer picks other keys if its scores round differently, as in another pack. The
update then computes other log-probs than the pass that recorded the old ones, with the same
weights. Replay uses the keys of that pass for the attention and for the loss of the indexers, whose
scores are computed again.

The column "picked_keys" of a batch has, for each sample, integers [prompt and response tokens,
layers, index_topk]: positions in the sample's own sequence, from 0, in any order; -1: none.

Keys belong to the PackedSequences of a micro-batch, which every layer gets, also where it is
computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

from mcore_rl.data.batch import PICKED_KEYS, Batch, Jagged
from mcore_rl.engine.megatron.packing import PackedKeys
from mcore_rl.engine.megatron.router_replay import RoutingPass
from mcore_rl.engine.packing import MicroBatch

if TYPE_CHECKING:
    from mcore_rl.engine.megatron.model import PolicyModel

# The keys of the running pack, and the running layer from 0.
_running: ContextVar[tuple[PackedKeys, int] | None] = ContextVar("picked keys", default=None)


class ReplayedSparseAttention(DSAttention):
    """Megatron's sparse attention to the keys of its pack, if that has any."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        keys = packed_seq_params.keys
        token = _running.set(None if keys is None else (keys, self.layer_number - 1))
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            _running.reset(token)


def use_replayed_attention(layer_spec: Any) -> Any:
    """Set ReplayedSparseAttention in a chunk's layer spec (TransformerBlockSubmodules)."""
    for layer in layer_spec.layer_specs:
        attention = layer.submodules.self_attention.submodules.core_attention
        if attention.module is DSAttention:
            attention.module = ReplayedSparseAttention
    return layer_spec


def replay_picks(pick: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
    """Return Megatron's fused_qk_topk_naive with the keys of the running pack.

    It returns scores [1, tokens, tokens] and keys [1, tokens, k], positions in the pack, -1: none.
    """

    def pick_or_replay(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores, picked = pick(*args, **kwargs)
        running = _running.get()
        if running is None:
            return scores, picked
        keys, layer = running
        if keys.is_recording:
            keys.by_layer[layer] = picked
        return scores, keys.by_layer[layer]

    return pick_or_replay


class _KeyPass(RoutingPass):
    """A pass that records or replays keys inside another one, of routers."""

    def __init__(
        self,
        routing: RoutingPass,
        chunks: Sequence[PolicyModel],
        batch: Batch,
        device: torch.device,
    ) -> None:
        self.routing, self.config = routing, chunks[0].config
        self.num_tokens, self.device = int(batch.num_tokens.sum()), device

    def __enter__(self) -> RoutingPass:
        self.routing.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.routing.__exit__(kind, error, trace)


class KeyRecordingPass(_KeyPass):
    """A pass that records the keys that indexers pick, as a column."""

    def __init__(
        self,
        routing: RoutingPass,
        chunks: Sequence[PolicyModel],
        batch: Batch,
        device: torch.device,
    ) -> None:
        super().__init__(routing, chunks, batch, device)
        shape = (self.num_tokens + 1, self.config.num_layers, self.config.dsa_indexer_topk)
        # Positions plus 1: layers of other stages add 0. Padding writes to the last row.
        self.recorded = torch.zeros(shape, dtype=torch.int32, device=device)

    @contextmanager
    def wrap_forward(self, chunk: PolicyModel, micro: MicroBatch) -> Iterator[PackedKeys]:
        keys = PackedKeys(is_recording=True)
        with self.routing.wrap_forward(chunk, micro):
            yield keys
        starts = _list_token_starts(micro)
        for layer, picked in keys.by_layer.items():
            positions = torch.where(picked[0] < 0, 0, picked[0] - starts + 1).int()
            self.recorded[micro.token_indices, layer, : positions.shape[1]] = positions

    def collect_columns(self, batch: Batch) -> dict[str, Jagged]:
        """Return the column in the order of the batch, the same on all stages."""
        columns = self.routing.collect_columns(batch)
        recorded = self.recorded[:-1]
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            dist.all_reduce(recorded, group=group)
        values = (recorded - 1).cpu().numpy()
        offsets = np.concatenate([[0], np.cumsum(batch.num_tokens)]).astype(np.int64)
        return columns | {PICKED_KEYS: Jagged(values, offsets)}


class KeyReplayPass(_KeyPass):
    """A pass in which attention is to the keys of the batch's column.

    Raises:
        RuntimeError: The column is missing, or is not of this model and batch.
    """

    def __init__(
        self,
        routing: RoutingPass,
        chunks: Sequence[PolicyModel],
        batch: Batch,
        device: torch.device,
    ) -> None:
        super().__init__(routing, chunks, batch, device)
        values = validate_keys(batch, self.config.num_layers, self.config.dsa_indexer_topk)
        no_keys = np.full((1, *values.shape[1:]), -1, dtype=values.dtype)  # of padding
        self.keys = torch.as_tensor(np.concatenate([values, no_keys])).to(device)

    @contextmanager
    def wrap_forward(self, chunk: PolicyModel, micro: MicroBatch) -> Iterator[PackedKeys]:
        # [tokens, layers, k] In 4 bytes, which Megatron widens piece by piece.
        positions = self.keys[micro.token_indices].int()
        starts = _list_token_starts(micro)[:, None].int()
        picked = torch.where(positions < 0, -1, positions + starts)
        keys = PackedKeys(dict(enumerate(picked.transpose(0, 1).unsqueeze(1).contiguous())))
        with self.routing.wrap_forward(chunk, micro):
            yield keys


def _list_token_starts(micro: MicroBatch) -> torch.Tensor:
    """Return [tokens, 1] the first position in the pack of each token's sequence."""
    lengths = torch.tensor(micro.lengths, device=micro.starts.device)
    return torch.repeat_interleave(micro.starts[:-1].long(), lengths)[:, None]


def create_key_pass(
    mode: str,
    routing: RoutingPass,
    chunks: Sequence[PolicyModel],
    batch: Batch,
    device: torch.device,
    *,
    is_scoring: bool,
) -> RoutingPass:
    """Create the pass of a mode of `indexer_replay` around that of the routers.

    Args:
        is_scoring: The pass computes log-probs, not a loss.
    """
    if mode == "off":
        return routing
    kind = KeyRecordingPass if is_scoring else KeyReplayPass
    return kind(routing, chunks, batch, device)


def validate_keys(batch: Batch, num_layers: int, topk: int) -> npt.NDArray[np.integer]:
    """Return the keys of the batch's column: [tokens of the batch, layers, topk].

    Raises:
        RuntimeError: The column is missing or invalid; the message says how.
    """
    if PICKED_KEYS not in batch:
        raise RuntimeError(
            f"index replay: the batch has no column {PICKED_KEYS!r}, which "
            "indexer_replay='record' takes from infer_batch"
        )
    column = batch.jagged(PICKED_KEYS)
    values = column.values
    if not np.array_equal(column.lengths, batch.num_tokens):
        raise RuntimeError(
            f"index replay: column {PICKED_KEYS!r} does not run along prompt and response tokens"
        )
    if values.shape[1:] != (num_layers, topk) or not np.issubdtype(values.dtype, np.integer):
        raise RuntimeError(
            f"index replay: column {PICKED_KEYS!r} has {values.dtype} {values.shape[1:]} per "
            f"token; the model needs integers [layers, index_topk] = {(num_layers, topk)}"
        )
    positions = np.arange(len(values)) - np.repeat(column.offsets[:-1], column.lengths)
    is_wrong = (values < -1) | (values > positions[:, None, None])
    if is_wrong.any():
        token, layer, _ = np.argwhere(is_wrong)[0]
        raise RuntimeError(
            f"index replay: column {PICKED_KEYS!r} has keys {sorted(values[token, layer].tolist())}"
            f" of position {positions[token]} in layer {layer}; allowed: -1 to that position"
        )
    return values
