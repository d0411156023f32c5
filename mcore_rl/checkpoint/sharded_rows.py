"""Checkpoints of sharded models: each rank writes its rows, any number of ranks reads them.

A folder has one safetensors file per rank of the first replica. An entry is the rows of a
parameter, or of a moment of Adam, that a rank has; names are "weight.NAME", "exp_avg.NAME" and
"exp_avg_sq.NAME". The manifest says how ranks divided the model, which is all it takes to find a
row (reshard/layout.ShardedRanks).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mcore_rl.checkpoint.files import (
    Checksum,
    build_manifest,
    publish_folder,
    read_checkpoint_info,
    write_checkpoint_info,
)
from mcore_rl.config.atomic_file import create_folder, get_partial_path
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.layout import Holders, ShardedRanks
from mcore_rl.reshard.rules import Shard, StackedRows, Weight

# By name of an entry: the rule of its parameter, this rank's shard, and its rows.
State = Mapping[str, tuple[Weight, Shard, torch.Tensor]]
_RANKS = "ranks"  # world size, replicas and expert-parallel ranks of a checkpoint


def get_rows(weight: Weight, shard: Shard) -> range:
    """Return the rows of a shard in the whole parameter, that of all expert-parallel ranks."""
    if not isinstance(weight.rule, StackedRows):
        return range(weight.rule.get_local_shape(shard)[0] if weight.rule.tensors[0].shape else 1)
    rule, first = weight.rule, 0
    if weight.expert is not None:
        rows = sum(part.shape[0] for part in rule.parts)
        first = weight.expert // rule.num_units * rows
    local = rule.get_rows(shard)
    return range(first + local.start, first + local.stop)


def save(path: Path, state: State, ranks: ShardedRanks, facts: Mapping[str, Any]) -> None:
    """Write a checkpoint into a new folder. Collective over all ranks.

    Raises:
        ConfigError: `path` exists.
        OSError: It cannot be written; the same on every rank, and nothing is left.
    """
    if path.exists():
        raise ConfigError(f"checkpoint folder {path} already exists; name one that does not")
    rank, partial_path = dist.get_rank(), get_partial_path(path)
    files: dict[str, Checksum] = {}

    def write() -> None:
        if rank < ranks.num_shards:
            host = {name: rows.contiguous().cpu() for name, (_, _, rows) in state.items()}
            save_file(
                {n: t for n, t in host.items() if t.numel()}, partial_path / _get_file_name(rank)
            )
            files.update(build_manifest([partial_path / _get_file_name(rank)]))

    reason = exchange_reason((lambda: create_folder(partial_path)) if rank == 0 else None)
    reason = reason or exchange_reason(write)
    manifests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(manifests, files)

    def publish() -> None:
        manifest = {name: checksum for part in manifests for name, checksum in part.items()}
        sizes = {_RANKS: [ranks.world_size, ranks.num_replicas, ranks.ep]}
        write_checkpoint_info(partial_path, {**facts, **sizes}, manifest)
        publish_folder(partial_path, path, partial_path.iterdir())

    reason = reason or exchange_reason(publish if rank == 0 else None)
    if reason:
        if rank == 0:
            shutil.rmtree(partial_path, ignore_errors=True)
        raise OSError(f"{path} cannot be written: {reason}")


def exchange_reason(action: Callable[[], None] | None) -> str:
    """Run what this rank has to do; return why it failed on the first rank where it did."""
    reason = ""
    try:
        if action is not None:
            action()
    except (ConfigError, OSError, SafetensorError) as error:
        reason = str(error)
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), "")


def _get_file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def load(
    path: Path,
    state: State,
    facts: Mapping[str, Any],
    map_weights: Callable[[int], tuple[Weight, ...]],
) -> int:
    """Read the rows of this rank from a checkpoint of any number of ranks; return its steps.

    Args:
        facts: Facts that it must have been saved with.
        map_weights: From expert-parallel ranks to the rules of all parameters.

    Raises:
        ConfigError: It is incomplete, of another model, or has no optimizer state.
    """
    info = read_checkpoint_info(path)
    for name, value in facts.items():
        is_enough = name == "has_optimizer" and not value  # weights are there in any case
        if info.get(name) != value and not is_enough:
            raise ConfigError(
                f"checkpoint {path} has {name}={info.get(name)!r}; this run needs {value!r}"
            )
    world_size, num_replicas, ep = info[_RANKS]
    saved_ranks = ShardedRanks(world_size, num_replicas, ep)
    saved: dict[str, list[tuple[range, int]]] = {}  # by parameter: rows, rank that has them
    for weight in map_weights(ep):
        holders = saved_ranks.get_holders(weight)
        for index, members in enumerate(holders):
            rows = get_rows(weight, Shard(index, len(holders)))
            saved.setdefault(weight.name, []).append((rows, members[0]))
    if reason := exchange_reason(partial(_read_rows, path, state, saved)):
        raise ConfigError(reason)
    return int(info["num_steps"])


def _read_rows(path: Path, state: State, saved: Mapping[str, Sequence[tuple[range, int]]]) -> None:
    """Fill the rows of this rank; `saved` are those of each rank that has written."""
    readers: dict[int, Any] = {}
    for name, (weight, shard, local) in state.items():
        needed = get_rows(weight, shard)
        for rows, rank in saved[weight.name]:
            start, end = max(needed.start, rows.start), min(needed.stop, rows.stop)
            if start >= end:
                continue
            file = path / _get_file_name(rank)
            try:
                if rank not in readers:
                    readers[rank] = safe_open(file, "pt")
                if local.dim():
                    stored = readers[rank].get_slice(name)[start - rows.start : end - rows.start]
                else:
                    stored = readers[rank].get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{file}: {name}: {error}") from error
            target = local[start - needed.start : end - needed.start] if local.dim() else local
            if stored.shape != target.shape:
                raise ConfigError(
                    f"{file}: {name} has rows of {tuple(stored.shape)}; allowed: "
                    f"{tuple(target.shape)}"
                )
            target.copy_(stored)


def gather_rows(
    weight: Weight,
    holders: Holders,
    rows: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """Return a whole parameter on rank 0, None on others. Collective over all ranks.

    Args:
        rows: Rows of this rank; None if it has none of this weight.
        dtype: Dtype of the messages and the result.
        device: Device of the messages and the result.
    """
    rank, parts = dist.get_rank(), []
    for index, members in enumerate(holders):
        shape = weight.rule.get_local_shape(Shard(index, len(holders)))
        if shape and not shape[0]:
            continue
        if rank == members[0]:
            assert rows is not None
            message = rows.to(device, dtype).contiguous()
            if rank == 0:
                parts.append(message)
            else:
                dist.send(message, 0)
        elif rank == 0:
            parts.append(torch.empty(shape, dtype=dtype, device=device))
            dist.recv(parts[-1], members[0])
    if rank:
        return None
    return torch.cat(parts) if parts[0].dim() else parts[0]
