"""Heads on the last hidden states: scores of response tokens, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

from mcore_rl.engine.megatron.logprob import VocabShard, token_scores
from mcore_rl.engine.megatron.model import PolicyModel
from mcore_rl.engine.megatron.packing import MicroBatch

Scores = dict[str, torch.Tensor]  # by name, each [response tokens of this rank, ...]
# From (model chunk with the head, its output, micro-batch) to scores.
Head = Callable[[Any, torch.Tensor, MicroBatch], Scores]


@dataclass(frozen=True, slots=True)
class LanguageModelHead:
    """Log-probs; where asked for the entropy, sum_pi_squared, the largest log-probs and their ids.

    With the column teacher_ids also chosen_log_probs [tokens, ids], those of these ids.
    """

    vocab_size: int
    temperature: float
    chunk_bytes: int  # logits and probabilities in memory at a time
    with_entropy: bool
    with_squares: bool = False
    num_top: int = 0

    def __call__(self, model: PolicyModel, output: torch.Tensor, micro: MicroBatch) -> Scores:
        head, targets = model.head_weight, micro.targets
        if others := "teacher_ids" in micro.columns:
            ids = micro.columns["teacher_ids"].flatten(1)
            targets = torch.cat([targets[:, None], ids], 1)
        scores = token_scores(
            states_at(model.config, output, micro.hidden_rows),
            head,
            targets,
            self._shard(head),
            temperature=self.temperature,
            chunk_bytes=self.chunk_bytes,
            with_entropy=self.with_entropy,
            with_squares=self.with_squares,
            num_top=self.num_top,
        )
        found = {"log_probs": scores.log_probs}
        if others:
            found = {
                "log_probs": scores.log_probs[:, 0],
                "chosen_log_probs": scores.log_probs[:, 1:],
            }
        if self.with_entropy:
            found["entropy"] = scores.entropy
        if self.with_squares:
            found["sum_pi_squared"] = scores.sum_pi_squared
        if self.num_top:
            found |= {"top_log_probs": scores.top_log_probs, "top_ids": scores.top_ids}
        return found

    def log_probs(
        self, model: PolicyModel, output: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """[targets] log-probs at temperature 1 from the states at `rows`."""
        head = model.head_weight
        states, shard = states_at(model.config, output, rows), self._shard(head)
        return token_scores(states, head, targets, shard, chunk_bytes=self.chunk_bytes).log_probs

    def _shard(self, head: torch.Tensor) -> VocabShard:
        return VocabShard(
            start=parallel_state.get_tensor_model_parallel_rank() * head.shape[0],
            vocab_size=self.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
        )


class ValueHead(torch.nn.Linear):
    """[tokens, hidden] to one float32 a token: the sum is in float32 whatever the dtype.

    Under sequence parallelism it runs on the tokens of this rank only. The marks on its parameters
    have Megatron sum their gradients over TP ranks (distributed/finalize_model_grads.py).
    """

    def __init__(self, config: TransformerConfig, *, has_bias: bool) -> None:
        super().__init__(config.hidden_size, 1, bias=has_bias, dtype=config.params_dtype)
        for parameter in self.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias).squeeze(-1)


class ValueModel(PolicyModel):
    """A GPTModel whose `output_layer` is a value head: one number a token instead of logits."""

    def __init__(self, *args: Any, has_bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:  # in place of GPTModel's output projection
            self.output_layer = ValueHead(self.config, has_bias=has_bias)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        for name, tensor in state.items():
            if "output_layer." in name:
                # GPTModel lets it differ from the checkpoint's shape, for the vocabulary's padding.
                tensor.allow_shape_mismatch = False
        return state


def value_scores(model: ValueModel, output: torch.Tensor, micro: MicroBatch) -> Scores:
    """The value of the state before each response token, which is also what the token is drawn
    from.

    Every TP rank has all values and computes the same loss, so the gradient of its own tokens'
    values is whole, and is neither summed nor averaged over TP.
    """
    values = model.output_layer(output.squeeze(1))
    if model.config.sequence_parallel:
        values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
    return {"values": values.index_select(0, micro.hidden_rows)}


def states_at(config: Any, output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[rows, hidden] of the hidden states of this CP rank, whole on its TP ranks.

    The gradient of each TP rank is taken as a part of the whole and summed.
    """
    hidden = output.squeeze(1)  # [tokens / tp, hidden] under sequence parallelism
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    return hidden.index_select(0, rows)
