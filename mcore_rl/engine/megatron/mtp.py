"""Multi-token prediction as an auxiliary loss of training.

DeepSeek-V3 (arXiv:2412.19437, section 2.2): prediction layer k takes the state of token i at depth
k - 1 and the embedding of token i + k, and predicts token i + k + 1 with the model's own embedding
and head. The layers are built only if the loss is enabled, and run in training passes only, so
that log-probs are those of a model without them, bit for bit.

Megatron only runs the layers: its own loss of them is wrong over context-parallel ranks in
0.19.2 (transformer/multi_token_prediction.py:838 counts the tokens of one rank, :851 those of all).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

from mcore_rl.engine.megatron.packing import MicroBatch

# What Megatron passes to the layers (models/gpt/gpt_model.py:593).
_INPUTS = (
    "input_ids", "position_ids", "attention_mask", "inference_params", "rotary_pos_emb",
    "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params", "sequence_len_offset",
)  # fmt: skip


def block_spec(config: Any, layer_spec: Any, vp_stage: int | None) -> Any:
    """Megatron's spec of the prediction layers: that of the last decoder layer of the chunk."""
    return get_gpt_mtp_block_spec(
        config, layer_spec, use_transformer_engine=True, vp_stage=vp_stage
    )


def states_with_predictions(
    model: Any, hidden_states: torch.Tensor, inputs: dict[str, Any]
) -> torch.Tensor:
    """[(1 + depths) * tokens / tp, 1, hidden]: the model's states, then those of each depth."""
    states: torch.Tensor = model.mtp(
        hidden_states=hidden_states,
        embedding=model.embedding,
        **{name: inputs.get(name) for name in _INPUTS},
    )
    return states


def prediction_loss(
    head: Any, model: Any, outputs: Sequence[torch.Tensor], micro: MicroBatch
) -> torch.Tensor:
    """The mean over depths of the weighted negative log-likelihood of tokens further ahead.

    Equations 24 and 25 of the report, but that `loss_weights` of the predicted response tokens take
    the place of the mean over all tokens: prompts are not learned, and neither micro-batches nor
    ranks change what is. The first tokens of a sequence have fewer predictions. Temperature 1.

    Args:
        outputs: of each depth, [tokens / tp, 1, hidden].
    """
    losses = []
    for output, ahead in zip(outputs, micro.ahead, strict=True):
        log_probs = head.log_probs(model, output, ahead.hidden_rows, ahead.targets)
        losses.append(-(log_probs * ahead.loss_weights).sum())
    return torch.stack(losses).mean()
