"""Megatron's distributed checkpoints (torch_dist): ranks write shards, any layout reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, package_info
from megatron.core.dist_checkpointing.mapping import ShardedStateDict

from mcore_rl.config.errors import ConfigError

_STAMP = "mcore_rl.json"  # written last: a folder without it is no checkpoint


def save(state: ShardedStateDict, path: Path) -> None:
    """Write a new checkpoint folder, aside and then renamed. Collective over all ranks.

    Raises:
        ConfigError: `path` exists.
    """
    if path.exists():
        raise ConfigError(f"checkpoint folder {path} already exists; name one that does not")
    aside = path.with_name(f".{path.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)  # what a killed run left
        aside.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(aside))
    dist.barrier()
    if dist.get_rank() == 0:
        stamp = {"megatron_core": package_info.__version__}
        (aside / _STAMP).write_text(json.dumps(stamp))
        aside.rename(path)
    dist.barrier()


def load(state: ShardedStateDict, path: Path) -> dict[str, Any]:
    """The checkpoint's contents in the shards that `state` asks for. Collective over all ranks.

    Raises:
        ConfigError: `path` is not a complete checkpoint of this project.
    """
    if not (path / _STAMP).is_file():
        raise ConfigError(f"{path} is not a complete checkpoint: it has no {_STAMP}")
    loaded: dict[str, Any] = dist_checkpointing.load(state, str(path))
    return loaded
