"""The conformance suite of model families: rules, loading, training, export and conversion.

import transformers
from mcore_rl.testing import check_family

check_family("path/to/file.py:FAMILY", transformers.MistralConfig(hidden_size=64, ...))
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_engine import validate_layout, validate_model_layout
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.convert.plan import Resources
from mcore_rl.jobs.ranks import run_in_process
from mcore_rl.models.base import (
    HFConfig,
    get_family,
    get_model_sizes,
    get_vllm_weights,
    pad_vocab_size,
    read_config,
    scope_family,
    use_family,
)
from mcore_rl.planner.roles import format_axes
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.reshard.planner import TransferRequirements
from mcore_rl.reshard.rules import check_cover, list_logical_tensors
from mcore_rl.testing.engine import run_in_processes, unwrap_failures
from mcore_rl.weight_sync.spec import build_generation_side, build_training_side

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LAYOUTS = (Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, ep=2))
_SHARDS = (1, 2, 4)
_PRELOAD = "mcore_rl.testing.family", "mcore_rl.engine.megatron.engine", "mcore_rl.jobs.convert.run"


def check_family(
    family: str,
    config: PretrainedConfig,
    *,
    layouts: Sequence[Layout] | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Run a family through its contract, on a checkpoint with random weights.

    Its rules cover each tensor of the checkpoint once. The Megatron engine of each layout, on ranks
    in processes of its own, has the scores, the loss and the gradient norm of transformers, and
    exports the checkpoint bit for bit (the checks of engines). A conversion to Megatron's format
    and back is bit for bit the same. The rules of vLLM's parameters take each tensor; that they are
    those of vLLM's model, its workers check when a run starts.

    Args:
        family: Value of model.family: an import path, or "" for a family of this package.
        config: Config of transformers, of a small model, which is built.
        layouts: By default one rank and, where they divide the model, tp=2, pp=2, and tp=2 with
            ep=2.
        timeout_s: Limit of each layout, and of the conversion.

    Raises:
        AssertionError: The family does not do what the contract says; one sentence of both.
        ConfigError: There is no such family, or it refuses the config or a layout.
    """
    if hasattr(config, "vision_config"):
        raise ConfigError(
            f"check_family: {type(config).__name__} has a vision_config, and models with images "
            "are not made; allowed: a config of the language model, with its family"
        )
    # All processes need the model of transformers and Megatron: importing them takes the longest.
    model_module = type(config).__module__.replace(".configuration_", ".modeling_")
    preload = *_PRELOAD, model_module
    with scope_family(family), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"

        def run(name: str, job: Callable[[], object]) -> None:
            with unwrap_failures():
                run_in_process(job, name, Path(folder), timeout_s, preload)

        with _report("rules of weights"):
            run("rules", partial(_check_new_checkpoint, family, config, path))
        hf_config = read_config(path)
        for layout in layouts or [*_list_layouts(hf_config)]:
            validate_model_layout("layout", layout, get_model_sizes(hf_config))
            with _report(f"Megatron engine, {format_axes(layout)}"):
                run_in_processes(
                    "megatron", str(path), layout, family, timeout_s=timeout_s, preload=preload
                )
        with _report("conversion"):
            run("conversion", partial(check_conversion, family, str(path), folder))


@contextmanager
def _report(check: str) -> Iterator[None]:
    """Print a line when a check has passed."""
    start = time.monotonic()
    yield
    print(f"{check}: passed in {time.monotonic() - start:.1f} s", flush=True)


def _check_new_checkpoint(family: str, config: PretrainedConfig, path: Path) -> None:
    use_family(family)
    save_random_checkpoint(config, path)
    check_rules(path)


def save_random_checkpoint(config: PretrainedConfig, path: Path) -> None:
    """Save a model with random weights that are far from initial ones, so that errors show."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
            elif "norm" in name:
                is_centered = not parameter.any()  # scales by 1 + weight
                parameter.uniform_(0.7, 1.3).sub_(float(is_centered))
            else:
                parameter.normal_(0, 0.2)
    model.save_pretrained(path)


def _list_layouts(hf_config: HFConfig) -> Iterator[Layout]:
    for layout in _LAYOUTS:
        try:
            validate_layout("layout", layout)
            validate_model_layout("layout", layout, get_model_sizes(hf_config))
        except ConfigError:
            continue
        yield layout


def check_rules(path: Path) -> None:
    """Check the rules of training and of vLLM against the tensors of a checkpoint.

    Raises:
        AssertionError: They are not the tensors of the checkpoint, each once.
    """
    reader = CheckpointReader(path)
    hf_config = reader.read_config()
    family, sizes = get_family(hf_config), get_model_sizes(hf_config)
    weights = family.weights(hf_config, pad_vocab_size(hf_config, 1))
    try:
        reader.check(list_logical_tensors(weights))
    except ConfigError as error:
        text = str(error).removeprefix(f"checkpoint {path} ").removeprefix(f"checkpoint {path}: ")
        raise AssertionError(
            f"weights of {family.name!r}: the checkpoint {text}; the contract: rules of the "
            "tensors of the checkpoint, in their shapes"
        ) from error
    for count in _SHARDS:
        if all(size % count == 0 for size in (sizes.num_query_groups, *sizes.ffn_sizes)):
            padded = pad_vocab_size(hf_config, count)
            _check_cover(family.name, "weights", family.weights(hf_config, padded), count)
    if family.vllm_weights is None:
        return
    served = get_vllm_weights(hf_config)
    _check_cover(family.name, "vllm_weights", served, 1)
    names, served_names = (
        {tensor.name for weight in rules if weight.stage != "mtp" for tensor in weight.rule.tensors}
        for rules in (weights, served)
    )
    for kind, wrong in (("lack", names - served_names), ("add", served_names - names)):
        if wrong:
            raise AssertionError(
                f"vllm_weights of {family.name!r} {kind} {', '.join(sorted(wrong)[:3])}; the "
                "contract: the tensors of weights, without multi-token prediction"
            )
    for tp in _SHARDS[:2]:
        training = build_training_side(hf_config, Layout(), 0)
        _, generation = build_generation_side(hf_config, GenerationLayout(tp=tp))
        try:
            TransferRequirements(training, generation, 4)
        except ValueError as error:
            raise AssertionError(
                f"vllm_weights of {family.name!r} on tp={tp}: {error}; the contract: boxes of the "
                "tensors of weights"
            ) from error


def _check_cover(name: str, field: str, rules: Sequence[Any], count: int) -> None:
    try:
        check_cover(rules, count)
    except ValueError as error:
        raise AssertionError(
            f"{field} of {name!r} on {count} shards: {error}; the contract: each element of each "
            "tensor once"
        ) from error


def check_conversion(family: str, path: str, folder: str) -> dict[str, Any]:
    """Convert a checkpoint to Megatron's format and back, in a process that is no rank.

    Raises:
        AssertionError: A tensor is not bit for bit the same, or config.json says otherwise.
    """
    from mcore_rl.jobs.convert import to_hf, to_megatron

    use_family(family)
    resources = Resources(workers=1)
    converted, back = Path(folder) / "megatron", Path(folder) / "back"
    to_megatron.convert(Path(path), converted, Layout(), None, resources)
    to_hf.convert(converted, back, None, None, 1 << 30, "merge", resources)
    original, result = CheckpointReader(path), CheckpointReader(back)
    names = original.get_shapes().keys()
    if names != result.get_shapes().keys():
        raise AssertionError(
            "conversion to Megatron's format and back changes the names of tensors; the contract: "
            "the same checkpoint"
        )
    for name in names:
        if not torch.equal(original.read_tensor(name), result.read_tensor(name)):
            raise AssertionError(
                f"conversion to Megatron's format and back changes {name}; the contract: bit for "
                "bit the same"
            )
    return {}
