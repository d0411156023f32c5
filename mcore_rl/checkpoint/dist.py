"""Megatron's distributed checkpoints (torch_dist): ranks write shards, any layout reads them."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async

from mcore_rl.checkpoint.checkpoint_info import write_checkpoint_info
from mcore_rl.checkpoint.storage_location import CONTENT_METADATA
from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.config.errors import ConfigError

# How keys begin: of optimizer state (several optimizers may have prefixes of their own), of layers
# for multi-token prediction, of decoder layers.
_OPTIMIZER, _MTP, _LAYERS = ("optimizer.", "chained_"), "mtp.", "decoder.layers."

# Of a tensor of a checkpoint: its shape, and whether rows may be missing at the end (vocabulary
# padding, whose length follows from the layout).
Shapes = dict[str, tuple[tuple[int, ...], bool]]


def save(state: ShardedStateDict, path: Path, facts: Mapping[str, Any]) -> None:
    """Write a new checkpoint folder, aside and then renamed. Collective over all ranks.

    `facts` go into the checkpoint info, where checkpoint_info.read_checkpoint_info finds them.

    Raises:
        ConfigError: `path` exists.
    """
    if path.exists():
        raise ConfigError(f"checkpoint folder {path} already exists; name one that does not")
    aside = path.with_name(f".{path.name}.partial")
    dist.barrier()  # nobody looks for `path` after rank 0 has made it
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)  # what a killed run left
        aside.mkdir(parents=True)
    dist.barrier()
    # Nothing is saved behind the run's back, so results stay in this process. Megatron would start
    # one for their queue (filesystem_async.py:51): seconds, and it outlives a rank that is killed.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(state, str(aside), content_metadata=dict(CONTENT_METADATA))
    dist.barrier()
    if dist.get_rank() == 0:
        write_checkpoint_info(aside, facts)
        aside.rename(path)
    dist.barrier()


def is_checkpoint(path: Path) -> bool:
    """Whether the folder contains a distributed checkpoint of any program."""
    return all((path / name).is_file() for name in (".metadata", "metadata.json"))


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor of a checkpoint, whole, by its key."""
    return {key: tensor.shape for key, tensor in DistReader(path).tensors.items()}


def are_layers_stacked(keys: Iterable[str]) -> bool:
    """Whether a checkpoint with these keys has one tensor for all decoder layers.

    Which it is follows from settings of the run that saved it (transformer_block.py:822).
    """
    return any(
        key.startswith(_LAYERS) and not key.removeprefix(_LAYERS).split(".")[0].isdigit()
        for key in keys
    )


def load(
    state: ShardedStateDict, path: Path, stored: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The checkpoint's contents in the shards that `state` asks for. Collective over all ranks.

    `stored` are its tensor_shapes.

    Raises:
        ConfigError: the checkpoint is of another model, or Megatron cannot read it, or not without
            running code from it. The same on every rank, before any of the tensors of `state` is
            written to.
    """
    asked = list(nested_values(load_preprocess(state)[0]))
    replies: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(replies, (_requested(asked), _unsafe(asked, path)))
    wanted: Shapes = {}
    for request, unsafe in replies:
        if unsafe:
            raise ConfigError(unsafe)
        wanted |= request
    if problems := differences(stored, wanted):
        more = f"; {len(problems) - 1} more differ" if len(problems) > 1 else ""
        raise ConfigError(f"{path} is a checkpoint of another model: {problems[0]}{more}")
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(path))
    except (CheckpointingException, UnpicklingError) as error:
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    return loaded


def differences(stored: Mapping[str, tuple[int, ...]], wanted: Shapes) -> list[str]:
    """What of the `wanted` tensors of all ranks is not in a checkpoint, and the other way round.

    Optimizer state that is not wanted is ignored: an engine for inference reads the model. So
    are layers for multi-token prediction where the model has none: it is not trained to predict.
    """
    found = [f"it has no {key}" for key in sorted(wanted.keys() - stored.keys())]
    predicts = any(key.startswith(_MTP) for key in wanted)
    left_alone = _OPTIMIZER if predicts else (*_OPTIMIZER, _MTP)
    unused = (key for key in stored.keys() - wanted.keys() if not key.startswith(left_alone))
    found += [f"the model has no {key}" for key in sorted(unused)]
    for key in sorted(wanted.keys() & stored.keys()):
        shape, padded = wanted[key]
        first = 1 if padded else 0
        if len(shape) != len(stored[key]) or shape[first:] != stored[key][first:]:
            found.append(f"{key} has shape {stored[key]} there and {shape} here")
    return found


def _requested(asked: Iterable[Any]) -> Shapes:
    return {
        tensor.key: (tuple(tensor.global_shape), bool(tensor.allow_shape_mismatch))
        for tensor in asked
        if isinstance(tensor, ShardedTensor)
    }


def _unsafe(asked: Iterable[Any], path: Path) -> str | None:
    """What of the objects that this rank asks for must not be given to Megatron: it runs pickles.

    torch loads objects with weights_only=False (distributed/checkpoint/default_planner.py:389).
    """
    keys = {entry.unique_key for entry in asked if isinstance(entry, ShardedObject)}
    try:
        stored = DistReader(path)
        stored.check_common()
        for key in sorted(keys & stored.objects.keys()):
            stored.check_object(key)
    except ConfigError as error:
        return str(error)
    return None
