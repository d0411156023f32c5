"""One pass over the micro-batches of a batch, through Megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.utils import unwrap_model

from mcore_rl.algorithms.inputs import WEIGHTS
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import LossFunction
from mcore_rl.engine.megatron.heads import Head
from mcore_rl.engine.megatron.mtp import prediction_loss
from mcore_rl.engine.megatron.packing import MicroBatch, PackSplit, pack, pack_sizes
from mcore_rl.engine.megatron.sequences import loss_inputs
from mcore_rl.engine.steps import reduce_logprob_gaps, sum_losses
from mcore_rl.parallel.balance import (
    SequenceCost,
    count_parts_within,
    estimate_sequence_cost,
    partition_within,
)

Result = dict[str, torch.Tensor]
# What Megatron calls on the last stage's output: (loss to differentiate, token count, result).
SCORES = "scores/"  # how the names of scores begin in a result with other numbers
LossClosure = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Result]]
# What surrounds the forward call of a chunk for a micro-batch.
Around = Callable[[Any, MicroBatch], AbstractContextManager[None]]


def micro_batches(
    batch: Batch,
    max_tokens: int,
    multiple_of: int,
    cost: SequenceCost,
    device: torch.device,
    *,
    equal_sizes: bool = False,
    num_ahead: int = 0,
) -> list[MicroBatch]:
    """This rank's micro-batches, within `max_tokens` a rank, padding included, and of like cost.

    As many on every data-parallel rank, and a multiple of `multiple_of`. A sample above the budget
    has a micro-batch of its own. With `equal_sizes` those that ranks run at the same time are
    padded to the same number of tokens. `num_ahead` is the number of depths of multi-token
    prediction.
    """
    split = PackSplit.of_this_rank()
    lengths = batch.num_tokens.tolist()
    loads, budget = [split.padded(length) for length in lengths], split.budget(max_tokens)
    num = torch.tensor(count_parts_within(loads, budget), device=device)
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(num, op=dist.ReduceOp.MAX, group=group)
    num_parts = -(-int(num) // multiple_of) * multiple_of
    costs = [cost.estimate(length) for length in lengths]
    parts = partition_within(loads, costs, budget, num_parts)
    sizes = torch.tensor(pack_sizes(batch, parts, split), device=device)
    if equal_sizes:
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=group)
    return pack(batch, parts, split, device, sizes.tolist(), num_ahead)


def model_cost(config: TransformerConfig, vocab_size: int) -> SequenceCost:
    """What a sequence costs a model of this config.

    The low-rank projections of multi-latent attention are taken as plain ones.
    """
    heads, groups = config.num_attention_heads, config.num_query_groups
    head_dim: float = config.kv_channels
    if isinstance(config, MLATransformerConfig):
        groups = heads
        head_dim = (config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim) / 2
    return estimate_sequence_cost(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        attention_size=heads * head_dim,
        key_value_size=groups * head_dim,
        ffn_size=_active_ffn_size(config),
        vocab_size=vocab_size,
    )


def _active_ffn_size(config: TransformerConfig) -> float:
    """Columns of the MLP that a token uses, on average over the layers."""
    if not config.num_moe_experts:
        return config.ffn_hidden_size
    shared = config.moe_shared_expert_intermediate_size or 0
    active = config.moe_router_topk * config.moe_ffn_hidden_size + shared
    layers, every = range(config.num_layers), config.moe_layer_freq
    is_moe = every if isinstance(every, list) else [int(i % every == 0) for i in layers]
    sizes = [active if moe else config.ffn_hidden_size for moe in is_moe]
    return sum(sizes) / len(sizes)


def run_micro_batches(
    chunks: Sequence[Any],
    micros: list[MicroBatch],
    make_loss: Callable[[Any, MicroBatch], LossClosure],
    around: Around,
    *,
    forward_only: bool,
) -> list[Result]:
    """Drive Megatron's schedule; on the last stage, results in the order of the micro-batches."""

    def forward_step(data: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, LossClosure]:
        micro, model = next(data), unwrap_model(chunk)
        is_padding = (micro.tokens < 0)[None] if model.config.num_moe_experts else None
        with around(model, micro):
            output = chunk(
                input_ids=micro.input_ids,
                position_ids=micro.position_ids,
                attention_mask=None,
                packed_seq_params=micro.packed,
                padding_mask=is_padding,
            )
        return output, make_loss(model, micro)

    results: list[Result] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micros) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micros),
        # Without a pipeline it is unused, and with one the stages exchange the shapes.
        seq_length=max(micro.input_ids.shape[1] for micro in micros),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results


def inference(head: Head) -> Callable[[Any, MicroBatch], LossClosure]:
    """The scores are the result, and there is no loss."""
    return partial(_score_closure, head)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Of all micro-batches of all data- and context-parallel ranks."""

    total: int  # of samples, without padding: what Megatron will divide gradients by
    trained: Mapping[str, int]  # response tokens with a weight, by column: what means are over


def count_tokens(micros: list[MicroBatch], device: torch.device) -> TokenCounts:
    names = [name for name in micros[0].columns if name.endswith(WEIGHTS)]
    total = torch.tensor(sum(micro.num_tokens for micro in micros), device=device)
    trained = [torch.stack([m.columns[name].count_nonzero() for m in micros]) for name in names]
    counts = torch.stack([total, *(found.sum() for found in trained)])
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(counts, group=group)
    first, *others = counts.tolist()
    return TokenCounts(first, dict(zip(names, others, strict=True)))


def training(
    head: Head,
    loss_function: LossFunction,
    counts: TokenCounts,
    mtp_loss_coef: float = 0.0,
    *,
    with_scores: bool = False,
) -> Callable[[Any, MicroBatch], LossClosure]:
    """The sum of weights * loss over the response tokens and streams; parts of means of metrics.

    With multi-token prediction, its loss times `mtp_loss_coef` on top; "loss" is without it.

    Megatron divides gradients by the number of tokens of all ranks and micro-batches, which is what
    its router losses need. Our weights already contain every mean, so the loss is multiplied by
    that number first.

    `with_scores` results also have the scores, for pop_scores, and the loss function gets the
    log-probs as the column log_probs.
    """
    return partial(_loss_closure, head, loss_function, counts, mtp_loss_coef, with_scores)


def _score_closure(head: Head, chunk: Any, micro: MicroBatch) -> LossClosure:
    def close(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
        scores = head(chunk, output, micro)
        nothing = output.new_zeros(())
        return nothing, torch.tensor(0, dtype=torch.int), scores

    return close


def _loss_closure(
    head: Head,
    loss_function: LossFunction,
    counts: TokenCounts,
    mtp_loss_coef: float,
    with_scores: bool,
    chunk: Any,
    micro: MicroBatch,
) -> LossClosure:
    def close(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
        output, *predictions = output.chunk(1 + len(micro.ahead))
        scores = head(chunk, output, micro)
        detached = {name: values.detach() for name, values in scores.items()}
        inputs = loss_inputs(scores, micro)
        if with_scores:
            old = {"log_probs": detached["log_probs"]}
            inputs = replace(inputs, columns={**inputs.columns, **old})
        total, result = sum_losses(loss_function, inputs, counts.trained)
        if predictions:
            mtp_loss = prediction_loss(head, chunk, predictions, micro)
            result["mtp_loss"] = mtp_loss.detach()
            total = total + mtp_loss_coef * mtp_loss
        if with_scores:
            result |= {f"{SCORES}{name}": detached[name] for name in ("log_probs", "entropy")}
        tokens = torch.tensor(micro.num_tokens, dtype=torch.int, device=output.device)
        return total * counts.total, tokens, result

    return close


def pop_scores(results: Sequence[Result]) -> list[Result]:
    """Take the scores out of results of training; return them by micro-batch."""
    names = [name for name in results[0] if name.startswith(SCORES)] if results else []
    return [{n.removeprefix(SCORES): result.pop(n) for n in names} for result in results]


def compute_logprob_gaps(
    micros: Sequence[MicroBatch], scores: Sequence[Result], device: torch.device
) -> dict[str, float]:
    """Return the gaps of BaseEngine.train_batch_with_scores, of all ranks; all ranks take part."""
    parts = [  # no scores but on the last stage
        (values["log_probs"], micro.columns["rollout_log_probs"], micro.columns["gap_mask"])
        for micro, values in zip(micros, scores, strict=False)
    ]
    return reduce_logprob_gaps(parts, device)


def whole_column(micro: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """[response tokens of the micro-batch, ...] from what each context-parallel rank scored."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    whole = values.new_zeros((micro.num_response_tokens, *values.shape[1:]))
    whole[micro.places] = values
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole


def in_batch_order(
    batch: Batch, micros: Sequence[MicroBatch], results: Sequence[Result], name: str
) -> Jagged:
    """A result along the response tokens, from the order of the packs back to the batch's."""
    responses = batch.jagged("response_ids")
    shape = (len(responses.values), *results[0][name].shape[1:])
    values = np.empty(shape, torch.empty(0, dtype=results[0][name].dtype).numpy().dtype)
    for micro, result in zip(micros, results, strict=True):
        flat, start = whole_column(micro, result[name]).cpu().numpy(), 0
        for row in micro.rows:
            end = start + int(responses.lengths[row])
            values[responses.offsets[row] : responses.offsets[row + 1]] = flat[start:end]
            start = end
    return responses.with_values(values)
