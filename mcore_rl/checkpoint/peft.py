"""LoRA adapters: the weights that can have one, and adapters in PEFT's format.

PEFT (https://github.com/huggingface/peft, src/peft/utils/save_and_load.py) reads a folder with
adapter_config.json and adapter_model.safetensors, whose tensors are called
`base_model.model.MODULE.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank].
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
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
from mcore_rl.models.transformers_model import build_empty_model, map_parameters
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
    "target_parameters": (None, []),
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
    folder: Path, factors: Callable[[], Iterator[Factors]], rank: int, alpha: float
) -> None:
    """Write a folder with all adapters.

    Args:
        factors: Called twice, for shapes and for tensors.

    Raises:
        OSError: It cannot be written.
    """
    folder.mkdir(exist_ok=True)
    plans = [TensorPlan(n, tuple(t.shape), t.dtype) for n, t in _name_tensors(factors())]
    [shard] = plan_shards(plans, sum(plan.nbytes for plan in plans))
    write_shard(folder, replace(shard, file=_WEIGHTS), _name_tensors(factors()))
    config = build_adapter_config([plan.name for plan in plans], rank, alpha)
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def pack_adapters(factors: Iterable[Factors]) -> bytes:
    """Return all adapters as the bytes of a safetensors file with PEFT's names."""
    # Tensors of a fused layer share their A, which a file has for each.
    tensors = {name: value.clone() for name, value in _name_tensors(iter(factors))}
    content: bytes = safetensors.torch.save(tensors)
    return content


def build_adapter_config(names: Iterable[str], rank: int, alpha: float) -> dict[str, Any]:
    """Return adapter_config.json of adapters; `names` are those of their tensors."""
    suffix = ".lora_A.weight"
    modules = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }


def _name_tensors(factors: Iterator[Factors]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the factors as tensors, by their names in PEFT's file."""
    for tensor, a, b in factors:
        module = f"base_model.model.{tensor.removesuffix('.weight')}"
        yield f"{module}.lora_A.weight", a
        yield f"{module}.lora_B.weight", b


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
