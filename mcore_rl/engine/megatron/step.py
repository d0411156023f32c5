"""One pass over the micro-batches of a batch, through Megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model

from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import LossFunction
from mcore_rl.engine.megatron.build import head_weight
from mcore_rl.engine.megatron.logprob import TokenScores, VocabShard, token_scores
from mcore_rl.engine.megatron.packing import MicroBatch, pack
from mcore_rl.parallel.balance import num_parts_within

Result = dict[str, torch.Tensor]
# What Megatron calls on a stage's output: (loss to differentiate, token count, result).
LossClosure = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Result]]


class Scorer:
    """Log-probs and entropy of response tokens from the model's hidden states."""

    def __init__(self, vocab_size: int, temperature: float, chunk_tokens: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def __call__(
        self, model: GPTModel, output: torch.Tensor, micro: MicroBatch, *, with_entropy: bool
    ) -> TokenScores:
        hidden = output.squeeze(0)  # [tokens / tp, hidden] under sequence parallelism
        if model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        head = head_weight(model)
        shard = VocabShard(
            start=parallel_state.get_tensor_model_parallel_rank() * head.shape[0],
            vocab_size=self.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        return token_scores(
            hidden.index_select(0, micro.hidden_rows),
            head,
            micro.targets,
            shard,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            with_entropy=with_entropy,
        )


def micro_batches(batch: Batch, max_tokens: int, device: torch.device) -> list[MicroBatch]:
    """This rank's micro-batches: as many on every data-parallel rank, each within the budget."""
    num = torch.tensor(num_parts_within(batch.num_tokens.tolist(), max_tokens), device=device)
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(num, op=dist.ReduceOp.MAX, group=group)
    multiple = parallel_state.get_tensor_model_parallel_world_size()
    return pack(batch, int(num), multiple, device)


def run_micro_batches(
    model: Any,
    micros: list[MicroBatch],
    make_loss: Callable[[MicroBatch], LossClosure],
    forward_only: bool,
) -> list[Result]:
    """Drive Megatron's schedule; results come in the order of the micro-batches."""

    def forward_step(data: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, LossClosure]:
        micro = next(data)
        output = chunk(
            input_ids=micro.input_ids,
            position_ids=micro.position_ids,
            attention_mask=None,
            packed_seq_params=micro.packed,
        )
        return output, make_loss(micro)

    results: list[Result] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micros),
        model=[model],
        num_microbatches=len(micros),
        seq_length=max(micro.input_ids.shape[1] for micro in micros),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results


def score_closure(model: Any, scorer: Scorer, micro: MicroBatch) -> LossClosure:
    """For inference: the scores are the result, and there is no loss."""

    def close(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
        scores = scorer(unwrap_model(model), output, micro, with_entropy=True)
        return scores.log_probs.sum(), torch.tensor(0, dtype=torch.int), scores._asdict()

    return close


def loss_closure(
    model: Any, scorer: Scorer, micro: MicroBatch, loss_function: LossFunction, total_tokens: int
) -> LossClosure:
    """For training: sum of loss_weights * loss over the response tokens.

    Megatron divides gradients by the number of tokens of all ranks and micro-batches, which is what
    its router losses need. Our weights already sum to one over the mini-batch, so the loss is
    multiplied by that number first.
    """

    def close(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
        scores = scorer(unwrap_model(model), output, micro, with_entropy=False)
        loss, metrics = loss_function(scores.log_probs, micro.columns)
        weights = micro.columns["loss_weights"]
        total = (loss * weights).sum()
        result = {name: (value * weights).sum().detach() for name, value in metrics.items()}
        result["loss"] = total.detach()
        tokens = torch.tensor(micro.num_tokens, dtype=torch.int, device=output.device)
        return total * total_tokens, tokens, result

    return close


def tokens_of_all_ranks(micros: list[MicroBatch], device: torch.device) -> int:
    total = torch.tensor(sum(micro.num_tokens for micro in micros), device=device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return int(total)
