"""Megatron's distributed checkpoints (torch_dist): ranks write shards, any layout reads them."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

from mcore_rl.checkpoint.stamp import write_stamp
from mcore_rl.config.errors import ConfigError

OPTIMIZER_PREFIX = "optimizer."  # of the global names of optimizer state; all others are the model

# Of a tensor of a checkpoint: its shape, and whether rows may be missing at the end (vocabulary
# padding, whose length follows from the layout).
Shapes = dict[str, tuple[tuple[int, ...], bool]]


def save(state: ShardedStateDict, path: Path, facts: Mapping[str, Any]) -> None:
    """Write a new checkpoint folder, aside and then renamed. Collective over all ranks.

    `facts` go into the stamp, where stamp.read_stamp finds them.

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
    dist_checkpointing.save(state, str(aside), **_save_arguments())
    dist.barrier()
    if dist.get_rank() == 0:
        write_stamp(aside, facts)
        aside.rename(path)
    dist.barrier()


def load(state: ShardedStateDict, path: Path) -> dict[str, Any]:
    """The checkpoint's contents in the shards that `state` asks for. Collective over all ranks.

    Call stamp.read_stamp first.

    Raises:
        ConfigError: the checkpoint is of another model. The same on every rank, before any of the
            tensors of `state` is written to.
    """
    wanted: Shapes = {}
    requests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(requests, _requested(state))
    for request in requests:
        wanted |= request
    stored = dist_checkpointing.load_tensors_metadata(str(path))
    if problems := differences({k: tuple(t.global_shape) for k, t in stored.items()}, wanted):
        more = f"; {len(problems) - 1} more differ" if len(problems) > 1 else ""
        raise ConfigError(f"{path} is a checkpoint of another model: {problems[0]}{more}")
    loaded: dict[str, Any] = dist_checkpointing.load(state, str(path))
    return loaded


def differences(stored: Mapping[str, tuple[int, ...]], wanted: Shapes) -> list[str]:
    """What of the `wanted` tensors of all ranks is not in a checkpoint, and the other way round.

    Optimizer state that nobody asks for is left alone: an engine for inference reads the model.
    """
    found = [f"it has no {key}" for key in sorted(wanted.keys() - stored.keys())]
    unused = (key for key in stored.keys() - wanted.keys() if not key.startswith(OPTIMIZER_PREFIX))
    found += [f"the model has no {key}" for key in sorted(unused)]
    for key in sorted(wanted.keys() & stored.keys()):
        shape, padded = wanted[key]
        first = 1 if padded else 0
        if len(shape) != len(stored[key]) or shape[first:] != stored[key][first:]:
            found.append(f"{key} has shape {stored[key]} there and {shape} here")
    return found


def _requested(state: ShardedStateDict) -> Shapes:
    tensors: Iterable[Any] = nested_values(load_preprocess(state)[0])
    return {
        tensor.key: (tuple(tensor.global_shape), bool(tensor.allow_shape_mismatch))
        for tensor in tensors
        if isinstance(tensor, ShardedTensor)
    }


def _save_arguments() -> dict[str, Any]:
    # 0.19.2 writes through a package of its own by default ("nvrx"); 0.16.1 has no such choice.
    known = inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}
