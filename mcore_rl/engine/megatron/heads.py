"""What is read off the last hidden states: scores of response tokens, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from mcore_rl.engine.megatron.logprob import VocabShard, token_scores
from mcore_rl.engine.megatron.model import PolicyModel
from mcore_rl.engine.megatron.packing import MicroBatch

Scores = dict[str, torch.Tensor]  # by name, each [response tokens of this rank]
# From (model chunk with the head, its output, micro-batch) to scores.
Head = Callable[[PolicyModel, torch.Tensor, MicroBatch], Scores]


class LanguageModelHead:
    """Log-probs, and entropy where it is asked for."""

    def __init__(
        self, vocab_size: int, temperature: float, chunk_tokens: int, *, with_entropy: bool
    ) -> None:
        self.vocab_size = vocab_size
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.with_entropy = with_entropy

    def __call__(self, model: PolicyModel, output: torch.Tensor, micro: MicroBatch) -> Scores:
        head = model.head_weight
        shard = VocabShard(
            start=parallel_state.get_tensor_model_parallel_rank() * head.shape[0],
            vocab_size=self.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        scores = token_scores(
            response_states(model.config, output, micro),
            head,
            micro.targets,
            shard,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            with_entropy=self.with_entropy,
        )
        found = {"log_probs": scores.log_probs}
        return {**found, "entropy": scores.entropy} if self.with_entropy else found


def response_states(config: Any, output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """[response tokens of this rank, hidden]: the states that score them, whole on TP ranks.

    The gradient of each TP rank is taken as a part of the whole and summed.
    """
    hidden = output.squeeze(1)  # [tokens / tp, hidden] under sequence parallelism
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    return hidden.index_select(0, micro.hidden_rows)
