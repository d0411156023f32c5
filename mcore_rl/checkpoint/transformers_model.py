"""Models of transformers without memory, and the tensors of a checkpoint in their parameters.

Most parameters are a tensor of the checkpoint. transformers stacks others from several, such as the
experts of a layer (core_model_loading.py of transformers 5.19). Both are whole tensors one below
the other, which the rule `StackedRows` divides over ranks by rows.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import HFConfig
from mcore_rl.models.heads import get_value_head_suffix
from mcore_rl.reshard.rules import LogicalTensor, Replicated, Rule, StackedRows, Weight


def build_empty_model(hf_config: HFConfig, **options: Any) -> Any:
    """Build the model of a config.json on torch's meta device: shapes and no memory.

    Args:
        options: Of transformers' from_config, such as attn_implementation.

    Raises:
        ConfigError: The installed transformers has no such model.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, architectures = hf_config.get("model_type"), hf_config.get("architectures")
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"config.json: model_type={model_type!r} is not in transformers "
            f"{transformers.__version__}; allowed: one that is, without code of its own"
        )
    config = CONFIG_MAPPING[model_type].from_dict(dict(hf_config))
    kinds = {"": "AutoModelForCausalLM"}
    suffix = get_value_head_suffix(hf_config)
    auto_class = getattr(transformers, kinds.get(suffix, f"AutoModel{suffix}"))
    try:
        with torch.device("meta"):
            return auto_class.from_config(config, dtype=torch.float32, **options)
    except ValueError as error:
        raise ConfigError(
            f"config.json: architectures={architectures}: transformers {transformers.__version__} "
            f"has no such model ({str(error).splitlines()[0]})"
        ) from error


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
            raise ConfigError(f"no tensor of a checkpoint becomes the parameter {name}")
        by_pattern = sources[name]
        names = _list_parts(name, by_pattern, converter_of)
        parts = tuple(LogicalTensor(part, tuple(stored[part].shape)) for part in names)
        if name not in parameters:
            rules[name] = Replicated(parts[0])
        else:
            rules[name] = StackedRows(parts, value.shape[0])
    return rules


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
            f"{name}: transformers makes it of tensors of the checkpoint by {kinds}; supported: "
            "one tensor, or the experts of a layer stacked"
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
