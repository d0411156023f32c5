"""A Megatron checkpoint as a model: its config, and where each of its parameters is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint.files import INFO_FILE, read_checkpoint_info
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.run_checkpoints import find_actor, find_run_checkpoint
from mcore_rl.checkpoint.storage_location import StorageLocation
from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.checkpoint.torch_dist_metadata import BACKEND_FILE, DistTensor
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.convert.plan import Parameter, PlannedAdapter, num_shards
from mcore_rl.models.base import HFConfig, drop_mtp_layers, read_config
from mcore_rl.models.heads import get_model_config, map_model_weights
from mcore_rl.reshard.rules import Weight

COMPANIONS = "hf"  # folder of a checkpoint with config and tokenizer of its model
_LATEST = "latest_checkpointed_iteration.txt"
_EMBEDDING = "embedding.word_embeddings.weight"
# Of the optimizer, as the engine and as Megatron-LM name it; and adapters, which are asked for.
_NOT_THE_MODEL = re.compile(r"(optimizer|chained_\d+)\.|lora\.")


@dataclass(frozen=True, slots=True)
class MegatronFolder:
    """A checkpoint's model."""

    path: Path
    companions: Path  # folder with config.json, tokenizer files and perhaps weights
    weights: tuple[Weight, ...]  # the rules of the model as it is to be written
    parameters: tuple[Parameter, ...]  # what the checkpoint contains of them
    info: Mapping[str, Any]  # empty for a checkpoint of Megatron-LM
    reader: DistReader
    config_changes: HFConfig  # fields of config.json that differ from the companions'
    notes: tuple[str, ...]

    @property
    def num_chunks(self) -> int:
        """All that its index names."""
        return sum(len(tensor.chunks) for tensor in self.reader.tensors.values())

    def hf_dtype(self, name: str, stored: torch.dtype) -> torch.dtype:
        """Of a tensor in the Hugging Face folder that this was converted from, else as stored."""
        known = self.info.get("hf_dtypes")
        if known is None:
            return stored
        dtype: torch.dtype = getattr(torch, known["others"].get(name, known["most"]))
        return dtype

    @property
    def lora(self) -> Mapping[str, Any] | None:
        """Rank, alpha and targets of the adapters in it."""
        return self.info.get("lora")


def is_megatron(path: Path) -> bool:
    path = find_actor(path)
    return (path / BACKEND_FILE).is_file() or (path / _LATEST).is_file()


def checkpoint_in(path: Path) -> Path:
    """The checkpoint folder itself, where a run or Megatron-LM keeps several under one.

    Raises:
        ConfigError: there is none.
    """
    path = find_actor(path)
    latest = path / _LATEST
    if (path / BACKEND_FILE).is_file() or not latest.is_file():
        return path
    text = latest.read_text().strip()
    name = f"iter_{int(text):07d}" if text.isdecimal() else text
    if not (path / name / BACKEND_FILE).is_file():
        raise ConfigError(f"{latest} says {text!r}, and {path / name} is no distributed checkpoint")
    return path / name


def open_megatron(path: Path, reference: Path | None) -> MegatronFolder:
    """Read what a checkpoint is, and check it as a whole against the rules of its family.

    Raises:
        ConfigError: it is damaged, of another model, or does not say which model it is of.
    """
    path = checkpoint_in(path)
    info = read_checkpoint_info(path) if (path / INFO_FILE).exists() else {}
    companions = reference or path / COMPANIONS
    if not reference and (of_run := find_run_checkpoint(path)):
        companions = of_run.model
    if not (companions / "config.json").is_file():
        where = f": there is no {companions}" if companions != path / COMPANIONS else ""
        raise ConfigError(
            f"{path} does not say which model it is of{where}; name a Hugging Face folder of that "
            "model with --reference"
        )
    reader = DistReader(path)
    tensors = reader.tensors
    if _EMBEDDING not in tensors:
        raise ConfigError(f"checkpoint {path} lacks tensor {_EMBEDDING}")
    padded = tensors[_EMBEDDING].shape[0]
    # The config of the same model with plain weights.
    config = {n: v for n, v in read_config(companions).items() if n != "quantization_config"}
    config = held = get_model_config(config)
    notes: tuple[str, ...] = ()
    changes: HFConfig = {}
    if not any(key.startswith("mtp.") for key in tensors):
        held = drop_mtp_layers(config)
        if held != config and _has_predictions(companions):
            notes = (f"the checkpoint has no prediction layers: they come from {companions}",)
        elif held != config:
            notes = ("the checkpoint has no prediction layers: config.json will say 0 of them",)
            changes = {name: n for name, n in held.items() if config[name] != n}
            config = held
    weights = map_model_weights(config, padded)
    from mcore_rl.engine.megatron.meta_model import meta_model  # imports Megatron

    locations = meta_model(held, padded).parameters_in(tensors)
    _check(path, tensors, locations.values())
    layout, lora = Layout(**info.get("layout", {})), info.get("lora")
    parameters = []
    for weight in weights:
        name, adapter = weight.get_local_name(), None
        if not weight.replica and name in locations:
            if lora and f"lora.{name}.A" in tensors:
                adapter = PlannedAdapter(lora["alpha"] / lora["rank"], num_shards(weight, layout))
            dtype = tensors[locations[name].key].dtype
            parameters.append(Parameter(weight, locations[name], dtype, adapter))
    return MegatronFolder(
        path, companions, weights, tuple(parameters), info, reader, changes, notes
    )


def _check(
    path: Path, tensors: Mapping[str, DistTensor], locations: Iterable[StorageLocation]
) -> None:
    """Raise ConfigError unless a checkpoint has what it should of the model, and no more."""
    used = {place.key: place.shape for place in locations}
    for key, shape in used.items():
        if tensors[key].shape != shape:
            raise ConfigError(
                f"checkpoint {path}: {key} has shape {tensors[key].shape}, but config.json asks "
                f"for {shape}"
            )
    extra = sorted(key for key in tensors.keys() - used if not _NOT_THE_MODEL.match(key))
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ConfigError(f"checkpoint {path} has unexpected tensor {extra[0]}{more}")


def _has_predictions(folder: Path) -> bool:
    """Whether a Hugging Face folder has weights, those of prediction layers among them."""
    if not any(folder.glob("*.safetensors")):
        return False
    config = CheckpointReader(folder).read_config()
    return drop_mtp_layers(config) != config
