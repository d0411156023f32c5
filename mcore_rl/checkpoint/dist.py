"""Megatron's distributed checkpoints (torch_dist): ranks write shards, any layout reads them."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, package_info
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

from mcore_rl.config.errors import ConfigError

_STAMP = "mcore_rl.json"  # written last: a folder without it is no checkpoint
_VERSION = "megatron_core"  # in the stamp: who wrote it
OPTIMIZER_PREFIX = "optimizer."  # of the global names of optimizer state; all others are the model

# Of a tensor of a checkpoint: its shape, and whether rows may be missing at the end (vocabulary
# padding, whose length follows from the layout).
Shapes = dict[str, tuple[tuple[int, ...], bool]]


def save(state: ShardedStateDict, path: Path, facts: Mapping[str, Any]) -> None:
    """Write a new checkpoint folder, aside and then renamed. Collective over all ranks.

    `facts` go into the stamp, where read_stamp finds them.

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
        stamp = {_VERSION: package_info.__version__, **facts}
        (aside / _STAMP).write_text(json.dumps(stamp, indent=1))
        aside.rename(path)
    dist.barrier()


def read_stamp(path: Path) -> dict[str, Any]:
    """The facts that a checkpoint was saved with, and the version of megatron-core that wrote it.

    Raises:
        ConfigError: `path` is no complete checkpoint, or a newer megatron-core wrote it.
    """
    if not path.is_dir():
        raise ConfigError(f"checkpoint folder {path} does not exist")
    try:
        stamp = json.loads((path / _STAMP).read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} is not a complete checkpoint: it has no {_STAMP}") from None
    except ValueError as error:
        raise ConfigError(f"{path / _STAMP} is not readable: {error}") from None
    if not isinstance(stamp, dict) or not isinstance(stamp.get(_VERSION), str):
        raise ConfigError(f"{path / _STAMP} does not say which megatron-core wrote it")
    # 0.19.2 reads what 0.16.1 wrote, and fails the other way round.
    if _version(stamp[_VERSION]) > _version(package_info.__version__):
        raise ConfigError(
            f"{path} was written by megatron-core {stamp[_VERSION]}; {package_info.__version__} is "
            "installed and reads checkpoints of its own version and older ones"
        )
    return stamp


def load(state: ShardedStateDict, path: Path) -> dict[str, Any]:
    """The checkpoint's contents in the shards that `state` asks for. Collective over all ranks.

    Read read_stamp() first.

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


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
