"""Model families, their registry, and the fields of config.json that they read.

A family is data: how its Hugging Face config maps to Megatron's, and the weight rules that loading,
export and resharding read. Family files import no torch, so that plans can be made anywhere.

The type and range of each field is checked when a config is read. A field that is absent or null
passes: each family checks what it needs. The limits are far above any model; they keep a damaged
file from asking for endless rules.

Long because: it has each field's type and range, and those without effect.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rl.config.checks import check_model_exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import load_object
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.rules import TRANSFORMERS
from mcore_rl.config.rules_engine import ModelSizes
from mcore_rl.data.images import PLACEHOLDERS
from mcore_rl.parallel.balance import SequenceCost, estimate_sequence_cost
from mcore_rl.reshard.rules import Weight

HFConfig = dict[str, Any]  # the contents of config.json
DEFAULT_ROPE_THETA = 10000.0  # of a config.json without one, such as Llama 2's
# Suffixes of architectures.
CAUSAL = "ForCausalLM"
CLASSIFICATION, SEQUENCE = "ForTokenClassification", "ForSequenceClassification"
# Tensors that checkpoints of a model_type have transposed: in the last two dimensions, against the
# parameters of transformers and vLLM.
_TRANSPOSED = {"qwen3_vl_moe": re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")}

# Model types whose checkpoints stack the experts of a layer, or have them apart.
_STACKING = ("qwen3_5_moe", "qwen3_5_moe_text")

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_FEW_EXPERTS = 32  # more than a token has

_MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
# Model types whose config.json does not say that they have a layer for multi-token prediction.
_UNDECLARED_MTP = ("qwen3_next",)


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models. Its functions raise ConfigError for a config that they cannot express.

    Attributes:
        architecture: Value of "architectures" in config.json.
        config_map: Keyword arguments of Megatron's TransformerConfig, and of GPTModel those without
            a field there; the activation under "activation", by its Hugging Face name.
        layer_spec: Megatron's layer spec of a model chunk, from TransformerConfig and vp_stage.
        weights: Rules of Megatron's parameters, from the config and the padded vocabulary size.
        vllm_weights: Rules of vLLM's parameters, without multi-token prediction layers. None: a
            server lists its parameters, which vLLM's loader fills, when it starts.
        num_mtp_layers: Multi-token prediction layers after the decoder layers of a checkpoint.
        frozen_prefixes: Prefixes of the tensors of a checkpoint that no engine loads, such as those
            of a vision tower: an export has them as the first checkpoint has them.
        vllm_drafts: Rules of the parameters of vLLM's draft model, which has the prediction layers
            (vllm_parts.DRAFT). None: servers draft no tokens.
        defaults: Of fields that config.json leaves out, where the class of transformers has another
            value than the functions here take for null.
    """

    name: str
    architecture: str
    config_map: Callable[[HFConfig], dict[str, Any]]
    layer_spec: Callable[[Any, int | None], Any]
    weights: Callable[[HFConfig, int], tuple[Weight, ...]]
    vllm_weights: Callable[[HFConfig], tuple[Weight, ...]] | None = None
    num_mtp_layers: Callable[[HFConfig], int] = lambda config: 0
    vllm_drafts: Callable[[HFConfig], tuple[Weight, ...]] | None = None
    frozen_prefixes: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)


_FAMILIES: dict[str, Family] = {}
_BUILDERS: dict[str, Callable[[HFConfig], Family]] = {}  # families of any architecture
_COMPLETERS: dict[str, Callable[[HFConfig], HFConfig]] = {}
_used: tuple[str, Family | None] = ("", None)  # of use_family: its argument, and what it leads to


def register(family: Family) -> Family:
    """Register a family under its architecture."""
    _FAMILIES[family.architecture] = family
    return family


def register_builder(
    name: str, build: Callable[[HFConfig], Family], complete: Callable[[HFConfig], HFConfig]
) -> None:
    """Register what builds a family from any config.json, by its name as model.family.

    Args:
        complete: Adds the usual names of sizes that config.json has under others.
    """
    _BUILDERS[name], _COMPLETERS[name] = build, complete


def use_family(import_path: str, setting: str = "model.family") -> None:
    """Use a user's family in this process, for checkpoints of its architecture.

    Each process of a run calls this before it looks a family up.

    Args:
        import_path: Leads to a Family; "" for those of this package alone; "transformers" for
            these and, for other architectures or fields, one whose tensors transformers knows.
        setting: Name of the setting, for errors.

    Raises:
        ConfigError: The import path leads to no Family.
    """
    global _used
    _used = "", None
    if import_path in ("", TRANSFORMERS):
        _used = import_path, None
        return
    family = load_object(setting, import_path)
    if not isinstance(family, Family):
        raise ConfigError(
            f"{setting}={import_path!r} is no mcore_rl.models.base.Family; allowed: one; '' for "
            f"the families of this package; {TRANSFORMERS!r} for any of transformers"
        )
    _used = import_path, family


@contextmanager
def scope_family(import_path: str = "", setting: str = "model.family") -> Iterator[None]:
    """Use a family, and those that `use_family` is called with inside, until the block ends.

    For a process that looks families of several runs up, one after another. Arguments and errors
    are those of `use_family`.
    """
    global _used
    before = _used
    try:
        use_family(import_path, setting)
        yield
    finally:
        _used = before


def get_user_family() -> str:
    """Return the import path of use_family, for a process that this one starts."""
    return _used[0]


def read_config(model_path: str | Path, setting: str = "model.path") -> HFConfig:
    """Read config.json of a checkpoint folder and check its fields.

    Fields of a nested language model (text_config) stand beside the others, as of any model.

    Args:
        setting: Name of the setting with the path, for messages.

    Raises:
        ConfigError: The file is missing or not readable, or a field has another type or range.
    """
    check_model_exists(setting, model_path)
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{setting}={str(model_path)!r}: there is no config.json in that folder")
    return read_config_file(path)


def read_config_file(path: Path) -> HFConfig:
    """Read the config.json of a model, with its family's defaults; see read_config."""
    config = read_json_object(path)
    config = _decode_numbers(config)
    if isinstance(text_config := config.get("text_config"), dict):
        config = {**text_config, **config}
    check_fields(config)
    if (family := _find_family(config)) is not None:
        return {**family.defaults, **config}
    if get_user_family() == TRANSFORMERS:
        config = _COMPLETERS[TRANSFORMERS](config)
        check_fields(config)
    return config


def _decode_numbers(value: Any) -> Any:
    """Return JSON with the numbers that transformers 5 writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _decode_numbers(item) for name, item in value.items()}
    return [_decode_numbers(item) for item in value] if isinstance(value, list) else value


def has_images(config: HFConfig) -> bool:
    """Return whether a model takes images."""
    return config.get("model_type") in PLACEHOLDERS


def is_transposed(config: HFConfig, name: str) -> bool:
    """Return whether the files of a model have a tensor transposed in its last two dimensions."""
    pattern = _TRANSPOSED.get(str(config.get("model_type")))
    return pattern is not None and pattern.search(name) is not None


def may_stack_experts(config: HFConfig) -> bool:
    """Return whether files of a model may stack experts that its rules name one by one."""
    return config.get("model_type") in _STACKING


def get_family(config: HFConfig) -> Family:
    """Return the family that config.json names under "architectures"; a user's before others."""
    family = _find_family(config)
    is_text = family is None or not family.frozen_prefixes
    if "vision_config" in config and is_text and not has_images(config):
        raise ConfigError(
            f"config.json: model_type={config.get('model_type')!r} has a vision_config, and "
            "nothing makes its positions and pixel values; allowed: "
            f"{', '.join(PLACEHOLDERS)}"
        )
    architectures = config.get("architectures") or []
    takes_any = get_user_family() == TRANSFORMERS and architectures
    if family is not None and not (takes_any and _refuses(family, config)):
        return family
    if takes_any:
        return _BUILDERS[TRANSFORMERS](config)
    if has_images(config):
        raise ConfigError(
            f"config.json: model_type={config['model_type']!r} takes images, for which Megatron "
            "has no modules here; allowed: backend='fsdp' (actor.backend, engine.backend, ...)"
        )
    raise ConfigError(
        f"config.json: architectures={architectures} is not supported; "
        f"allowed: {sorted(_list_families())}, or model.family with a family of your own"
    )


def _refuses(family: Family, config: HFConfig) -> bool:
    """Return whether a family here lacks what config.json asks for, which transformers may have."""
    try:
        return not family.config_map(config)
    except ConfigError:
        return True


def get_frozen_prefixes(config: HFConfig) -> tuple[str, ...]:
    """Return the prefixes of the tensors that no engine loads; () for an unknown architecture."""
    family = _find_family(config)
    return () if family is None else family.frozen_prefixes


# Fields that do not change what a family computes: identity and records of a checkpoint, tokens,
# generation, training, images, and parts that config.json declares and families leave out.
_WITHOUT_EFFECT_NAMES = (
    # identity, records, and how weights are stored
    "architectures auto_map model_type transformers_version dtype torch_dtype quantization_config "
    "tokenizer_class unsloth_fixed unsloth_version name_or_path is_llama_config activation "
    "transformers.js_config",
    # tokens and generation
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id use_cache "
    "max_position_embeddings initial_context_length max_sequence_length model_max_length "
    "cache_implementation prefix max_length min_length do_sample "
    "early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens",
    # outputs of transformers, and classes that are no decoder
    "return_dict output_attentions output_hidden_states output_router_logits torchscript "
    "attn_implementation gradient_checkpointing "
    "use_bfloat16 tf_legacy_loss pruned_heads chunk_size_feed_forward is_encoder_decoder "
    "is_decoder cross_attention_hidden_size add_cross_attention tie_encoder_decoder "
    "finetuning_task task_specific_params problem_type id2label label2id num_labels "
    "token_classification_bias",
    # initial values, dropout, losses of routers and ranks of other trainers
    "initializer_range attention_dropout hidden_dropout classifier_dropout neftune_noise_alpha "
    "aux_loss_alpha seq_aux router_aux_loss_coef "
    "router_z_loss_coef ep_size pretraining_tp",
    # derived from other fields, or of parts that a model of its architecture does not have
    "head_dim qk_head_dim full_attention_interval max_window_layers mlp_intermediate_size "
    "shared_moe_mode use_mtp num_mtp_modules mtp_transformer_layers",
    # images, which are refused
    "vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id "
    "media_placeholder_token_id ignore_index use_unified_vision_chunk video_placeholder "
    "projection_hidden_size projection_layer_norm_eps",
)
_WITHOUT_EFFECT = frozenset(name for names in _WITHOUT_EFFECT_NAMES for name in names.split())


class _RecordedFields(UserDict[str, Any]):
    """The fields of a config.json, with the names of those that have been read.

    Copies by "|" are recorded as well; by "**" every field counts as read.
    """

    def __init__(self, config: Mapping[str, Any], names: set[str]) -> None:
        super().__init__()
        self.data, self.names = dict(config), names

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return name in self.data

    def __iter__(self) -> Iterator[str]:
        self.names.update(self.data)
        return iter(self.data)

    def __or__(self, other: Any) -> Any:
        return _RecordedFields(self.data | other, self.names)

    def __ror__(self, other: Any) -> Any:
        return _RecordedFields(other | self.data, self.names)


def check_no_unread_field(config: HFConfig) -> None:
    """Check that the model's family reads each field of config.json that may change the model.

    A field that is false, zero or empty switches something off that the family does not have.

    Raises:
        ConfigError: It does not read a field that is set, and that is not known to have no effect
            on the computation.
    """
    family = get_family(config)
    few = {name: min(config[name], _FEW_EXPERTS) for name in _EXPERT_COUNTS if config.get(name)}
    # Rules of all experts take seconds, and read what those of a few do.
    unread = _list_unread_fields(config, few)
    if unread and few:
        unread = _list_unread_fields(config, {})
    if unread:
        name = unread[0]
        raise ConfigError(
            f"config.json: {name}={_to_json(config[name])} is not read by the family "
            f"{family.name!r}, which may compute another model than the checkpoint's; allowed: "
            "null, or no such field"
        )


def _list_unread_fields(config: HFConfig, change: HFConfig) -> list[str]:
    """Return the fields that are set and that neither the family nor its rules read, sorted.

    Args:
        change: Other values of fields, for rules alone.
    """
    family, names = get_family(config), set[str]()
    if "use_sliding_window" in config:  # true is refused, and without it the window is not in use
        names.add("sliding_window")
    fields: Any = _RecordedFields(config, names)
    family.config_map(fields)
    family.num_mtp_layers(fields)
    fields = fields | change
    family.weights(fields, get_field(config, "vocab_size"))
    if family.vllm_weights is not None:
        family.vllm_weights(fields)
    if family.vllm_drafts is not None and family.num_mtp_layers(config):
        family.vllm_drafts(fields)
    unread = sorted(config.keys() - names - _WITHOUT_EFFECT)
    return [name for name in unread if config[name] and not name.startswith("_")]


def _find_family(config: HFConfig) -> Family | None:
    families = _list_families()
    return next((families[name] for name in _list_causal_names(config) if name in families), None)


def _list_families() -> dict[str, Family]:
    """Return families by architecture, a user's before others."""
    _, family = _used
    return _FAMILIES if family is None else _FAMILIES | {family.architecture: family}


def _list_causal_names(config: HFConfig) -> list[str]:
    """Return the architectures of config.json, those of value models as of language models."""
    # A value model is the same family with another head (models/heads.py).
    return [
        name.replace(CLASSIFICATION, CAUSAL).replace(SEQUENCE, CAUSAL)
        for name in config.get("architectures") or []
    ]


def estimate_cost(config: HFConfig) -> SequenceCost:
    """Return the cost of a sequence of a model."""
    fields = get_family(config).config_map(config)
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    head_dim = fields.get("kv_channels") or hidden // heads
    ffn = fields["ffn_hidden_size"]
    if fields.get("num_moe_experts"):
        ffn = fields["moe_ffn_hidden_size"] * fields["moe_router_topk"]
    linear_layers = fields.get("linear_attention_freq", ())
    return estimate_sequence_cost(
        num_layers=fields["num_layers"],
        hidden_size=hidden,
        attention_size=heads * head_dim,
        key_value_size=fields.get("num_query_groups", heads) * head_dim,
        ffn_size=ffn,
        vocab_size=config["vocab_size"],
        attention_share=1 - sum(linear_layers) / len(linear_layers) if linear_layers else 1.0,
    )


def get_vllm_weights(config: HFConfig, *, drafts: bool = False) -> tuple[Weight, ...]:
    """Return the rules of vLLM's parameters.

    Args:
        drafts: With those of the draft model.

    Raises:
        ConfigError: The family has none.
    """
    family = get_family(config)
    if family.vllm_weights is None:
        raise ConfigError(
            f"the family {family.name!r} has no vllm_weights, the rules of vLLM's parameters"
        )
    weights = family.vllm_weights(config)
    if not drafts:
        return weights
    if family.vllm_drafts is None:
        raise ConfigError(
            f"the family {family.name!r} has no vllm_drafts, the rules of vLLM's draft model"
        )
    return weights + family.vllm_drafts(config)


def get_field(config: HFConfig, name: str) -> Any:
    """Return a required field; raise ConfigError without it."""
    if config.get(name) is None:
        raise ConfigError(f"config.json has no {name!r}, which {config.get('architectures')} needs")
    return config[name]


def drop_mtp_layers(config: HFConfig) -> HFConfig:
    """Return the config with zero layers for multi-token prediction."""
    fields = [n for n in _MTP_FIELDS if n in config]
    if config.get("model_type") in _UNDECLARED_MTP:
        fields = ["num_nextn_predict_layers"]
    return config | dict.fromkeys(fields, 0)


def list_layer_types(config: HFConfig) -> list[str]:
    """Return the attention of each layer of a hybrid model: "linear_" or "full_attention".

    From layer_types or, as published, full_attention_interval.
    """
    num_layers = get_field(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        interval = config.get("full_attention_interval") or 4
        names = ("full_attention", "linear_attention")
        return [names[bool((layer + 1) % interval)] for layer in range(num_layers)]
    if len(types) != num_layers:
        raise ConfigError(
            f"config.json: layer_types has {len(types)} entries; allowed: "
            f"num_hidden_layers={num_layers}"
        )
    return list(types)


def check_values(config: HFConfig, allowed: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field with another value than the one allowed.

    A field that is absent or null passes: transformers' default is then the allowed value.
    """
    for name, expected in allowed.items():
        value = config.get(name)
        if value is not None and value != expected:
            raise ConfigError(
                f"config.json: {name}={_to_json(value)} is not supported for "
                f"{config.get('architectures')}; allowed: {_to_json(expected)}"
            )


def _to_json(value: Any) -> str:
    """Return a value as JSON with single quotes."""
    return json.dumps(value).replace('"', "'")


def read_rope(config: HFConfig, default_theta: float = DEFAULT_ROPE_THETA) -> dict[str, Any]:
    """Return the rotary parameters, under the keys of either generation of transformers.

    Args:
        default_theta: Default of rope_theta in the family's class of transformers.

    Returns:
        rope_theta, rope_type ("default" without scaling), the parameters of that type, and the
        architectures, for messages.

    Raises:
        ConfigError: Two fields contradict each other: transformers 5 reads rope_scaling before
            rope_parameters, earlier versions do not.
    """
    names = [name for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    parameters = [_standardize_rope(config, name) for name in names]
    if len(parameters) > 1 and parameters[0] != parameters[1]:
        values = " and ".join(f"{name}={_to_json(config[name])}" for name in names)
        raise ConfigError(f"config.json: {values} differ; allowed: one of them, or equal values")
    merged = parameters[0] if parameters else _standardize_rope(config)
    return {"rope_theta": default_theta, **merged, "architectures": config.get("architectures")}


def _standardize_rope(config: HFConfig, name: str = "") -> dict[str, Any]:
    """Merge the object `name` of config.json with the top-level rope fields.

    Its type is under "rope_type", as in standardize_rope_params
    (transformers/modeling_rope_utils.py).
    """
    inner = config[name] if name else {}
    kinds = {inner[key] for key in ("rope_type", "type") if inner.get(key) is not None}
    if len(kinds) > 1:
        raise ConfigError(
            f"config.json: {name} has rope_type={inner['rope_type']!r} and type={inner['type']!r}; "
            "allowed: one of them, or equal values"
        )
    outer = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    merged = {key: value for key, value in (outer | inner).items() if value is not None}
    merged.pop("type", None)
    return {**merged, "rope_type": next(iter(kinds), "default")}


def get_head_dim(config: HFConfig) -> int:
    """Return the size of an attention head."""
    if config.get("head_dim"):
        return int(config["head_dim"])
    hidden, heads = get_field(config, "hidden_size"), get_field(config, "num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size={hidden} is no multiple of num_attention_heads={heads}, and "
            "there is no head_dim"
        )
    return int(hidden // heads)


def count_attention_layers(config: HFConfig) -> int:
    """Count the layers that cache keys and values: all but those of linear attention."""
    if config.get("linear_num_key_heads"):
        return list_layer_types(config).count("full_attention")
    return int(get_field(config, "num_hidden_layers"))


def count_kv_elements_per_token(config: HFConfig, tp: int = 1) -> int:
    """Count the elements of the KV cache per token, over all layers, on one of `tp` workers.

    A worker has the keys and values of its heads, at least of one head. Multi-head latent attention
    caches a latent vector and a rotary key that all heads share (DeepSeek-V2, section 2.1), on
    every worker; and a key for an indexer in float8, with a scale per 128 dims, counted at half its
    elements. Layers of linear attention have a state per sequence and nothing per token.
    """
    num_layers = count_attention_layers(config)
    if config.get("kv_lora_rank"):
        latent = int(config["kv_lora_rank"] + get_field(config, "qk_rope_head_dim"))
        index_dim = int(config.get("index_head_dim") or 0)
        return num_layers * (latent + (index_dim + index_dim // 128 * 4) // 2)
    heads = int(config.get("num_key_value_heads") or get_field(config, "num_attention_heads"))
    return num_layers * 2 * max(1, heads // tp) * get_head_dim(config)


def pad_vocab_size(config: HFConfig, tp: int) -> int:
    """Return the vocabulary size rounded up to a multiple of `tp`."""
    return -(-int(get_field(config, "vocab_size")) // tp) * tp


def get_model_sizes(config: HFConfig) -> ModelSizes:
    """Return the sizes that a layout of this model must divide."""
    family = get_family(config)
    fields = family.config_map(config)
    num_experts = fields.get("num_moe_experts", 0)
    has_dense = not num_experts or 0 in fields["moe_layer_freq"]
    dense = (fields["ffn_hidden_size"],) if has_dense else ()
    shared = fields.get("moe_shared_expert_intermediate_size")
    heads = fields["num_attention_heads"]
    return ModelSizes(
        num_attention_heads=heads,
        num_query_groups=fields.get("num_query_groups", heads),
        ffn_sizes=(*dense, shared) if shared else dense,
        num_experts=num_experts,
        expert_ffn_size=fields.get("moe_ffn_hidden_size", 0),
        num_layers=fields["num_layers"],
        num_mtp_layers=family.num_mtp_layers(config),
        has_router_bias=fields.get("moe_router_enable_expert_bias", False),
        is_mla="kv_lora_rank" in fields,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_expert_biases=bool(num_experts and fields.get("add_bias_linear")),
        has_indexer=fields.get("experimental_attention_variant") == "dsa",
        num_linear_heads=(
            fields["linear_num_key_heads"] if 1 in fields.get("linear_attention_freq", ()) else 0
        ),
    )


def list_moe_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the indices of the decoder layers with experts, over the whole model."""
    fields = get_family(config).config_map(config)
    if not fields.get("num_moe_experts", 0):
        return ()
    is_moe = fields["moe_layer_freq"]  # 1 for each layer with experts, else 0
    return tuple(layer for layer, flag in enumerate(is_moe) if flag)


MAX_EXPERTS = 1 << 16  # over all layers


@dataclass(frozen=True, slots=True)
class FieldType:
    """Values that a field may have; `allowed` describes them in messages."""

    allowed: str
    accepts: Callable[[Any], bool]


def _declare_integer(low: int, high: int) -> FieldType:
    # JSON's true is an int to Python.
    return FieldType(
        f"an integer from {low} to {high}", lambda v: type(v) is int and low <= v <= high
    )


def _declare_number(low: float, high: float) -> FieldType:
    return FieldType(
        f"a number from {low} to {high}", lambda v: type(v) in (int, float) and low <= v <= high
    )


def _declare_list(what: str, element: FieldType) -> FieldType:
    return FieldType(
        f"a list of {what}", lambda v: isinstance(v, list) and all(map(element.accepts, v))
    )


_TEXT = FieldType("a string", lambda value: isinstance(value, str))
_FLAG = FieldType("true or false", lambda value: isinstance(value, bool))
_OBJECT = FieldType("an object", lambda value: isinstance(value, dict))

_NAMES: dict[FieldType, str] = {
    _declare_integer(1, 1 << 10): "num_hidden_layers moe_layer_freq decoder_sparse_step",
    _declare_integer(0, 1 << 10): "first_k_dense_replace num_nextn_predict_layers num_mtp_layers "
    "mtp_num_hidden_layers",
    _declare_integer(
        1, 1 << 14
    ): "num_attention_heads num_key_value_heads head_dim qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim num_experts num_local_experts n_routed_experts "
    "num_experts_per_tok experts_per_token n_shared_experts full_attention_interval "
    "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads rotary_dim index_n_heads index_head_dim",
    _declare_integer(0, 1 << 14): "n_group topk_group",
    _declare_integer(1, 1 << 24): "vocab_size hidden_size intermediate_size moe_intermediate_size "
    "kv_lora_rank q_lora_rank index_topk",
    _declare_integer(0, 1 << 24): "shared_expert_intermediate_size",
    _declare_integer(1, 1 << 40): "max_position_embeddings original_max_position_embeddings",
    _declare_integer(0, 1 << 40): "sliding_window",  # 0, from transformers: no window
    _declare_number(1e-12, 1.0): "rms_norm_eps partial_rotary_factor",
    _declare_number(
        1e-6, 1e12
    ): "rope_theta routed_scaling_factor factor low_freq_factor high_freq_factor",
    _declare_number(
        0.0, 1e6
    ): "beta_fast beta_slow mscale mscale_all_dim attention_factor swiglu_alpha swiglu_limit",
    _FLAG: "tie_word_embeddings attention_bias mlp_bias norm_topk_prob use_sliding_window "
    "attn_output_gate mtp_use_dedicated_embeddings use_qk_norm use_routing_bias rope_interleave "
    "indexer_rope_interleave token_classification_bias truncate",
    _TEXT: "hidden_act scoring_func topk_method rope_type type dtype torch_dtype",
    _OBJECT: "rope_scaling rope_parameters id2label",
    _declare_list("strings", _TEXT): "architectures layer_types mlp_layer_types",
    _declare_list("layer numbers", _declare_integer(0, 1 << 10)): "mlp_only_layers",
}
FIELDS: dict[str, FieldType] = {
    name: field_type for field_type, names in _NAMES.items() for name in names.split()
}

_MULTIPLES = (
    ("num_attention_heads", "num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("n_routed_experts", "n_group"),
)
_AT_MOST = (
    ("topk_group", "n_group"),
    ("rotary_dim", "head_dim"),
    ("first_k_dense_replace", "num_hidden_layers"),
    ("num_experts_per_tok", "num_experts"),
    ("num_experts_per_tok", "num_local_experts"),
    ("num_experts_per_tok", "n_routed_experts"),
)


def check_fields(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field of the wrong type or range, or two that contradict each other.

    Fields that no family reads pass.
    """
    _check_types(config)
    for name in ("rope_scaling", "rope_parameters"):
        _check_types(config.get(name) or {})
    _check_relations({name: value for name, value in config.items() if value and name in FIELDS})


def _check_types(config: Mapping[str, Any]) -> None:
    for name, field_type in FIELDS.items():
        value = config.get(name)
        if value is not None and not field_type.accepts(value):
            raise ConfigError(
                f"config.json: {name}={reprlib.repr(value)} is not supported; allowed: "
                f"{field_type.allowed}"
            )


def _check_relations(config: Mapping[str, Any]) -> None:
    """Check relations between fields that are set and not zero."""
    for multiple, factor in _MULTIPLES:
        if multiple in config and factor in config and config[multiple] % config[factor]:
            raise ConfigError(
                f"config.json: {multiple}={config[multiple]} is no multiple of "
                f"{factor}={config[factor]}"
            )
    for name, limit in _AT_MOST:
        if name in config and limit in config and config[name] > config[limit]:
            raise ConfigError(f"config.json: {name}={config[name]} exceeds {limit}={config[limit]}")
    experts = max(config.get(name, 0) for name in _EXPERT_COUNTS)
    if (total := experts * config.get("num_hidden_layers", 1)) > MAX_EXPERTS:
        raise ConfigError(
            f"config.json: {experts} experts in each of {config['num_hidden_layers']} layers make "
            f"{total}; allowed: at most {MAX_EXPERTS}"
        )
