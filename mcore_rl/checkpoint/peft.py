"""LoRA adapters: the weights that can have one, and adapters in PEFT's format.

PEFT (https://github.com/huggingface/peft, src/peft/utils/save_and_load.py) reads a folder with
adapter_config.json and adapter_model.safetensors, whose tensors are called
`base_model.model.MODULE.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank]. MODULE is one
of transformers' model, which may have another name, or stack experts that a checkpoint has apart.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from mcore_rl.checkpoint.hf import SafetensorsFile
from mcore_rl.checkpoint.hf_writer import TensorPlan, plan_shards, write_shard
from mcore_rl.config.checks import check_model_exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.schema import LoRAConfig
from mcore_rl.models.base import HFConfig, has_images
from mcore_rl.models.transformers_model import (
    build_empty_model,
    build_published_model,
    map_parameters,
    name_parameters,
)
from mcore_rl.reshard.rules import Weight, parse_slice

FOLDER = "adapter"  # inside a Hugging Face checkpoint
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Fields of adapter_config.json that change what an adapter computes, and their allowed values.
_PLAIN_FIELDS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, []),
    # Others change the base model's weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


class Factors(NamedTuple):
    """LoRA factors of a Hugging Face tensor [out, in], which changes by alpha / rank * B @ A."""

    tensor: str
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]


def get_adapted_linear(weight: Weight) -> str | None:
    """Return the linear layer of a weight that can have an adapter, else None.

    Prediction layers (MTP), embeddings, heads and slices of stacked tensors, which PEFT adapts as a
    whole, have none.

    >>> get_adapted_linear(Weight("decoder.layers.{layer}.mlp.linear_fc1.weight", None, layer=0))
    'linear_fc1'
    """
    path, _, parameter = weight.name.rpartition(".")
    linear = path.rpartition(".")[2]
    if weight.layer is None or not linear.startswith("linear_"):
        return None
    if weight.rule is not None and parse_slice(weight.rule.tensors[0].name) is not None:
        return None
    return linear if parameter in ("weight", "weight{expert}") else None


def check_targets(key: str, weights: Sequence[Weight], config: LoRAConfig) -> None:
    """Raise ConfigError if a target is no linear layer of the model; `key` names the setting."""
    allowed = {name for weight in weights if (name := get_adapted_linear(weight))}
    if unknown := sorted(set(config.targets) - allowed):
        raise ConfigError(
            f"{key}.targets names {', '.join(unknown)}, which this model does not have; allowed: "
            f"{', '.join(sorted(allowed))}"
        )


def initialize_factor(name: str, seed: int, rank: int, num_inputs: int) -> torch.Tensor:
    """Return the full initial A of a weight [rank, num_inputs], float32, the same on all ranks."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    bound = num_inputs**-0.5
    return torch.empty(rank, num_inputs).uniform_(-bound, bound, generator=generator)


def write_adapters(
    folder: Path,
    factors: Callable[[], Iterator[Factors]],
    rank: int,
    alpha: float,
    hf_config: HFConfig,
) -> None:
    """Write a folder with all adapters, which PEFT loads into transformers' model.

    Args:
        factors: Called twice, for names and shapes, and for tensors.
        hf_config: config.json of the base model. If transformers does not have the model, modules
            have the names of the checkpoint's tensors.

    Raises:
        OSError: It cannot be written.
    """
    folder.mkdir(exist_ok=True)
    modules = _plan_modules([f.tensor for f in factors()], hf_config)
    tensors = partial(_name_tensors, modules=modules)
    plans = [TensorPlan(n, tuple(t.shape), t.dtype) for n, t in tensors(factors())]
    [shard] = plan_shards(plans, sum(plan.nbytes for plan in plans))
    write_shard(folder, replace(shard, file=_WEIGHTS), tensors(factors()))
    config = build_adapter_config(modules.targets, rank, alpha)
    if modules.target_parameters:
        config["target_parameters"] = list(modules.target_parameters)
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def pack_adapters(factors: Iterable[Factors]) -> bytes:
    """Return all adapters as the bytes of a safetensors file, with the names of checkpoints."""
    # Tensors of a fused layer share their A, which a file has for each.
    tensors = {
        name: value.clone()
        for tensor, a, b in factors
        for name, value in _name_pair(tensor.removesuffix(".weight"), a, b)
    }
    content: bytes = safetensors.torch.save(tensors)
    return content


def build_adapter_config(targets: Iterable[str], rank: int, alpha: float) -> dict[str, Any]:
    """Return adapter_config.json of adapters; `targets`: modules, or ends of their names."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(targets),
    }


def list_targets(names: Iterable[str]) -> set[str]:
    """Return the last parts of the names of modules, from those of an adapter's tensors."""
    suffix = ".lora_A.weight"
    return {n.removesuffix(suffix).rpartition(".")[2] for n in names if n.endswith(suffix)}


class _ExpertStack(NamedTuple):
    """A parameter [experts, out, in], whose adapter is one pair of factors."""

    module: str  # by which PEFT names it
    tensors: tuple[str, ...]  # of the checkpoint, expert by expert
    num_experts: int


class _Modules(NamedTuple):
    """The layers of an adapter, as PEFT names them.

    Attributes:
        names: Module of a tensor of the checkpoint.
        stacks: Stack that a tensor is part of.
        targets: target_modules of adapter_config.json.
        target_parameters: Its target_parameters.
    """

    names: dict[str, str]
    stacks: dict[str, _ExpertStack]
    targets: tuple[str, ...]
    target_parameters: tuple[str, ...]


# Last parts of target_modules that PEFT takes for experts, whatever stands before them, in models
# whose experts transformers stacks and checkpoints have apart
# (peft/utils/transformers_weight_conversion.py, _MOE_TARGET_MODULE_MAPPING).
_EXPERT_TARGETS = {
    "mixtral": {"gate", "w1", "w2", "w3"},
    "qwen2_moe": {"gate", "gate_proj", "up_proj", "down_proj"},
}


def _plan_modules(tensors: Sequence[str], hf_config: HFConfig) -> _Modules:
    """Find the modules of transformers' model that the tensors of a checkpoint belong to."""
    try:
        model = build_published_model(hf_config)
    except ConfigError:  # such as the model of a user's own family
        names = {tensor: tensor.removesuffix(".weight") for tensor in tensors}
        return _Modules(names, {}, tuple(names.values()), ())
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    kinds = {**_MODEL_TO_CONVERSION_PATTERN, "mixtral": "mixtral"}  # the last is PEFT's own
    expert_targets = _EXPERT_TARGETS.get(kinds.get(model.config.model_type, ""), set())
    sources: dict[str, list[str]] = {}  # tensors, by parameter
    for tensor, parameter in name_parameters(model, tensors).items():
        sources.setdefault(parameter, []).append(tensor)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names, stacks = dict[str, str](), dict[str, _ExpertStack]()
    modules, parameters, targets = list[str](), list[str](), set[str]()
    for parameter, parts in sources.items():
        module = parameter.removesuffix(".weight")
        if len(shapes.get(parameter, ())) > 2:
            if expert_targets:  # PEFT stacks them itself
                names |= {tensor: tensor.removesuffix(".weight") for tensor in parts}
                targets |= {name.rpartition(".")[2] for name in names.values()} & expert_targets
                continue
            # PEFT wraps the module once for each parameter, the last outermost.
            module = parameter.rpartition(".")[0]
            later = [
                name for name in shapes if name.rpartition(".")[0] == module and name in sources
            ]
            depth = len(later) - 1 - later.index(parameter)
            stack = _ExpertStack(module + depth * ".base_layer", tuple(parts), shapes[parameter][0])
            stacks |= dict.fromkeys(parts, stack)
            parameters.append(parameter)
            continue
        [tensor] = parts
        names[tensor] = module
        if module.rpartition(".")[2] in expert_targets:
            parameters.append(parameter)
        else:
            modules.append(module)
    targets |= _shorten(modules, [name for name, _ in model.named_modules()])
    return _Modules(names, stacks, tuple(targets), tuple(sorted(parameters)))


def _shorten(names: Sequence[str], all_names: Iterable[str]) -> set[str]:
    """Return the last part of names where all that end in it are meant, else whole names."""
    other_parts = {name.rpartition(".")[2] for name in set(all_names).difference(names)}
    last_parts = {name: name.rpartition(".")[2] for name in names}
    return {name if last in other_parts else last for name, last in last_parts.items()}


def _name_tensors(
    factors: Iterator[Factors], modules: _Modules
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the factors as tensors, by their names in PEFT's file."""
    collected: dict[_ExpertStack, dict[str, Factors]] = {}  # of stacks that are not complete
    for item in factors:
        if (stack := modules.stacks.get(item.tensor)) is None:
            yield from _name_pair(modules.names[item.tensor], item.a, item.b)
            continue
        parts = collected.setdefault(stack, {})
        parts[item.tensor] = item
        if len(parts) == len(stack.tensors):
            del collected[stack]
            yield from _name_pair(stack.module, *_stack_factors(stack, parts))


def _name_pair(module: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"base_model.model.{module}.lora_A.weight", a
    yield f"base_model.model.{module}.lora_B.weight", b


def _stack_factors(
    stack: _ExpertStack, parts: Mapping[str, Factors]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [experts * rank, in] and B [out, rank * experts] of stacked experts.

    The tensors of an expert in one stack, gate and up, are a fused layer here and share their A.
    Rows of A are expert by expert, columns of B rank by rank (peft/tuners/lora/layer.py,
    ParamWrapper.get_delta_weight).
    """
    size = len(stack.tensors) // stack.num_experts
    experts = [
        [parts[name] for name in stack.tensors[first : first + size]]
        for first in range(0, len(stack.tensors), size)
    ]
    a = torch.cat([expert[0].a for expert in experts])
    b = torch.stack([torch.cat([part.b for part in expert]) for expert in experts], dim=-1)
    return a, b.flatten(1)


def read_adapter_ranks(folder: str) -> set[int]:
    """Return the ranks that the adapter_config.json of a folder names.

    Raises:
        ConfigError: It cannot be read, or a field has a value that is not allowed.
    """
    file = Path(folder, _CONFIG)
    config = read_json_object(file)
    for name, allowed in _PLAIN_FIELDS.items():
        if (value := config.get(name, allowed[0])) not in allowed:
            raise ConfigError(f"{file}: {name}={value!r}; allowed: {allowed[0]!r}")
    ranks = _list_numbers(file, config, "r", "rank_pattern")
    _list_numbers(file, config, "lora_alpha", "alpha_pattern")
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise ConfigError(f"{file}: r={ranks}; allowed: whole numbers above 0")
    return {*map(int, ranks)}


def _list_numbers(file: Path, config: dict[str, Any], name: str, pattern: str) -> list[int | float]:
    """Return a field of adapter_config.json, and its values of layers by `pattern`."""
    layer_values = config.get(pattern) or {}
    numbers = [
        config.get(name),
        *(layer_values.values() if isinstance(layer_values, dict) else [None]),
    ]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        raise ConfigError(
            f"{file}: {name}={config.get(name)!r}, {pattern}={layer_values!r}; allowed: numbers"
        )
    return numbers


def check_adapter(key: str, folder: str, hf_config: HFConfig) -> int:
    """Check that a folder has an adapter of linear layers of a model; return its highest rank.

    Shapes are compared, not the base model that it names: a model has many paths.

    Args:
        key: Setting with the folder.

    Raises:
        ConfigError: It has none; names the setting and the file.
    """
    where = f"{key}={folder!r}"
    check_model_exists(key, folder)
    try:
        ranks, entries = read_adapter_ranks(folder), SafetensorsFile(Path(folder, _WEIGHTS)).entries
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, entry in entries.items():
        if not (match := _FACTOR.fullmatch(name)):
            raise ConfigError(
                f"{where}: {_WEIGHTS} has tensor {name}; allowed: "
                "base_model.model.MODULE.lora_A.weight and ...lora_B.weight"
            )
        shapes.setdefault(match[1], {})[match[2]] = entry.shape
    linears = _list_linear_shapes(hf_config)
    for module, factors in shapes.items():
        if module not in linears:
            raise ConfigError(
                f"{where} has an adapter of {module}, which is no linear layer of the base model "
                f"(model.path) that servers take adapters of; allowed: {_describe_layers(linears)}"
            )
        outputs, inputs = linears[module]
        allowed = [{"A": (rank, inputs), "B": (outputs, rank)} for rank in sorted(ranks)]
        if factors not in allowed:
            raise ConfigError(
                f"{where}: {module} has the factors {factors}; allowed: "
                f"{' or '.join(map(str, allowed))}, as in the base model (model.path)"
            )
    if not shapes:
        raise ConfigError(f"{where}: {_WEIGHTS} has no tensor; allowed: at least one layer's")
    return max(ranks)


def _list_linear_shapes(hf_config: HFConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes [out, in] of linear layers of the language model, without its output head.

    Names are those of modules, which PEFT writes, and those of a checkpoint's tensors.
    """
    model = build_empty_model(hf_config)
    rules = map_parameters(model) if has_images(hf_config) else {}  # else they have the same names
    decoder, shapes = model.get_decoder(), dict[str, tuple[int, ...]]()
    [prefix] = [name for name, module in model.named_modules() if module is decoder]
    for name, module in decoder.named_modules(prefix=prefix):
        if isinstance(module, torch.nn.Linear):
            shapes[name] = tuple(module.weight.shape)
            tensors = rules[f"{name}.weight"].tensors if rules else ()
            shapes |= {tensor.name.removesuffix(".weight"): tensor.shape for tensor in tensors}
    return shapes


def _describe_layers(names: Iterable[str]) -> str:
    """Return names with N for a layer's number, each once, and the highest number."""
    numbers = [int(number) for name in names for number in re.findall(r"\d+", name)]
    kinds = dict.fromkeys(re.sub(r"\d+", "N", name) for name in names)
    return f"{', '.join(kinds)}; N up to {max(numbers, default=0)}"
