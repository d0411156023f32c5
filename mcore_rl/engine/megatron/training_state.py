"""Checkpoints of a training engine: weights, Adam's moments, counts of steps.

Settings are not in a checkpoint. A run that resumes uses the learning rate, betas, weight decay and
length of its own settings, and only the number of steps from the checkpoint.

Megatron stores the number of Adam's steps in three ways, and with torch's AdamW instead of
FusedAdam none of them survives a resume of the distributed optimizer
(optimizer/distrib_optimizer.py of 0.19.2):

- :839 asserts that every rank has one step count: this fails before the first step, which is when a
  resume happens, and always on a rank that has no parameter of an optimizer.
- :1032 gives all parameters one and the same step tensor. AdamW counts in place, so each parameter
  adds one: bias correction is wrong without an error.
- :1225 copies a "step" that :2391 has left out: KeyError.

And with pipeline stages, rank 0 writes the count for all; if its stage has no experts, the count of
the experts is lost (optimizer/optimizer.py:1376, replicated optimizer).

So the count is removed while Megatron saves or loads, is stored once in the checkpoint, and is set
again for each parameter.

A checkpoint may also come from the other kind of optimizer: sharded over data-parallel ranks, or
replicated. Both store Adam's moments complete and under the same names. They differ in the float32
weights: a sharded optimizer stores those of every parameter, as `optimizer.state.param.NAME`; a
replicated one only those of parameters with another dtype, as `optimizer.state.fp32_param.NAME`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensorFactory,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mcore_rl.checkpoint import megatron as dist_checkpoint
from mcore_rl.checkpoint.files import INFO_FILE, read_checkpoint_info
from mcore_rl.checkpoint.storage_location import CONTENT_METADATA
from mcore_rl.config.errors import ConfigError
from mcore_rl.engine.base import EngineSpec

State = dict[str, Any]

_HAVE_FUSED_ADAM: bool = distrib_optimizer.HAVE_APEX_OR_TE
_SHARDED, _REPLICATED = "optimizer.state.param.", "optimizer.state.fp32_param."


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
    """Copy a checkpoint's state to the host and begin to write it. Collective over all ranks.

    Without `copies` (see DistSave) it is written on return; call `finish` all the same.

    Raises:
        ConfigError: `path` exists.
        OSError: It cannot be created.
    """
    with _remove_step_counts(optimizer) as steps:
        state: State = {f"model{i}": build_save_shards(chunk) for i, chunk in enumerate(chunks)}
        if optimizer is not None:
            state["optimizer"] = _build_optimizer_shards(optimizer, state, is_loading=False)
        if schedule is not None:
            state |= {"optimizer_steps": steps, "schedule_steps": schedule.num_steps}
        info = _build_info(spec, vocab_size)
        return dist_checkpoint.DistSave(state, path, info, copies)


def load(
    path: Path,
    spec: EngineSpec,
    vocab_size: int,
    chunks: Sequence[GPTModel],
    optimizer: ChainedOptimizer | None,
    schedule: OptimizerParamScheduler | None,
) -> None:
    """Read a checkpoint that was saved in any layout. Collective over all ranks.

    Without an optimizer it may be a checkpoint of Megatron-LM, which has no checkpoint info.

    Raises:
        ConfigError: It is incomplete, of another model, or has no optimizer state. The weights are
            unchanged.
    """
    saved_info: dict[str, Any] = {}
    info = _build_info(spec, vocab_size)
    is_foreign = dist_checkpoint.has_checkpoint(path) and not (path / INFO_FILE).exists()
    if optimizer is not None or not is_foreign:
        saved_info = read_checkpoint_info(path)
        _check_info(saved_info, path, info)
    stored = dist_checkpoint.read_tensor_shapes(path)
    if is_foreign:
        _check_vocab_rows(stored, path, vocab_size)
    is_stacked = dist_checkpoint.are_layers_stacked(stored)
    with _remove_step_counts(optimizer):
        request: State = {
            f"model{i}": build_load_shards(chunk, is_stacked) for i, chunk in enumerate(chunks)
        }
        optimizer_shards: State = {}
        if optimizer is not None:
            optimizer_shards = _build_optimizer_shards(optimizer, request, is_loading=True)
            is_other_kind = saved_info["optimizer"] != info["optimizer"]
            request["shards"] = _flatten_shards(optimizer_shards, stored, is_other_kind)
        state = dist_checkpoint.load(request, path)
        for index, chunk in enumerate(chunks):
            loaded = state[f"model{index}"]
            # Extra states of modules are not requested (build_load_shards).
            extra = {n: None for n in chunk.state_dict() if n.endswith("._extra_state")}
            chunk.load_state_dict(extra | loaded)
        if optimizer is not None:
            # Megatron leaves out what is empty: the stage of this rank may have nothing to train.
            shards = state.get("shards", {})
            _load_moments(optimizer, _merge_loaded_shards(optimizer_shards, shards, optimizer))
    if optimizer is not None and schedule is not None:
        _set_step_counts(optimizer, state["optimizer_steps"])
        schedule.num_steps = state["schedule_steps"]
        schedule.step(increment=0)  # sets the learning rate of this step


def build_save_shards(chunk: GPTModel) -> State:
    """Return the sharded weights of a chunk to save, by the names of its state dict."""
    state: State = chunk.sharded_state_dict(metadata=dict(CONTENT_METADATA))
    return state


def build_load_shards(chunk: GPTModel, is_stacked: bool) -> State:
    """Return the sharded weights of a chunk to request from a checkpoint.

    Objects are left out. They are extra states of modules, which have content with fp8 only, and
    which a checkpoint has for the modules of the run that saved it.

    Args:
        is_stacked: The checkpoint has one tensor for all decoder layers, not one per layer.
    """
    with contextlib.ExitStack() as undo:
        if is_stacked:
            # A list of the layers that have experts keeps layers apart, even if all have them
            # (transformer/transformer_block.py:739).
            config = chunk.config
            undo.callback(setattr, config, "moe_layer_freq", config.moe_layer_freq)
            config.moe_layer_freq = 1
        metadata = {**CONTENT_METADATA, "non_homogeneous_layers": not is_stacked}
        state = chunk.sharded_state_dict(metadata=metadata)
    return {name: entry for name, entry in state.items() if not isinstance(entry, ShardedObject)}


def _build_info(spec: EngineSpec, vocab_size: int) -> dict[str, Any]:
    """Return what the info of a checkpoint says about the engine that writes it."""
    kind = "sharded" if spec.engine.optimizer.distributed else "replicated"
    lora, adapters = spec.engine.lora, None
    if lora.rank:
        targets = sorted(set(lora.targets))
        adapters = {"rank": lora.rank, "alpha": lora.alpha, "targets": targets}
    return {
        "layout": asdict(spec.engine.layout),
        "dtype": spec.model.dtype,
        "vocab_size": vocab_size,
        "optimizer": kind if spec.total_steps else None,
        "lora": adapters,
    }


def _check_info(saved_info: Mapping[str, Any], path: Path, info: Mapping[str, Any]) -> None:
    saved = {name: saved_info.get(name) for name in info}
    if saved["vocab_size"] != info["vocab_size"]:
        raise ConfigError(
            f"{path} is a checkpoint of another model: its vocab_size is {saved['vocab_size']}, "
            f"this model's {info['vocab_size']}"
        )
    if saved["dtype"] != info["dtype"]:
        raise ConfigError(
            f"model.dtype={info['dtype']!r}: {path} was written with {saved['dtype']!r}; allowed: "
            "the same"
        )
    if saved["lora"] != info["lora"]:
        raise ConfigError(
            f"lora: {path} was written with {saved['lora'] or 'no adapters'}, this run has "
            f"{info['lora'] or 'none'}; allowed: the same"
        )
    if info["optimizer"] is not None and saved["optimizer"] is None:
        raise ConfigError(f"{path} has weights but no optimizer state to resume from")


def _check_vocab_rows(stored: Mapping[str, tuple[int, ...]], path: Path, vocab_size: int) -> None:
    """Check the vocabulary without a checkpoint info: rows beyond it may be padding."""
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if stored.get(name, (vocab_size,))[0] < vocab_size:
            raise ConfigError(
                f"{path} is a checkpoint of another model: {name} has {stored[name][0]} rows, this "
                f"model's vocabulary {vocab_size}"
            )


def _build_optimizer_shards(
    optimizer: ChainedOptimizer, model: State, *, is_loading: bool
) -> State:
    """Return the optimizer's sharded state, of a model with this sharded state."""
    with _remove_bucket_padding(optimizer):
        state: State = optimizer.sharded_state_dict(
            dict(model), is_loading=is_loading, metadata=dict(CONTENT_METADATA)
        )
    return state


def _load_moments(optimizer: ChainedOptimizer, state: State) -> None:
    """Load Adam's moments and the float32 weights; groups keep the settings of this run."""
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, group_settings in zip(optimizer.param_groups, settings, strict=True):
        group.update(group_settings)


def _flatten_shards(state: State, stored: Collection[str], is_other_kind: bool) -> State:
    """Return the shards to request from a checkpoint, by their number.

    Nothing else of the optimizer's state is loaded. Megatron would tell groups of parameters apart
    by the settings of the run that saved them (optimizer/optimizer.py,
    `_filter_and_reorder_param_groups`), and expects lists as long as those of rank 0 of that run,
    whose stage may have had no experts.

    Args:
        state: Sharded state of this optimizer.
        stored: Keys of the checkpoint's tensors.
        is_other_kind: The checkpoint has the other kind of optimizer; shards that it does not have
            are left out.
    """
    shards = _list_shards(state)
    if is_other_kind:
        shards = [_rename_shard(shard, stored) for shard in shards]
    return {str(index): shard for index, shard in enumerate(shards) if shard is not None}


def _rename_shard(shard: Any, stored: Collection[str]) -> Any:
    """Return a shard under its key in a checkpoint of the other kind; None if it has none."""
    key = shard.key
    if key.startswith(_REPLICATED):
        key = _SHARDED + key.removeprefix(_REPLICATED)
    elif key.startswith(_SHARDED):
        key = _REPLICATED + key.removeprefix(_SHARDED)
        # LoRA's factors are stored in parts: KEY.NAME.
        if not any(name == key or name.startswith(f"{key}.") for name in stored):
            return None
    return replace(shard, key=key)


def _merge_loaded_shards(state: State, loaded: State, optimizer: ChainedOptimizer) -> State:
    """Return `state` as the optimizer loads it, with the values loaded for its shards.

    Float32 weights that were left out are the model's own.
    """
    numbers = iter(range(len(_list_shards(state))))
    filled: State = _map_shards(state, lambda shard: loaded.get(str(next(numbers))))
    part_states = [filled] if len(optimizer.chained_optimizers) == 1 else filled.values()
    for part, part_state in zip(optimizer.chained_optimizers, part_states, strict=True):
        parameters = [p for buffer in getattr(part, "buffers", []) for p in buffer.param_index_map]
        for index, parameter in enumerate(parameters):
            tensors = part_state["param_state"][index]
            for name in [name for name, tensor in tensors.items() if tensor is None]:
                tensors[name] = parameter.detach()
    return filled


def _list_shards(state: Any) -> list[Any]:
    shards: list[Any] = []
    _map_shards(state, shards.append)
    return shards


def _map_shards(state: Any, function: Callable[[Any], Any]) -> Any:
    """Copy nested dicts and lists, with `function` applied to each shard, in order."""
    if isinstance(state, dict):
        return {name: _map_shards(value, function) for name, value in state.items()}
    if isinstance(state, list):
        return [_map_shards(value, function) for value in state]
    if isinstance(state, ShardedBase | ShardedTensorFactory):
        return function(state)
    return state.unwrap() if isinstance(state, LocalNonpersistentObject) else state


@contextlib.contextmanager
def _remove_bucket_padding(optimizer: ChainedOptimizer) -> Iterator[None]:
    """Leave the padding behind buckets out of the sharded optimizer's index of its buffers.

    It gathers its buffers without that padding, and slices parameters at offsets that count it
    (optimizer/distrib_optimizer.py:1400 and :1787): behind the first bucket it saves wrong numbers
    without an error. Tied embeddings on several pipeline stages make a second bucket, and so does
    overlap of a large model. Megatron fixed it after 0.19.2 (pull request 5077).
    """
    with contextlib.ExitStack() as undo:
        for part in optimizer.chained_optimizers:
            for buffer in getattr(part, "buffers", []):
                undo.callback(setattr, buffer, "param_index_map", buffer.param_index_map)
                buffer.param_index_map = _build_unpadded_index(buffer)
        yield


def _build_unpadded_index(buffer: Any) -> dict[torch.nn.Parameter, tuple[int, int, int]]:
    """Return (first element, end, bucket) of each parameter in the concatenated buckets."""
    starts = list(accumulate((b.numel_unpadded for b in buffer.buckets), initial=0))
    shifts = [start - b.offset for start, b in zip(starts, buffer.buckets, strict=False)]
    return {
        parameter: (start + shifts[bucket], end + shifts[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


@contextlib.contextmanager
def _remove_step_counts(optimizer: ChainedOptimizer | None) -> Iterator[int]:
    """Remove the step counts of all parameters inside this context, and create all moments.

    Yields the count. Collective over all ranks.
    """
    if optimizer is None:
        yield 0
        return
    steps = _count_adam_steps(optimizer)
    for part in optimizer.chained_optimizers:
        if part.init_state_fn is not None:  # creates moments of parameters that have none
            part.init_state_fn(part.optimizer, part.config)
    # Only torch's AdamW has a step count per parameter; fused ones have it per group.
    inner = [part.optimizer for part in optimizer.chained_optimizers]
    with contextlib.ExitStack() as undo:
        undo.callback(_set_step_counts, optimizer, steps)
        for adam in (adam for adam in inner if isinstance(adam, torch.optim.AdamW)):
            _drop_steps(adam)
            # AdamW itself loads no state without a count (torch/optim/adam.py:127).
            undo.callback(adam.register_load_state_dict_pre_hook(_add_steps).remove)
            undo.callback(adam.register_load_state_dict_post_hook(_drop_steps).remove)
        # Megatron reads this where it adds and removes the counts of torch's AdamW, and only there.
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


def _count_adam_steps(optimizer: ChainedOptimizer) -> int:
    """Return Adam's steps so far, the same on all ranks, even on a rank without parameters."""
    counts = [0]
    for part in optimizer.chained_optimizers:
        counts += [int(state["step"]) for state in part.optimizer.state.values() if "step" in state]
        counts += [int(group["step"]) for group in part.param_groups if "step" in group]
    steps = torch.tensor(max(counts), device=torch.cuda.current_device())
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return int(steps)


def _set_step_counts(optimizer: ChainedOptimizer, steps: int) -> None:
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(float(steps))
        else:
            for group in part.param_groups:
                group["step"] = steps
                if not steps:  # a fused one counts from the first step on
                    del group["step"]
