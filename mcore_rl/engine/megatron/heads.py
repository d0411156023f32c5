"""Output heads: scores of response tokens from the last hidden states, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

from mcore_rl.engine.logprob import VocabShard, compute_log_probs
from mcore_rl.engine.megatron.model import PolicyModel
from mcore_rl.engine.packing import MicroBatch
from mcore_rl.engine.steps import Scores, ScoreSettings, score_tokens

# From (model chunk with the head, its output, micro-batch) to scores.
Head = Callable[[Any, torch.Tensor, MicroBatch], Scores]


@dataclass(frozen=True, slots=True)
class LanguageModelHead:
    """The output projection, with the scores of these settings."""

    vocab_size: int
    settings: ScoreSettings

    def __call__(self, model: PolicyModel, output: torch.Tensor, micro: MicroBatch) -> Scores:
        head = model.head_weight
        hidden = select_hidden_states(model.config, output, micro.hidden_rows)
        return score_tokens(hidden, head, micro, self._get_shard(head), self.settings)

    def compute_mtp_loss(
        self, model: PolicyModel, outputs: Sequence[torch.Tensor], micro: MicroBatch
    ) -> torch.Tensor:
        """Return the multi-token prediction loss: the mean over depths, at temperature 1.

        Equations 24 and 25 of DeepSeek-V3 (arXiv:2412.19437), with loss_weights of the predicted
        response tokens instead of the mean over all tokens: prompts are not trained on, and the
        loss does not depend on micro-batches or ranks. The first tokens of a sequence have fewer
        predictions. Megatron's own loss is wrong with context parallelism in 0.19.2
        (transformer/multi_token_prediction.py:838 counts the tokens of one rank, :851 those of
        all).

        Args:
            outputs: Hidden states of each depth, [tokens / tp, 1, hidden].
        """
        head = model.head_weight
        losses = []
        for output, mtp in zip(outputs, micro.mtp_targets, strict=True):
            states = select_hidden_states(model.config, output, mtp.hidden_rows)
            shard, chunk_bytes = self._get_shard(head), self.settings.chunk_bytes
            scores = compute_log_probs(states, head, mtp.targets, shard, chunk_bytes=chunk_bytes)
            losses.append(-(scores.log_probs * mtp.loss_weights).sum())
        return torch.stack(losses).mean()

    def _get_shard(self, head: torch.Tensor) -> VocabShard:
        return VocabShard(
            start=parallel_state.get_tensor_model_parallel_rank() * head.shape[0],
            vocab_size=self.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
        )


class ValueHead(torch.nn.Linear):
    """A linear from [tokens, hidden] to one value per token, computed in float32 for any dtype.

    With sequence parallelism it runs on the tokens of this rank only. The attribute on its
    parameters makes Megatron sum their gradients over TP ranks
    (distributed/finalize_model_grads.py).
    """

    def __init__(self, config: TransformerConfig, *, has_bias: bool) -> None:
        super().__init__(config.hidden_size, 1, bias=has_bias, dtype=config.params_dtype)
        for parameter in self.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias).squeeze(-1)


class ValueModel(PolicyModel):
    """A GPTModel whose `output_layer` is a value head: one value per token instead of logits."""

    def __init__(self, *args: Any, has_bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:  # replaces GPTModel's output projection
            self.output_layer = ValueHead(self.config, has_bias=has_bias)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        for name, tensor in state.items():
            if "output_layer." in name:
                # GPTModel allows another shape in the checkpoint, because of vocabulary padding.
                tensor.allow_shape_mismatch = False
        return state


def compute_value_scores(model: ValueModel, output: torch.Tensor, micro: MicroBatch) -> Scores:
    """Return the value of each response token, from the state that the token is sampled from.

    Every TP rank has all values and computes the same loss, so the gradient of its own tokens'
    values is complete, and is neither summed nor averaged over TP.
    """
    values = model.output_layer(output.squeeze(1))
    if model.config.sequence_parallel:
        values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
    return {"values": values.index_select(0, micro.hidden_rows)}


def select_hidden_states(config: Any, output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return [rows, hidden] of this CP rank's hidden states, gathered over its TP ranks.

    The gradients of the TP ranks are summed: each has the part of its vocabulary shard.
    """
    hidden = output.squeeze(1)  # [tokens / tp, hidden] under sequence parallelism
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    return hidden.index_select(0, rows)
