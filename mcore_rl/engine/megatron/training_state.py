"""What a checkpoint of a training engine contains: weights, Adam's moments, counts of steps.

Settings are not in it. A run that resumes keeps the learning rate, betas, weight decay and length
of its own settings, and uses only the number of steps from the checkpoint.

Megatron keeps the number of Adam's steps in three ways, and where torch's AdamW replaces
FusedAdam none of them survives a resume of the distributed optimizer
(optimizer/distrib_optimizer.py of 0.16.1):

- :642 asserts that every rank has one step count: not before the first step, which is when a
  resume happens, and never on a rank that has no parameter of an optimizer.
- :825 gives all parameters one and the same step tensor. AdamW counts in place, so each parameter
  adds one: bias correction is wrong without an error.
- :939 copies a "step" that :2101 has left out: KeyError.

And with pipeline stages, rank 0 writes the count for all; where its stage has no experts, the count
of the experts is lost (optimizer/optimizer.py:1034, replicated optimizer).

So the count is taken out while Megatron saves or loads, goes into the checkpoint once, and is put
back for each parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mcore_rl.checkpoint import megatron as dist_checkpoint
from mcore_rl.checkpoint.files import INFO_FILE, read_checkpoint_info
from mcore_rl.checkpoint.storage_location import CONTENT_METADATA
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import LoRAConfig
from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.megatron.optimizer_kinds import shards_of_other_kind, with_loaded
from mcore_rl.engine.megatron.shards import load_shards, shards_to_load, shards_to_save

State = dict[str, Any]

_HAVE_FUSED_ADAM: bool = distrib_optimizer.HAVE_APEX_OR_TE


def save(
    path: Path,
    spec: EngineSpec,
    vocab_size: int,
    chunks: Sequence[GPTModel],
    optimizer: ChainedOptimizer | None,
    schedule: OptimizerParamScheduler | None,
    *,
    copies: dict[Any, torch.Tensor] | None = None,
) -> dist_checkpoint.DistSave:
    """Copy to the host what a checkpoint holds, and begin to write it. Collective over all ranks.

    Without `copies` (see DistSave) it has been written on return; `finish` is to be called all the
    same.

    Raises:
        ConfigError: `path` exists.
        OSError: it cannot be made.
    """
    with _without_steps(optimizer) as steps:
        state = _sharded(chunks, optimizer, is_loading=False)
        if schedule is not None:
            state |= {"optimizer_steps": steps, "schedule_steps": schedule.num_steps}
        return dist_checkpoint.DistSave(state, path, _facts(spec, vocab_size), copies)


def load(
    path: Path,
    spec: EngineSpec,
    vocab_size: int,
    chunks: Sequence[GPTModel],
    optimizer: ChainedOptimizer | None,
    schedule: OptimizerParamScheduler | None,
) -> None:
    """Read a checkpoint that was saved in any layout. Collective over all ranks.

    Without an optimizer it may be one of Megatron-LM, which has no checkpoint info.

    Raises:
        ConfigError: it is incomplete, of another model, or has no optimizer state. The weights are
            then as they were.
    """
    info: dict[str, Any] = {}
    mine = _facts(spec, vocab_size)
    is_foreign = dist_checkpoint.has_checkpoint(path) and not (path / INFO_FILE).exists()
    if optimizer is not None or not is_foreign:
        info = read_checkpoint_info(path)
        _check(info, path, mine)
    stored = dist_checkpoint.read_tensor_shapes(path)
    if is_foreign:
        _check_rows(stored, path, vocab_size)
    is_stacked = dist_checkpoint.are_layers_stacked(stored)
    with _without_steps(optimizer):
        asked = _sharded(chunks, optimizer, is_loading=True, is_stacked=is_stacked)
        is_other_kind = optimizer is not None and info["optimizer"] != mine["optimizer"]
        if is_other_kind:
            of_optimizer = asked.pop("optimizer")
            asked["shards"] = shards_of_other_kind(of_optimizer, stored)
        state = dist_checkpoint.load(asked, path)
        for index, chunk in enumerate(chunks):
            load_shards(chunk, state[f"model{index}"])
        if optimizer is not None:
            if is_other_kind:
                state["optimizer"] = with_loaded(of_optimizer, state["shards"], optimizer)
            _load_moments(optimizer, state["optimizer"])
    if optimizer is not None and schedule is not None:
        _set_steps(optimizer, state["optimizer_steps"])
        schedule.num_steps = state["schedule_steps"]
        schedule.step(increment=0)  # writes the learning rate that this step has


def _facts(spec: EngineSpec, vocab_size: int) -> dict[str, Any]:
    """What the info of a checkpoint says of the engine that wrote it."""
    kind = "sharded" if spec.engine.optimizer.distributed else "replicated"
    return {
        "layout": asdict(spec.engine.layout),
        "dtype": spec.model.dtype,
        "vocab_size": vocab_size,
        "optimizer": kind if spec.total_steps else None,
        "lora": _lora_facts(spec.engine.lora),
    }


def _lora_facts(config: LoRAConfig) -> dict[str, Any] | None:
    """What adapters must have in common to be the same ones; None without adapters."""
    if not config.rank:
        return None
    return {"rank": config.rank, "alpha": config.alpha, "targets": sorted(set(config.targets))}


def _check(info: Mapping[str, Any], path: Path, mine: Mapping[str, Any]) -> None:
    found = {name: info.get(name) for name in mine}
    if found["vocab_size"] != mine["vocab_size"]:
        raise ConfigError(
            f"{path} is a checkpoint of another model: its vocab_size is {found['vocab_size']}, "
            f"this model's {mine['vocab_size']}"
        )
    if found["dtype"] != mine["dtype"]:
        raise ConfigError(
            f"model.dtype={mine['dtype']!r}: {path} was written with {found['dtype']!r}; allowed: "
            "the same"
        )
    if found["lora"] != mine["lora"]:
        raise ConfigError(
            f"lora: {path} was written with {found['lora'] or 'no adapters'}, this run has "
            f"{mine['lora'] or 'none'}; allowed: the same"
        )
    if mine["optimizer"] is not None and found["optimizer"] is None:
        raise ConfigError(f"{path} has weights but no optimizer state to resume from")


def _check_rows(stored: Mapping[str, tuple[int, ...]], path: Path, vocab_size: int) -> None:
    """What the info would tell: rows behind those of the vocabulary are padding of any length."""
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if stored.get(name, (vocab_size,))[0] < vocab_size:
            raise ConfigError(
                f"{path} is a checkpoint of another model: {name} has {stored[name][0]} rows, this "
                f"model's vocabulary {vocab_size}"
            )


def _sharded(
    chunks: Sequence[GPTModel],
    optimizer: ChainedOptimizer | None,
    *,
    is_loading: bool,
    is_stacked: bool = False,
) -> State:
    """The shards that this rank writes, or asks for; `is_stacked` says how they stand there."""
    state: State = {
        f"model{index}": shards_to_load(chunk, is_stacked) if is_loading else shards_to_save(chunk)
        for index, chunk in enumerate(chunks)
    }
    if optimizer is not None:
        with _without_bucket_padding(optimizer):
            state["optimizer"] = optimizer.sharded_state_dict(
                dict(state), is_loading=is_loading, metadata=dict(CONTENT_METADATA)
            )
    return state


def _load_moments(optimizer: ChainedOptimizer, state: State) -> None:
    """Adam's moments and the float32 weights; the groups keep the settings of this run."""
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)


@contextlib.contextmanager
def _without_bucket_padding(optimizer: ChainedOptimizer) -> Iterator[None]:
    """Inside, the sharded optimizer's index of its buffers counts no padding behind a bucket.

    It gathers its buffers without that padding, and cuts parameters out at places that count it
    (optimizer/distrib_optimizer.py:1115 and :1501): behind the first bucket it saves the wrong
    numbers without an error. Tied embeddings on several pipeline stages make a second bucket, and
    so does overlap of a large model. Megatron repaired it after 0.19.2 (pull request 5077).
    """
    with contextlib.ExitStack() as undo:
        for part in optimizer.chained_optimizers:
            for buffer in getattr(part, "buffers", []):
                undo.callback(setattr, buffer, "param_index_map", buffer.param_index_map)
                buffer.param_index_map = _unpadded_index(buffer)
        yield


def _unpadded_index(buffer: Any) -> dict[torch.nn.Parameter, tuple[int, int, int]]:
    """By parameter: (first element, end, bucket) in the concatenated buckets of the buffer."""
    starts = list(accumulate((b.numel_unpadded for b in buffer.buckets), initial=0))
    shifts = [start - b.offset for start, b in zip(starts, buffer.buckets, strict=False)]
    return {
        parameter: (start + shifts[bucket], end + shifts[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


@contextlib.contextmanager
def _without_steps(optimizer: ChainedOptimizer | None) -> Iterator[int]:
    """Inside, no parameter has a step count, and every one has moments; yields the count.

    Collective over all ranks.
    """
    if optimizer is None:
        yield 0
        return
    steps = _steps(optimizer)
    for part in optimizer.chained_optimizers:
        if part.init_state_fn is not None:  # gives moments to parameters that have none
            part.init_state_fn(part.optimizer, part.config)
    with contextlib.ExitStack() as undo:
        undo.callback(_set_steps, optimizer, steps)
        for adam in _torch_adams(optimizer):
            _drop_steps(adam)
            # AdamW itself loads no state without a count (torch/optim/adam.py:127).
            undo.callback(adam.register_load_state_dict_pre_hook(_add_steps).remove)
            undo.callback(adam.register_load_state_dict_post_hook(_drop_steps).remove)
        # Read where Megatron puts in and takes out the counts of torch's AdamW, and only there.
        undo.callback(setattr, distrib_optimizer, "HAVE_APEX_OR_TE", _HAVE_FUSED_ADAM)
        distrib_optimizer.HAVE_APEX_OR_TE = True
        yield steps


def _drop_steps(adam: torch.optim.Optimizer) -> None:
    for state in adam.state.values():
        state.pop("step", None)


def _add_steps(adam: torch.optim.Optimizer, state_dict: State) -> None:
    del adam
    for state in state_dict["state"].values():
        state["step"] = torch.tensor(0.0)


def _torch_adams(optimizer: ChainedOptimizer) -> list[torch.optim.AdamW]:
    """Those that keep a step count with each parameter; fused ones keep it with each group."""
    inner = [part.optimizer for part in optimizer.chained_optimizers]
    return [adam for adam in inner if isinstance(adam, torch.optim.AdamW)]


def _steps(optimizer: ChainedOptimizer) -> int:
    """Adam's steps so far: the same on all ranks, also where a rank has no parameter."""
    found = [0]
    for part in optimizer.chained_optimizers:
        found += [int(state["step"]) for state in part.optimizer.state.values() if "step" in state]
        found += [int(group["step"]) for group in part.param_groups if "step" in group]
    steps = torch.tensor(max(found), device=torch.cuda.current_device())
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return int(steps)


def _set_steps(optimizer: ChainedOptimizer, steps: int) -> None:
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(float(steps))
        elif steps:
            for group in part.param_groups:
                group["step"] = steps
