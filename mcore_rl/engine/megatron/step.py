"""A forward or forward-backward pass over micro-batches, through Megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.utils import unwrap_model
from torch.profiler import record_function

from mcore_rl.engine.base import LossFunction
from mcore_rl.engine.megatron.heads import Head
from mcore_rl.engine.megatron.model import PolicyModel
from mcore_rl.engine.megatron.packing import PackedKeys, build_packed_seq_params
from mcore_rl.engine.packing import MicroBatch
from mcore_rl.engine.steps import Result, TokenCounts, compute_loss

# As Megatron's loss_func: loss to differentiate, number of tokens, result.
LossOutput = tuple[torch.Tensor, torch.Tensor, Result]
# From (model chunk with the head, micro-batch, output of the chunk).
LossFunc = Callable[[PolicyModel, MicroBatch, torch.Tensor], LossOutput]
# From (model chunk, micro-batch) to the context of the chunk's forward call, and keys to replay.
ForwardContext = Callable[[PolicyModel, MicroBatch], AbstractContextManager[PackedKeys | None]]


def get_context_group() -> dist.ProcessGroup | None:
    """Return the group of the ranks with parts of the same packs; None without CP."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return None
    group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
    return group


def get_data_group() -> dist.ProcessGroup:
    """Return the group of all ranks with other samples, or other parts of the same packs."""
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


@record_function("forward_backward")
def run_micro_batches(
    chunks: Sequence[PolicyModel | DistributedDataParallel],
    micros: list[MicroBatch],
    loss_func: LossFunc,
    forward_context: ForwardContext,
    *,
    forward_only: bool,
) -> list[Result]:
    """Run Megatron's schedule; return one result per micro-batch on the last stage, else none."""

    def forward_step(
        data: Iterator[MicroBatch],
        chunk: PolicyModel | DistributedDataParallel,
        return_schedule_plan: bool = False,
    ) -> tuple[Any, Callable[[torch.Tensor], LossOutput]]:
        micro, model = next(data), unwrap_model(chunk)
        is_padding = (micro.token_indices < 0)[None] if model.config.num_moe_experts else None
        # With moe.overlap Megatron runs the layers after this call, beside a backward pass, and
        # returns float32 (models/common/utils.py:236).
        run = model.build_schedule_plan if return_schedule_plan else chunk
        with forward_context(model, micro) as keys:
            output = run(
                input_ids=micro.input_ids,
                position_ids=micro.position_ids,
                attention_mask=None,
                packed_seq_params=build_packed_seq_params(micro, keys),
                padding_mask=is_padding,
            )
        dtype = model.config.params_dtype
        return output, lambda output: loss_func(model, micro, output.to(dtype))

    results: list[Result] = get_forward_backward_func()(
        forward_step_func=forward_step,
        # One for each chunk: the interleaved schedule runs every micro-batch through all of them.
        data_iterator=[iter(micros) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micros),
        # Unused without a pipeline; with one the stages exchange the shapes.
        seq_length=max(micro.input_ids.shape[1] for micro in micros),
        micro_batch_size=1,  # a pack is one row
        forward_only=forward_only,
    )
    return results


def pop_indexer_loss(
    config: TransformerConfig, num_tokens: int, device: torch.device
) -> torch.Tensor:
    """Return the loss of sparse attention's indexers since the last call, of this rank's tokens.

    Collective over the stages of the pipeline.

    Args:
        num_tokens: Tokens of all ranks, whose results sum to the mean over tokens and layers.
    """
    tracker: dict[str, Any] = DSAIndexerLossLoggingHelper.tracker
    loss = torch.as_tensor(tracker.pop("sum", 0.0), dtype=torch.float32, device=device).clone()
    dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
    num_layers = config.num_layers + (config.mtp_num_layers or 0)
    mean: torch.Tensor = loss / (config.dsa_indexer_loss_coeff * num_tokens * num_layers)
    return mean


def compute_scores(
    head: Head, chunk: PolicyModel, micro: MicroBatch, output: torch.Tensor
) -> LossOutput:
    """Return the scores of a micro-batch as its result, and a loss of 0."""
    scores = head(chunk, output, micro)
    return output.new_zeros(()), torch.tensor(0, dtype=torch.int), scores


def compute_training_loss(
    head: Head,
    loss_function: LossFunction,
    counts: TokenCounts,
    chunk: PolicyModel,
    micro: MicroBatch,
    output: torch.Tensor,
    *,
    mtp_loss_coef: float = 0.0,
    with_scores: bool = False,
) -> LossOutput:
    """Return the sum of weight * loss over the response tokens, and this micro-batch's metrics.

    Loss weights already contain every mean. Megatron divides gradients by the number of tokens of
    all ranks and micro-batches, because its router losses need that, so the loss is multiplied by
    this number.

    Args:
        mtp_loss_coef: Coefficient of the multi-token prediction loss, which "loss" is without.
        with_scores: Add log-probs and entropy to the result: see compute_loss.
    """
    output, *mtp_outputs = output.chunk(1 + len(micro.mtp_targets))
    scores = head(chunk, output, micro)
    total, result = compute_loss(
        scores, loss_function, counts, micro, get_context_group(), with_scores=with_scores
    )
    if mtp_outputs:
        mtp_loss = head.compute_mtp_loss(chunk, mtp_outputs, micro)  # type: ignore[attr-defined]
        result["mtp_loss"] = mtp_loss.detach()
        total = total + mtp_loss_coef * mtp_loss
    num_tokens = torch.tensor(micro.num_tokens, dtype=torch.int, device=output.device)
    return total * counts.total, num_tokens, result
