"""A Megatron checkpoint as a model: config, parameters, and tensors by Hugging Face names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint.files import INFO_FILE, read_checkpoint_info
from mcore_rl.checkpoint.hf import CheckpointReader, read_stacks
from mcore_rl.checkpoint.hf_writer import TensorPlan, plan_frozen_tensors
from mcore_rl.checkpoint.peft import Factors
from mcore_rl.checkpoint.run_checkpoints import find_actor, find_run_checkpoint
from mcore_rl.checkpoint.stacks import stack_slices
from mcore_rl.checkpoint.storage_location import StorageLocation
from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.checkpoint.torch_dist_metadata import BACKEND_FILE, DistTensor
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.regular_file import read_regular
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.convert.plan import UNSHARDED, Buffer, Parameter, PlannedAdapter, count_shards
from mcore_rl.models.base import HFConfig, drop_mtp_layers, read_config
from mcore_rl.models.heads import get_model_config, map_model_weights
from mcore_rl.reshard.rules import Box, LogicalTensor, Shard, Weight, parse_slice

COMPANIONS = "hf"  # folder in a checkpoint with config and tokenizer of its model
_LATEST = "latest_checkpointed_iteration.txt"
_EMBEDDING = "embedding.word_embeddings.weight"
# Tensors of the optimizer, as the engine and Megatron-LM name them, and of adapters.
_NOT_THE_MODEL = re.compile(r"(optimizer|chained_\d+)\.|lora\.")


@dataclass(frozen=True, slots=True)
class MegatronCheckpoint:
    """A checkpoint, opened and checked."""

    path: Path
    companions: Path  # folder with config.json, tokenizer files and perhaps weights
    weights: tuple[Weight, ...]  # rules of the model in Hugging Face's format
    parameters: tuple[Parameter, ...]  # those weights that the checkpoint has
    info: Mapping[str, Any]  # empty for a checkpoint of Megatron-LM
    reader: DistReader
    config_changes: HFConfig  # fields of config.json that differ from the companions'
    notes: tuple[str, ...]

    def list_stacks(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the stacked experts of the first checkpoint, by name."""
        if (stacks := self.info.get("expert_stacks")) is not None:
            return {name: tuple(shape) for name, shape in stacks.items()}
        return read_stacks(self.companions) if any(self.companions.glob("*.safetensors")) else {}

    def plan_frozen(self) -> list[TensorPlan]:
        """Return the frozen tensors of the model, which the companions have.

        Raises:
            ConfigError: The companions are a folder without weights.
        """
        is_written = self.companions == self.path / COMPANIONS  # by hf-to-mcore
        if is_written and not any(self.companions.glob("*.safetensors")):
            return []  # nor did the first checkpoint have any
        return plan_frozen_tensors(self.companions)

    @property
    def num_chunks(self) -> int:
        """Number of chunks in its index."""
        return sum(len(tensor.chunks) for tensor in self.reader.tensors.values())

    def get_hf_dtype(self, name: str, stored: torch.dtype) -> torch.dtype:
        """Return the dtype before the conversion from Hugging Face's format; else `stored`."""
        known = self.info.get("hf_dtypes")
        if known is None:
            return stored
        dtype: torch.dtype = getattr(torch, known["others"].get(name, known["most"]))
        return dtype

    @property
    def lora(self) -> Mapping[str, Any] | None:
        """Rank, alpha and targets of its adapters."""
        return self.info.get("lora")


def is_megatron_checkpoint(path: Path) -> bool:
    """Return whether a folder has a Megatron checkpoint, of this package or of Megatron-LM."""
    path = find_actor(path)
    return (path / BACKEND_FILE).is_file() or (path / _LATEST).is_file()


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint folder: `path`, or the latest of a run or of Megatron-LM in `path`.

    Raises:
        ConfigError: There is none.
    """
    path = find_actor(path)
    latest = path / _LATEST
    if (path / BACKEND_FILE).is_file() or not latest.is_file():
        return path
    try:
        text = read_regular(latest, 255).decode(errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"{latest} cannot be read: {error.strerror}") from error
    name = f"iter_{int(text):07d}" if text.isdecimal() else text
    is_inside = "/" not in name and name != ".."
    if not is_inside or not (path / name / BACKEND_FILE).is_file():
        raise ConfigError(f"{latest} says {text!r}, and {path / name} is no distributed checkpoint")
    return path / name


def open_megatron_checkpoint(path: Path, reference: Path | None) -> MegatronCheckpoint:
    """Read the index of a checkpoint, and check it against the rules of its family.

    Args:
        reference: Hugging Face folder of the model, if the checkpoint does not name one.

    Raises:
        ConfigError: It is damaged, of another model, or does not say which model it is of.
    """
    path = find_checkpoint(path)
    info = read_checkpoint_info(path) if (path / INFO_FILE).exists() else {}
    companions = reference or path / COMPANIONS
    if not reference and (run_checkpoint := find_run_checkpoint(path)):
        companions = run_checkpoint.model
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
    # Without quantization: the checkpoint has plain weights.
    config = {n: v for n, v in read_config(companions).items() if n != "quantization_config"}
    config = stored_config = get_model_config(config)
    notes: tuple[str, ...] = ()
    changes: HFConfig = {}
    if not any(key.startswith("mtp.") for key in tensors):
        stored_config = drop_mtp_layers(config)
        if stored_config != config and _has_mtp_weights(companions):
            notes = (f"the checkpoint has no prediction layers: they come from {companions}",)
        elif stored_config != config:
            notes = ("the checkpoint has no prediction layers: config.json will say 0 of them",)
            changes = {name: n for name, n in stored_config.items() if config.get(name) != n}
            config = stored_config
    weights = map_model_weights(config, padded)
    from mcore_rl.engine.megatron.conversion import build_meta_model  # imports Megatron

    locations = build_meta_model(stored_config, padded).locate_parameters(tensors)
    _check_tensors(path, tensors, locations.values())
    layout, lora = Layout(**info.get("layout", {})), info.get("lora")
    parameters = []
    for weight in weights:
        name, adapter = weight.get_local_name(), None
        if not weight.replica and name in locations:
            if lora and f"lora.{name}.A" in tensors:
                adapter = PlannedAdapter(lora["alpha"] / lora["rank"], count_shards(weight, layout))
            dtype = tensors[next(iter(locations[name].list_tensors()))].dtype
            parameters.append(Parameter(weight, locations[name], dtype, adapter))
    return MegatronCheckpoint(
        path, companions, weights, tuple(parameters), info, reader, changes, notes
    )


def _check_tensors(
    path: Path, tensors: Mapping[str, DistTensor], locations: Iterable[StorageLocation]
) -> None:
    """Raise ConfigError for a tensor of another shape, and for one that the model does not have."""
    used = {key: s for location in locations for key, s in location.list_tensors().items()}
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


def _has_mtp_weights(folder: Path) -> bool:
    """Return whether a Hugging Face folder has weights, with those of prediction layers."""
    if not any(folder.glob("*.safetensors")):
        return False
    config = CheckpointReader(folder).read_config()
    return drop_mtp_layers(config) != config


# Tensors. Imports no Megatron.


class MegatronTensors:
    """Hugging Face tensors of a checkpoint, read one after the other into one buffer.

    A tensor is valid until one of another parameter is read: read those of a parameter in a row.
    """

    def __init__(
        self, reader: DistReader, parameters: Iterable[Parameter], buffer: Buffer | None = None
    ) -> None:
        self._reader = reader
        self._buffer = buffer or Buffer()
        self._planned = tuple(parameters)
        self._parameters: dict[str, Parameter] = {}
        self._slices: dict[str, list[LogicalTensor]] = {}  # by the stack
        for parameter in self._planned:
            for tensor in parameter.weight.rule.tensors:
                self._parameters |= dict.fromkeys((tensor.name, *tensor.aliases), parameter)
                if (part := parse_slice(tensor.name)) is not None:
                    self._slices.setdefault(part.stack, []).append(tensor)
        self._current: Parameter | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._parameters or name in self._slices

    def read(self, name: str) -> torch.Tensor:
        """Read a full tensor, merged with its adapter. The caller does not write to it.

        Raises:
            ConfigError: The checkpoint is damaged.
        """
        if name in self._slices:
            return self._read_stack(name)
        parameter = self._parameters[name]
        if parameter is not self._current:
            self._tensors = {}  # freed before the next tensors are allocated
            self._tensors, self._current = self._read(parameter), parameter
        return self._tensors[name]

    def _read_stack(self, name: str) -> torch.Tensor:
        tensors = self._slices[name]
        pairs = ((tensor.name, self.read(tensor.name)) for tensor in tensors)
        [(_, stack)] = stack_slices(pairs, tensors)
        return stack

    def _read(self, parameter: Parameter) -> dict[str, torch.Tensor]:
        full = self._buffer.view(parameter.shape, parameter.dtype)
        for stored in parameter.location.locate(parameter.box):
            rows = full[stored.row :][: stored.box.sizes[len(parameter.location.index)]]
            self._reader.read(stored.key, stored.box, rows.view(stored.box.sizes))
        rule = parameter.weight.rule
        tensors: dict[str, torch.Tensor] = {}
        for tensor in rule.tensors:
            blocks = [block for block in rule.get_blocks(UNSHARDED) if block.tensor == tensor]
            if len(blocks) == 1:  # its rows are contiguous
                tensors[tensor.name] = full[blocks[0].local_slices]
                continue
            tensors[tensor.name] = gathered = full.new_empty(tensor.shape)
            for block in blocks:
                gathered[block.box.slices] = full[block.local_slices]
        if parameter.adapter is not None:
            self._merge(parameter, tensors)
        return {n: tensors[t.name] for t in rule.tensors for n in (t.name, *t.aliases)}

    def _merge(self, parameter: Parameter, tensors: dict[str, torch.Tensor]) -> None:
        """Add the product of the factors, shard by shard like the ranks of the engine.

        Same arithmetic in the same shapes as Adapter.forward of engine/megatron/lora.py, so the
        result has the same bits.
        """
        adapter, rule = parameter.adapter, parameter.weight.rule
        assert adapter is not None
        a, b = self.read_factors(parameter)
        for index in range(adapter.num_shards):
            shard = Shard(index, adapter.num_shards)
            blocks = sorted(rule.get_blocks(shard), key=lambda block: block.local_offset)
            local = torch.empty(rule.get_local_shape(shard), dtype=torch.float32)
            for block in blocks:
                local[block.local_slices] = tensors[block.tensor.name][block.box.slices]
            rows = torch.cat([b[block.tensor.name][block.box.slices[0]] for block in blocks])
            columns = a[:, blocks[0].box.slices[1]].contiguous()
            merged = torch.addmm(local, rows.float(), columns.float(), alpha=adapter.scale)
            merged = merged.to(parameter.dtype)
            for block in blocks:
                tensors[block.tensor.name][block.box.slices] = merged[block.local_slices]

    def read_all_factors(self) -> Iterator[Factors]:
        """Yield the factors of all adapters. Tensors of one parameter share their A."""
        for parameter in self._planned:
            if parameter.adapter is not None:
                a, b = self.read_factors(parameter)
                yield from (Factors(tensor, a, factor) for tensor, factor in b.items())

    def read_factors(self, parameter: Parameter) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Read A [rank, in] of a parameter, and B [out, rank] of each of its tensors."""
        prefix = f"lora.{parameter.weight.get_local_name()}"
        names = [tensor.name for tensor in parameter.weight.rule.tensors]
        factors = {name: self._read_stored(f"{prefix}.B.{name}") for name in names}
        return self._read_stored(f"{prefix}.A"), factors

    def _read_stored(self, key: str) -> torch.Tensor:
        shape = self._reader.tensors[key].shape
        return self._reader.read(key, Box((0,) * len(shape), shape))


def compute_read_bytes(parameters: Sequence[Parameter]) -> int:
    """Return the memory of MegatronTensors: a parameter, tensors that are copied, its adapter."""
    full = gathered = merged = 0
    for parameter in parameters:
        rule, adapter = parameter.weight.rule, parameter.adapter
        full = max(full, parameter.nbytes)
        if adapter is not None or len(rule.get_blocks(UNSHARDED)) > len(rule.tensors):
            gathered = max(gathered, parameter.nbytes)
        if adapter is not None:  # a shard in float32, its sum with the adapter, the rounded sum
            shape = rule.get_local_shape(Shard(0, adapter.num_shards))
            element = 2 * torch.float32.itemsize + parameter.dtype.itemsize
            merged = max(merged, math.prod(shape) * element)
    return full + gathered + merged
