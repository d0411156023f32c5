"""Models of transformers without memory, and the tensors of a checkpoint in their parameters.

Most parameters are a tensor of the checkpoint. transformers stacks others from several, such as the
experts of a layer (core_model_loading.py of transformers 5.19). Both are whole tensors one below
the other, which the rule `StackedRows` divides over ranks by rows. Tensors that files have
transposed are as the parameter here; CheckpointReader and write_checkpoint transpose.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.rules import TRANSFORMERS
from mcore_rl.models.base import (
    CAUSAL,
    Family,
    HFConfig,
    drop_mtp_layers,
    has_images,
    is_transposed,
    register_builder,
)
from mcore_rl.models.heads import get_value_head_suffix
from mcore_rl.reshard.rules import LogicalTensor, Replicated, Rule, StackedRows, Stage, Weight

_ALIASES = {"kimi_k2": "deepseek_v3"}  # a model_type that transformers has under another name
_CODE_FIELDS = (
    "attn_implementation", "_attn_implementation", "experts_implementation",
    "_experts_implementation", "auto_map",
)  # fmt: skip


def build_empty_model(hf_config: HFConfig, **options: Any) -> Any:
    """Build the model of a config.json on torch's meta device: shapes and no memory.

    Args:
        options: Arguments of transformers' from_config. attn_implementation is for the language
            model alone: a vision tower attends without causality, by torch's own function.

    Raises:
        ConfigError: The installed transformers has no such model, or does not build this one.
    """
    import torch
    import transformers

    architectures, config = hf_config.get("architectures"), _build_config(hf_config)
    options = {"attn_implementation": "eager", **options}
    if has_images(hf_config):
        text = options["attn_implementation"]
        options["attn_implementation"] = {"text_config": text, "vision_config": "sdpa"}
    auto_class = _get_auto_class(hf_config)
    try:
        with torch.device("meta"):
            return auto_class.from_config(
                config, dtype=torch.float32, trust_remote_code=False, **options
            )
    except Exception as error:  # transformers checks few fields of a config
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"config.json: architectures={architectures}: transformers {transformers.__version__} "
            f"has no such model, or does not build it with these fields and functions ({reason}); "
            "allowed: another family, or the fields of a published model"
        ) from error


def _get_auto_class(hf_config: HFConfig) -> Any:
    """Return transformers' class for models of this kind."""
    import transformers

    suffix = get_value_head_suffix(hf_config) or CAUSAL
    if has_images(hf_config) and suffix == CAUSAL:
        suffix = "ForImageTextToText"
    return getattr(transformers, f"AutoModel{suffix}")


def load_transformers_model(path: str, hf_config: HFConfig, dtype: Any) -> Any:
    """Return transformers' own eager model of a checkpoint, in evaluation mode.

    None, if transformers does not read the files as they are: quantized, or under other names.
    """
    from transformers.utils import logging

    if "quantization_config" in read_json_object(Path(path, "config.json")):
        return None
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, info = _get_auto_class(hf_config).from_pretrained(
            path,
            config=_build_config(hf_config),
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
    is_read = all(name.startswith("score.") for name in info["missing_keys"])
    return model if is_read and not info["mismatched_keys"] else None


def load_transformers_config(path: str | Path) -> Any:
    """Return transformers' config of a checkpoint folder, also of a model_type that is an alias.

    Raises:
        ConfigError: The installed transformers has no such model, or does not build this one.
    """
    name, config_class = _get_config_class(read_json_object(Path(path, "config.json")))
    return config_class.from_pretrained(
        path, local_files_only=True, trust_remote_code=False, model_type=name
    )


def _get_config_class(hf_config: HFConfig) -> tuple[str, Any]:
    """Return the model_type by which transformers has a model, and its class of configs."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = _get_model_type(hf_config)
    if name not in CONFIG_MAPPING:
        raise _build_missing_error(hf_config)
    return name, CONFIG_MAPPING[name]


def _get_model_type(hf_config: HFConfig) -> str:
    """Return the model_type by which transformers has a model."""
    name = str(hf_config.get("model_type"))
    return _ALIASES.get(name, name)


def _build_missing_error(hf_config: HFConfig) -> ConfigError:
    import transformers

    return ConfigError(
        f"config.json: model_type={hf_config.get('model_type')!r} is not in transformers "
        f"{transformers.__version__}; allowed: one that is, without code of its own"
    )


def build_published_model(hf_config: HFConfig) -> Any:
    """Build the model that "architectures" names, a wrapper with its tower, on the meta device.

    build_empty_model builds the language model of a wrapper whose images nothing here takes.

    Raises:
        ConfigError: The installed transformers has no such model, or does not build this one.
    """
    import torch
    import transformers

    if "vision_config" not in hf_config or has_images(hf_config):
        return build_empty_model(hf_config)
    config, auto_class = _build_config(hf_config), transformers.AutoModelForImageTextToText
    try:
        with torch.device("meta"):
            return auto_class.from_config(config, trust_remote_code=False)
    except ValueError as error:  # it takes images in another form
        raise _build_missing_error(hf_config) from error


def _build_config(hf_config: HFConfig) -> Any:
    """Return transformers' config of a config.json."""
    from huggingface_hub.errors import StrictDataclassError

    name, config_class = _get_config_class(hf_config)
    fields = {**_select_fields(hf_config), "model_type": name}
    if "text_config" in fields:  # what stands beside it are copies of its fields
        names = {field.name for field in dataclasses.fields(config_class)}
        fields = {name: value for name, value in fields.items() if name in names}
    try:
        return config_class.from_dict(fields)
    except (StrictDataclassError, NotImplementedError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"config.json: transformers refuses a field of model_type={name!r}: {reason}"
        ) from error


def expand_config(hf_config: HFConfig) -> HFConfig:
    """Return a config.json with transformers' defaults for the fields that it does not name."""
    fields: HFConfig = _build_config(hf_config).to_dict()
    return fields


def _select_fields(hf_config: HFConfig) -> HFConfig:
    """Return a config.json without what chooses code."""
    return {
        name: _select_fields(value)
        if isinstance(value, dict) and name.endswith("_config")
        else value
        for name, value in hf_config.items()
        if name not in _CODE_FIELDS
    }


def map_parameters(model: Any) -> dict[str, Rule]:
    """Return the tensors of a checkpoint in each parameter and saved buffer, by its name.

    Without tied copies. Parameters are divided by rows, or experts; buffers are replicated.

    Raises:
        ConfigError: transformers converts a tensor in a way that is not stacking.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
        revert_weight_conversion,
    )

    tied = set(model.all_tied_weights_keys)
    state = {name: value for name, value in model.state_dict().items() if name not in tied}
    stored = revert_weight_conversion(model, dict(state))  # as save_pretrained would write it
    mapping = get_model_conversion_mapping(model)
    renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
    converters = [item for item in mapping if isinstance(item, WeightConverter)]
    sources: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in stored:
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        sources[target][pattern].append(name)
    converter_of = {pattern: item for item in converters for pattern in item.source_patterns}
    parameters, rules = dict(model.named_parameters()), dict[str, Rule]()
    for name, value in state.items():
        if name not in sources:
            raise ConfigError(
                f"no tensor of a checkpoint becomes the parameter {name}; allowed: another family"
            )
        by_pattern = sources[name]
        if _is_transposed(model, name, by_pattern, converter_of):
            names = [name for names in by_pattern.values() for name in names]
        else:
            names = _list_parts(name, by_pattern, converter_of)
        parts = tuple(LogicalTensor(part, tuple(stored[part].shape)) for part in names)
        if name not in parameters:
            rules[name] = Replicated(parts[0])
        else:
            rules[name] = StackedRows(parts, value.shape[0])
    return rules


def name_parameters(model: Any, tensors: Iterable[str]) -> dict[str, str]:
    """Return the parameter of a model that each tensor of its checkpoint becomes, or is part of."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    mapping, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
    converters = [item for item in mapping if isinstance(item, WeightConverter)]
    prefix = model.base_model_prefix
    return {
        tensor: rename_source_key(tensor, renamings, converters, prefix, state)[0]
        for tensor in tensors
    }


def _is_transposed(
    model: Any,
    name: str,
    sources: Mapping[str | None, list[str]],
    converter_of: Mapping[str | None, Any],
) -> bool:
    """Return whether a parameter is one tensor of a checkpoint, transposed as the reader does it.

    Raises:
        ConfigError: Its last two dimensions are equal: transformers would not transpose it.
    """
    from transformers.core_model_loading import Transpose

    converter = converter_of.get(next(iter(sources)))
    operations = getattr(converter, "operations", [])
    is_one = len(operations) == 1 and isinstance(operations[0], Transpose)
    if not is_one or not is_transposed({"model_type": model.config.model_type}, name):
        return False
    shape = tuple(model.get_parameter(name).shape)
    if shape[-1] == shape[-2]:
        raise ConfigError(
            f"{name} has the shape {shape}: transformers takes a matrix that is square as it is, "
            "and vLLM transposes it; allowed: a model whose files read the same in both"
        )
    return {operations[0].dim0, operations[0].dim1} == {1, 2} and len(shape) == 3


def _list_parts(
    name: str, sources: Mapping[str | None, list[str]], converter_of: Mapping[str | None, Any]
) -> list[str]:
    """Return the tensors of a parameter in their order in it."""
    if list(sources) == [None]:
        return sources[None]
    from transformers.core_model_loading import Concatenate, MergeModulelist

    converter = converter_of[next(iter(sources))]
    operations = [(type(item), item.dim) for item in converter.operations if hasattr(item, "dim")]
    merge, concatenate = (MergeModulelist, 0), (Concatenate, 1)
    if len(converter.operations) != len(operations) or operations not in (
        [merge],
        [merge, concatenate],
    ):
        kinds = ", ".join(type(item).__name__ for item in converter.operations)
        raise ConfigError(
            f"{name}: transformers makes it of tensors of the checkpoint by {kinds}; allowed: "
            "one tensor, the experts of a layer stacked, or stacked experts transposed as those of "
            "qwen3_vl_moe"
        )
    lists = [sorted(sources[pattern], key=_get_numbers) for pattern in converter.source_patterns]
    return [part for expert in zip(*lists, strict=True) for part in expert]


def _get_numbers(name: str) -> list[int]:
    return [int(word) for word in name.split(".") if word.isdigit()]


def map_sharded_weights(hf_config: HFConfig, ep: int = 1) -> tuple[Weight, ...]:
    """Return the rules of the parameters of a model of transformers, sharded by rows.

    Args:
        ep: Expert-parallel ranks: stacked experts become as many weights of the same name, of
            which each rank has one, placed by its first expert.
    """
    return _map_sharded_weights(json.dumps(hf_config, sort_keys=True), ep)


@functools.lru_cache(maxsize=4)
def _map_sharded_weights(hf_config: str, ep: int) -> tuple[Weight, ...]:
    rules = map_parameters(build_empty_model(json.loads(hf_config)))
    weights = []
    for name, rule in rules.items():
        if isinstance(rule, StackedRows) and is_expert_stack(rule) and ep > 1:
            weights += [
                Weight(name, part, axis="tp", expert=index * part.num_units)
                for index, part in enumerate(rule.split_units(ep))
            ]
        else:
            weights.append(Weight(name, rule, axis="tp" if isinstance(rule, StackedRows) else None))
    return tuple(weights)


def is_expert_stack(rule: Rule) -> bool:
    """Return whether a parameter consists of the experts of a layer, as tensors of their own."""
    return isinstance(rule, StackedRows) and len(rule.parts) > 1


def build_family(hf_config: HFConfig) -> Family:
    """Return a family for the architecture of a config.json, with what transformers knows of it.

    Its models train with backend=fsdp only; vLLM's parameters are unknown.
    """
    suffix, architecture = get_value_head_suffix(hf_config), hf_config["architectures"][0]
    if not has_images(hf_config):
        architecture = architecture.removesuffix(suffix).removesuffix(CAUSAL) + CAUSAL
    name = str(hf_config.get("model_type"))
    return Family(name, architecture, _map_config, refuse_layers, _map_tensors)


def _map_config(config: HFConfig) -> dict[str, Any]:
    """Return sizes by Megatron's names, from the fields of transformers' config."""
    values = _build_config(config).get_text_config()
    if values.is_heterogeneous:
        values = values.per_layer_config[0]

    def read(*names: str) -> Any:
        return next((v for v in (_read_field(values, name) for name in names) if v), 0)

    heads, num_layers, hidden = (
        read(name) for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")
    )
    if not (heads and num_layers and hidden):
        raise ConfigError(
            f"config.json: model_type={config['model_type']!r} has no num_attention_heads, "
            "num_hidden_layers or hidden_size; allowed: a decoder with attention"
        )
    ffn = read("intermediate_size") or 4 * hidden
    fields = {
        "num_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": read("num_key_value_heads") or heads,
        "kv_channels": read("head_dim") or hidden // heads,
        "ffn_hidden_size": ffn,
    }
    if experts := read("num_experts", "num_local_experts", "n_routed_experts"):
        fields |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": read("moe_intermediate_size") or ffn,
            "moe_layer_freq": [1] * num_layers,
            "moe_router_topk": read("num_experts_per_tok") or 1,
        }
    return fields


def refuse_layers(config: Any, vp_stage: int | None) -> Any:
    """Raise ConfigError: the layer_spec of a family that Megatron cannot build."""
    raise ConfigError(
        "this architecture has no layers of Megatron here; allowed: backend='fsdp', or a family of "
        "your own in model.family"
    )


def _map_tensors(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    """Return all tensors of a checkpoint, whole, each with its layer or stage."""
    del padded_vocab
    return _list_tensors(json.dumps(drop_mtp_layers(config), sort_keys=True))


@functools.lru_cache(maxsize=4)
def _list_tensors(hf_config: str) -> tuple[Weight, ...]:
    model = build_empty_model(json.loads(hf_config))
    modules = {id(module): name for name, module in model.named_modules()}
    embedding, head = (modules.get(id(m)) for m in _get_ends(model))
    weights = []
    for name, rule in map_parameters(model).items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        stage: Stage = "final_norm"
        if name.rpartition(".")[0] in (embedding, head):
            stage = "embedding" if name.rpartition(".")[0] == embedding else "head"
        for tensor in rule.tensors:
            weight = Weight(tensor.name, Replicated(tensor), stage=None if layer else stage)
            weights.append(weight._replace(layer=int(layer[1])) if layer else weight)
    return tuple(weights)


def _get_ends(model: Any) -> tuple[Any, Any]:
    """Return the embedding and the head of a model."""
    head = model.get_output_embeddings()
    return model.get_input_embeddings(), getattr(model, "score", None) if head is None else head


def _read_field(values: Any, name: str) -> Any:
    """Return a field of transformers' config by its usual name; None without it.

    As written: to read one that differs between layers (Gemma 4's head_dim) is an error.
    """
    written = values.to_dict()
    if (key := values.attribute_map.get(name, name)) in written:
        return written[key]
    try:
        return getattr(values, name, None)
    except NotImplementedError:  # encoder and decoder have their own
        return None


_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def complete_config(hf_config: HFConfig) -> HFConfig:
    """Return a config.json with the sizes that its class has under names of its own (n_embd)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    is_known = _get_model_type(hf_config) in CONFIG_MAPPING
    if not is_known or all(name in hf_config for name in _SIZES):
        return hf_config
    values = _build_config(hf_config).get_text_config()
    sizes = {name: _read_field(values, name) for name in _SIZES if name not in hf_config}
    return hf_config | {name: size for name, size in sizes.items() if type(size) is int}


register_builder(TRANSFORMERS, build_family, complete_config)
