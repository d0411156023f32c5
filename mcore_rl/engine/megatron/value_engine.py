"""The value model's engine: the Megatron engine with a scalar head in place of the vocabulary."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.models.base import CLASSIFICATION, SEQUENCE, HFConfig, read_config
from mcore_rl.models.heads import (
    build_value_config,
    has_value_bias,
    has_value_head,
    map_value_head_weights,
    map_value_weights,
)
from mcore_rl.reshard.rules import Weight, list_logical_tensors


class ValueEngine(MegatronEngine):
    """`infer_batch` adds "values", and loss functions read inputs.values.

    model.path is a token classification checkpoint with one label, or that of a language model: its
    head is then left out, and the value head begins at zero, so that all values do (as in OpenAI's
    lm-human-preferences, by Huang et al. 2023, "The N Implementation Details of RLHF with PPO").
    An export is a token classification checkpoint. What starts from a reward model stays one.
    """

    _kind = CLASSIFICATION

    @property
    def config_changes(self) -> HFConfig:
        before = read_config(self.spec.model.path)
        return {
            k: v for k, v in build_value_config(before, self._kind).items() if before.get(k) != v
        }

    def _model_config(self) -> HFConfig:
        return build_value_config(read_config(self.spec.model.path), self._kind)

    def _model_class(self) -> Any:
        from mcore_rl.engine.megatron.heads import ValueModel

        return partial(ValueModel, has_bias=has_value_bias(self.hf_config))

    def _weight_rules(self, padded_vocab: int) -> tuple[Weight, ...]:
        return map_value_weights(self.hf_config, padded_vocab)

    def _zeros(self) -> Collection[str]:
        if has_value_head(read_config(self.spec.model.path)):
            return ()
        return [
            tensor.name for tensor in list_logical_tensors(map_value_head_weights(self.hf_config))
        ]

    def _head(self, temperature: float, *, training: bool, needs: Collection[str] = ()) -> Any:
        from mcore_rl.engine.megatron.heads import value_scores

        return value_scores


class RewardEngine(ValueEngine):
    """A value model whose value at the last token is the score of a sequence.

    It starts from a language model, or from a sequence classification checkpoint with one label,
    which an export is.
    """

    _kind = SEQUENCE
