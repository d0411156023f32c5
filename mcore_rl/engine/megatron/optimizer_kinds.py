"""Optimizer state of one kind for an optimizer of the other: sharded over data ranks, or not.

Both kinds keep Adam's moments whole and under the same names. They differ in what stands around
them, of which nothing is needed here, and in the float32 weights:

- a sharded optimizer has those of every parameter, as `optimizer.state.param.NAME`;
- a replicated one has those of parameters of another dtype, as `optimizer.state.fp32_param.NAME`;
  a parameter in float32 is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensorFactory,
)
from megatron.core.optimizer.optimizer import ChainedOptimizer

State = dict[str, Any]
_SHARDED, _REPLICATED = "optimizer.state.param.", "optimizer.state.fp32_param."


def shards_of_other_kind(state: State, stored: Collection[str]) -> State:
    """What to ask a checkpoint of the other kind for, in the place of sharded optimizer `state`.

    `stored` are the keys of its tensors. What it does not have is left out.
    """
    shards = (_named_there(shard, stored) for shard in _shards(state))
    return {str(index): shard for index, shard in enumerate(shards) if shard is not None}


def with_loaded(state: State, loaded: State, optimizer: ChainedOptimizer) -> State:
    """`state` with what was loaded for its shards, as the optimizer takes it.

    The model has its weights: they are what was left out.
    """
    numbers = iter(range(sum(1 for _ in _shards(state))))
    filled: State = _replaced(state, lambda shard: loaded.get(str(next(numbers))))
    of_parts = [filled] if len(optimizer.chained_optimizers) == 1 else filled.values()
    for part, part_state in zip(optimizer.chained_optimizers, of_parts, strict=True):
        parameters = [p for buffer in getattr(part, "buffers", []) for p in buffer.param_index_map]
        for index, parameter in enumerate(parameters):
            tensors = part_state["param_state"][index]
            for name in [name for name, tensor in tensors.items() if tensor is None]:
                tensors[name] = parameter.detach()
    return filled


def _named_there(shard: Any, stored: Collection[str]) -> Any:
    key = shard.key
    if key.startswith(_REPLICATED):
        key = _SHARDED + key.removeprefix(_REPLICATED)
    elif key.startswith(_SHARDED):
        key = _REPLICATED + key.removeprefix(_SHARDED)
        # LoRA's factors are stored in parts: KEY.NAME.
        if not any(there == key or there.startswith(f"{key}.") for there in stored):
            return None
    return replace(shard, key=key)


def _shards(state: Any) -> Iterator[Any]:
    found: list[Any] = []
    _replaced(state, found.append)
    yield from found


def _replaced(state: Any, of_shard: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts and lists, with something else for each shard, in order."""
    if isinstance(state, dict):
        return {name: _replaced(value, of_shard) for name, value in state.items()}
    if isinstance(state, list):
        return [_replaced(value, of_shard) for value in state]
    if isinstance(state, ShardedBase | ShardedTensorFactory):
        return of_shard(state)
    return state.unwrap() if isinstance(state, LocalNonpersistentObject) else state
