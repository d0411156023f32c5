"""The shards of a model's weights in a distributed checkpoint, to save and to load."""

from __future__ import annotations

import contextlib
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt import GPTModel

from mcore_rl.checkpoint.storage_location import CONTENT_METADATA

State = dict[str, Any]  # by the names of a chunk's state dict


def shards_to_save(chunk: GPTModel) -> State:
    state: State = chunk.sharded_state_dict(metadata=dict(CONTENT_METADATA))
    return state


def shards_to_load(chunk: GPTModel, is_stacked: bool) -> State:
    """What is asked of a checkpoint with one tensor for all decoder layers, or one for each.

    Without objects. Those are extra states of modules, which hold something with fp8 only, and
    which a checkpoint has for the modules of the run that saved it.
    """
    with contextlib.ExitStack() as undo:
        if is_stacked:
            # A list of the layers that have experts keeps layers apart, even where all have them
            # (transformer/transformer_block.py:830).
            config = chunk.config
            undo.callback(setattr, config, "moe_layer_freq", config.moe_layer_freq)
            config.moe_layer_freq = 1
        metadata = {**CONTENT_METADATA, "non_homogeneous_layers": not is_stacked}
        state = chunk.sharded_state_dict(metadata=metadata)
    return {name: entry for name, entry in state.items() if not isinstance(entry, ShardedObject)}


def load_shards(chunk: GPTModel, loaded: State) -> None:
    """Load what shards_to_load asked for; extra states are told that there is nothing for them."""
    nothing = {name: None for name in chunk.state_dict() if name.endswith("._extra_state")}
    chunk.load_state_dict(nothing | loaded)
