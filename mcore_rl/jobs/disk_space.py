"""Disk space for the weights of a run: checked before it starts; exports fall back elsewhere."""

from __future__ import annotations

import math
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mcore_rl.checkpoint.hf_writer import plan_frozen_tensors
from mcore_rl.checkpoint.run_checkpoints import list_steps
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import EngineConfig, RLConfig, TrainConfig
from mcore_rl.controller.dispatch import RankGroup
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.jobs.convert.plan import format_bytes
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.jobs.run_plan import CRITIC, WARM_START, Role, RunPlan
from mcore_rl.models.base import get_family, pad_vocab_size, read_config
from mcore_rl.models.heads import build_value_config, map_value_weights
from mcore_rl.reshard.rules import Weight, list_logical_tensors
from mcore_rl.trainers.checkpointing import CHECKPOINTS, HF

_MEMORY_DIR = "/dev/shm"
# Read before the run scope points TMPDIR to a folder that is removed with the run.
_FALLBACK_DIRS = tuple(dict.fromkeys((tempfile.gettempdir(), "/var/tmp", _MEMORY_DIR)))


def compute_weight_bytes(config: RLConfig | TrainConfig) -> int:
    """Return the size of the model's weights as a Hugging Face checkpoint in model.dtype."""
    hf_config = read_config(config.model.path)
    weights = get_family(hf_config).weights(hf_config, pad_vocab_size(hf_config, 1))
    path = Path(config.model.path)
    has_files = any(path.glob("*.safetensors"))  # a plan is made without
    frozen = sum(plan.nbytes for plan in plan_frozen_tensors(path)) if has_files else 0
    return _sum_bytes(weights, config.model.dtype) + frozen


def compute_critic_bytes(critic: Role) -> int:
    """Return the size of the value model's weights in model.dtype."""
    hf_config = build_value_config(read_config(critic.path))
    weights = map_value_weights(hf_config, pad_vocab_size(hf_config, 1))
    return _sum_bytes(weights, critic.spec.model.dtype)


def _sum_bytes(weights: Sequence[Weight], dtype: str) -> int:
    itemsize = getattr(torch, dtype).itemsize
    return sum(
        math.prod(tensor.shape) * (torch.float32.itemsize if weight.float32 else itemsize)
        for weight in weights
        for tensor in list_logical_tensors([weight])
    )


def check_disk_space(config: RLConfig, plan: RunPlan, folder: Path, done: int = 0) -> None:
    """Raise ConfigError if the disk of `folder` has too little space for an RL run.

    `done` is the step that the run resumes after.
    """
    copies = {"the checkpoint": 1}
    if WARM_START in plan:
        copies["the warm start's"] = 1
    if config.weight_sync.method == "full_export":
        copies["weights exported for the servers"] = 1
    size = compute_weight_bytes(config)
    sizes = {name: size * n for name, n in copies.items()}
    if config.trainer.save_every:
        checkpoints = compute_checkpoint_bytes(config, config.actor, size, folder)
        sizes["training checkpoints"] = checkpoints
        if critic := plan.find(CRITIC):
            critic_size = compute_critic_bytes(critic)
            checkpoints = compute_checkpoint_bytes(config, critic.spec.engine, critic_size, folder)
            sizes["training checkpoints of the critic"] = checkpoints
    sizes |= compute_export_bytes(config, size, folder, done)
    require_disk_space(config.output_dir, folder, sizes)


def require_disk_space(output_dir: str, folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if the disk of `folder` has less space than these bytes, by purpose."""
    free, needed = shutil.disk_usage(folder).free, sum(sizes.values())
    if needed > free:
        parts = ", ".join(f"{format_bytes(n)} {name}" for name, n in sizes.items())
        raise ConfigError(
            f"output_dir={output_dir!r} has {format_bytes(free)} left; needed are "
            f"{format_bytes(needed)} ({parts})"
        )


def compute_export_bytes(
    config: RLConfig | TrainConfig, weights: int, folder: Path, done: int = 0
) -> dict[str, int]:
    """Return {"exports": bytes} of the remaining exports (checkpoint.hf_every); all are kept.

    Args:
        weights: Bytes of one export.
    """
    every, last = config.checkpoint.hf_every, config.trainer.num_steps
    if not every:
        return {}
    due = {step for step in range(every, last + 1, every) if step > done}
    remaining = due - {*list_steps(folder / HF)}  # existing exports are replaced
    return {"exports": weights * len(remaining)} if remaining else {}


def compute_checkpoint_bytes(
    config: RLConfig | TrainConfig, engine: EngineConfig, weights: int, folder: Path
) -> int:
    """Return the bytes of the training checkpoints to write, as many as exist at a time.

    Args:
        weights: Bytes of the weights in model.dtype.
    """
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    optimizer = engine.optimizer
    optimizer_bytes = 0 if engine.lora.rank else 8  # two moments; those of adapters are small
    if optimizer_bytes and (optimizer.distributed or itemsize < 4):
        optimizer_bytes += 4  # main parameters in float32
    total = 1 + (config.trainer.num_steps - 1) // config.trainer.save_every
    num_at_once = min(config.checkpoint.keep + bool(config.checkpoint.keep_best) + 1, total)
    existing = len(list_steps(folder / CHECKPOINTS))
    return weights * (itemsize + optimizer_bytes) // itemsize * max(num_at_once - existing, 1)


def export_weights(model: RankGroup, path: Path, num_bytes: int) -> None:
    """Write the weights of a group of ModelWorker to `path`.

    Raises:
        RunFailed: They cannot be written there; the message says where they are instead.
    """
    folder, message = export_to_any_disk(model, path, num_bytes)
    if folder != path:
        raise RunFailed(message)


def export_to_any_disk(model: RankGroup, path: Path, num_bytes: int) -> tuple[Path | None, str]:
    """Write weights to `path`, else to a disk with space; return the folder and a message."""
    name = f"{path.parent.name}-{secrets.token_hex(4)}"
    reasons: list[str] = []
    for folder in (path, *(Path(parent, name, path.name) for parent in _FALLBACK_DIRS)):
        reason = model.call(ModelWorker.export, str(folder), num_bytes)[0]
        if not reason:
            why = f"{reasons[0]}; " if reasons else ""
            return folder, f"{why}the weights are in {_describe_location(model, folder)}"
        reasons.append(reason)
    return None, f"{'; '.join(reasons)}; the weights are lost"


def _describe_location(model: RankGroup, folder: Path) -> str:
    """Return a folder with its host, if that is another one, and a warning if it is in memory."""
    host = model.worker_infos[0].host
    location = str(folder) if host == socket.gethostname() else f"{folder} on host {host}"
    if str(folder).startswith(_MEMORY_DIR):
        location += " (in memory: gone when it restarts)"
    return location
