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
    drop_mtp_layers,
    get_family,
    get_field,
    get_frozen_prefixes,
    has_images,
)
from mcore_rl.reshard.rules import LogicalTensor, Replicated, Weight

_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def get_value_head_suffix(config: HFConfig) -> str:
    """Return CLASSIFICATION or SEQUENCE for a value model, "" for a language model."""
    for suffix in (CLASSIFICATION, SEQUENCE):
        if any(name.endswith(suffix) for name in config.get("architectures") or []):
            return suffix
    return ""


def has_value_head(config: HFConfig) -> bool:
    """Return whether the checkpoint is a value model, not a language model."""
    return bool(get_value_head_suffix(config))


def has_value_bias(config: HFConfig) -> bool:
    """Return whether the value head has a bias."""
    if get_value_head_suffix(config) == SEQUENCE:
        return False
    return bool(config.get("token_classification_bias", True))


def build_value_config(config: HFConfig, kind: str = CLASSIFICATION) -> HFConfig:
    """Return config.json of the value model that starts from a language or value model.

    The decoder is the checkpoint's. A value model has no output embedding to tie and no layers for
    multi-token prediction.

    Args:
        kind: Suffix of the architecture, when the checkpoint is a language model. A value model
            keeps its suffix.

    Raises:
        ConfigError: The checkpoint classifies into more than one label, or takes images.
    """
    if has_images(config) or get_frozen_prefixes(config):
        raise ConfigError(
            f"config.json: model_type={config.get('model_type')!r} takes images, and transformers "
            "has no value or reward model of it; allowed: a model of text as critic or reward model"
        )
    if suffix := get_value_head_suffix(config):
        kind = suffix
        labels = config.get("id2label") or {"0": "", "1": ""}  # absent: transformers' default, two
        if len(labels) != 1:
            raise ConfigError(
                f"config.json: {config['architectures']} has {len(labels)} labels (id2label); "
                "allowed for a value model: 1"
            )
    architecture = get_family(config).architecture.removesuffix(CAUSAL) + kind
    changes = {"architectures": [architecture], "tie_word_embeddings": False, **_ONE_LABEL}
    return drop_mtp_layers(config) | changes


def list_value_changes(config: HFConfig, kind: str) -> HFConfig:
    """Return the fields in which build_value_config differs from a config.json."""
    changed = build_value_config(config, kind).items()
    return {name: value for name, value in changed if config.get(name) != value}


def map_value_head_weights(config: HFConfig) -> tuple[Weight, ...]:
    """Return the rules of the value head, replicated on the last pipeline stage."""
    tensors = {"weight": LogicalTensor("score.weight", (1, get_field(config, "hidden_size")))}
    if has_value_bias(config):
        tensors["bias"] = LogicalTensor("score.bias", (1,))
    return tuple(
        Weight(f"output_layer.{n}", Replicated(t), stage="head") for n, t in tensors.items()
    )


def map_value_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    """Return the rules of a value model; `config` is the result of `build_value_config`."""
    weights = get_family(config).weights(config, padded_vocab)
    return (*(w for w in weights if w.stage != "head"), *map_value_head_weights(config))


def get_model_config(config: HFConfig) -> HFConfig:
    """Return the config of a checkpoint's model, with a value head if it has one."""
    return build_value_config(config) if has_value_head(config) else config


def map_model_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    """Return the rules of a language or value model; `config` is that of `get_model_config`."""
    if has_value_head(config):
        return map_value_weights(config, padded_vocab)
    return get_family(config).weights(config, padded_vocab)
