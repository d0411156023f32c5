"""The value head: one number per token from the last hidden state.

Its Hugging Face form is a classification with one label. Of tokens, for a critic: `score.weight`
[1, hidden] and, unless config.json has token_classification_bias=false, `score.bias` [1]
(transformers/modeling_layers.py, GenericForTokenClassification). Of sequences, for a reward model:
`score.weight` alone, read at the last token (GenericForSequenceClassification).
"""

from __future__ import annotations

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import (
    CAUSAL,
    CLASSIFICATION,
    SEQUENCE,
    HFConfig,
    family_of,
    field,
    without_mtp,
)
from mcore_rl.reshard.boxes import LogicalTensor
from mcore_rl.reshard.rules import Weight, Whole

_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def value_head_of(config: HFConfig) -> str:
    """CLASSIFICATION or SEQUENCE for a checkpoint of a value model, "" for a language model."""
    architectures = config.get("architectures") or []
    found = (end for end in (CLASSIFICATION, SEQUENCE) for n in architectures if n.endswith(end))
    return next(found, "")


def has_value_head(config: HFConfig) -> bool:
    """Whether the checkpoint is one of a value model, not of a language model."""
    return bool(value_head_of(config))


def has_value_bias(config: HFConfig) -> bool:
    if value_head_of(config) == SEQUENCE:
        return False
    return bool(config.get("token_classification_bias", True))


def value_config(config: HFConfig, kind: str = CLASSIFICATION) -> HFConfig:
    """config.json of the value model that starts from a checkpoint, of either kind.

    The decoder is the checkpoint's. A value model has no output embedding to tie, and no layers for
    multi-token prediction. `kind` is how the architecture of one ends that starts from a language
    model; one that starts from a value model is of the same kind.

    Raises:
        ConfigError: the checkpoint classifies into more than one label.
    """
    if found := value_head_of(config):
        kind = found
        labels = config.get("id2label") or {"0": "", "1": ""}  # absent: transformers' default, two
        if len(labels) != 1:
            raise ConfigError(
                f"config.json: {config['architectures']} has {len(labels)} labels (id2label); "
                "allowed for a value model: 1"
            )
    architecture = family_of(config).architecture.removesuffix(CAUSAL) + kind
    named = {"architectures": [architecture], "tie_word_embeddings": False, **_ONE_LABEL}
    return without_mtp(config) | named


def value_head_weights(config: HFConfig) -> tuple[Weight, ...]:
    """Rules of the value head, whole on every rank of the last pipeline stage."""
    weight = LogicalTensor("score.weight", (1, field(config, "hidden_size")))
    bias = LogicalTensor("score.bias", (1,))
    named = {"weight": weight} | ({"bias": bias} if has_value_bias(config) else {})
    return tuple(Weight(f"output_layer.{n}", Whole(t), stage="head") for n, t in named.items())


def value_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    """The rules of a whole value model, from its config as value_config gives it."""
    weights = family_of(config).weights(config, padded_vocab)
    return (*(w for w in weights if w.stage != "head"), *value_head_weights(config))


def model_config(config: HFConfig) -> HFConfig:
    """The config of the model, of either kind, that a checkpoint with this config.json holds."""
    return value_config(config) if has_value_head(config) else config


def model_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    """The rules of that model, of either kind, from its config as model_config gives it."""
    if has_value_head(config):
        return value_weights(config, padded_vocab)
    return family_of(config).weights(config, padded_vocab)
