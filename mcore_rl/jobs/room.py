"""Disk space for the weights of a run: checked before it starts, found elsewhere if needed."""

from __future__ import annotations

import math
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint.run_checkpoints import list_steps
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import EngineConfig, RLConfig
from mcore_rl.config.train_schema import TrainConfig
from mcore_rl.jobs.convert.options import format_bytes
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.jobs.placement import needs_critic
from mcore_rl.models.base import get_family, pad_vocab_size, read_config
from mcore_rl.models.heads import build_value_config, map_value_weights
from mcore_rl.reshard.rules import Weight, list_logical_tensors
from mcore_rl.trainers.checkpointing import CHECKPOINTS, HF

_MEMORY = "/dev/shm"
# Read before the scope of a run points TMPDIR to a folder that goes with the run.
_ELSEWHERE = tuple(dict.fromkeys((tempfile.gettempdir(), "/var/tmp", _MEMORY)))


def weight_bytes(config: RLConfig | TrainConfig) -> int:
    """Of the model's weights in a Hugging Face checkpoint of model.dtype."""
    hf_config = read_config(config.model.path)
    weights = get_family(hf_config).weights(hf_config, pad_vocab_size(hf_config, 1))
    return _bytes_of(weights, config.model.dtype)


def critic_bytes(config: RLConfig) -> int:
    """Of the weights of the value model, in model.dtype."""
    starts_from = read_config(config.critic.model_path or config.model.path)
    hf_config = build_value_config(starts_from)
    weights = map_value_weights(hf_config, pad_vocab_size(hf_config, 1))
    return _bytes_of(weights, config.model.dtype)


def _bytes_of(weights: Sequence[Weight], dtype: str) -> int:
    itemsize = getattr(torch, dtype).itemsize
    return sum(
        math.prod(tensor.shape) * (torch.float32.itemsize if weight.float32 else itemsize)
        for weight in weights
        for tensor in list_logical_tensors([weight])
    )


def check_room(config: RLConfig, folder: Path, done: int = 0) -> None:
    """Raise ConfigError when the disk under `folder` has too little space for a run.

    `done` is the step after which it goes on.
    """
    copies = {"the checkpoint": 1}
    if config.warm_start.num_steps:
        copies["the warm start's"] = 1
    if config.weight_sync.method == "full_export":
        copies["weights exported for the servers"] = 1
    size = weight_bytes(config)
    sizes = {name: size * n for name, n in copies.items()}
    if config.trainer.save_every:
        sizes["training checkpoints"] = training_bytes(config, config.actor, size, folder)
        if needs_critic(config):
            critic = training_bytes(config, config.critic, critic_bytes(config), folder)
            sizes["training checkpoints of the critic"] = critic
    sizes |= export_sizes(config, size, folder, done)
    refuse_more(config.output_dir, folder, sizes)


def refuse_more(output_dir: str, folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError when the disk under `folder` has less space than these bytes."""
    free, needed = shutil.disk_usage(folder).free, sum(sizes.values())
    if needed > free:
        parts = ", ".join(f"{format_bytes(n)} {name}" for name, n in sizes.items())
        raise ConfigError(
            f"output_dir={output_dir!r} has {format_bytes(free)} left; needed are "
            f"{format_bytes(needed)} ({parts})"
        )


def export_sizes(
    config: RLConfig | TrainConfig, weights: int, folder: Path, done: int = 0
) -> dict[str, int]:
    """Of the exports of checkpoint.hf_every that are still to come: all of them stay."""
    every, last = config.checkpoint.hf_every, config.trainer.num_steps
    if not every:
        return {}
    due = {step for step in range(every, last + 1, every) if step > done}
    to_come = due - {*list_steps(folder / HF)}  # others are replaced
    return {"exports": weights * len(to_come)} if to_come else {}


def training_bytes(
    config: RLConfig | TrainConfig, engine: EngineConfig, weights: int, folder: Path
) -> int:
    """Of the training checkpoints that are still to come, as many as are there at once."""
    itemsize = getattr(torch, config.model.dtype).itemsize
    optimizer = engine.optimizer
    of_adam = 0 if engine.lora.rank else 8  # two moments; those of adapters are small
    if of_adam and (optimizer.distributed or itemsize < 4):
        of_adam += 4  # the weights in float32
    written = 1 + (config.trainer.num_steps - 1) // config.trainer.save_every
    at_once = min(config.checkpoint.keep + bool(config.checkpoint.keep_best) + 1, written)
    there = len(list_steps(folder / CHECKPOINTS))
    return weights * (itemsize + of_adam) // itemsize * max(at_once - there, 1)


def export(model: Any, path: Path, num_bytes: int) -> None:
    """Write the weights of a model, a group of ModelWorker, to `path`.

    Raises:
        RunFailed: that is not possible. Where the weights are instead, it says.
    """
    place, told = kept(model, path, num_bytes)
    if place != path:
        raise RunFailed(told)


def kept(model: Any, path: Path, num_bytes: int) -> tuple[Path | None, str]:
    """Write weights to `path`, else where there is space; returns the path and a message."""
    aside = f"{path.parent.name}-{secrets.token_hex(4)}"
    reasons: list[str] = []
    for place in (path, *(Path(folder, aside, path.name) for folder in _ELSEWHERE)):
        reason = model.export(str(place), num_bytes)[0]
        if not reason:
            why = f"{reasons[0]}; " if reasons else ""
            return place, f"{why}the weights are in {_described(model, place)}"
        reasons.append(reason)
    return None, f"{'; '.join(reasons)}; the weights are lost"


def _described(model: Any, place: Path) -> str:
    """With the host, if it is another one, and a word on places that do not last."""
    host = model.worker_infos[0].host
    where = str(place) if host == socket.gethostname() else f"{place} on host {host}"
    return (
        f"{where} (in memory: gone when it restarts)" if str(place).startswith(_MEMORY) else where
    )
