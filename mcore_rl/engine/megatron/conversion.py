"""Conversion of checkpoints: the parts that need Megatron or Megatron-Bridge.

`build_meta_model` returns the location of each parameter in a distributed checkpoint, according to
Megatron itself. It builds the full model as a single rank has it, on torch's meta device: full-size
models take seconds, no memory and no GPU. The modules are torch's, with the parameters of
Transformer Engine's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint.hf_writer import atomic_dir
from mcore_rl.checkpoint.storage_location import StorageLocation
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import EngineConfig, Layout
from mcore_rl.engine.megatron import device
from mcore_rl.models.base import HFConfig, get_family
from mcore_rl.models.heads import (
    get_model_config,
    has_value_bias,
    has_value_head,
    map_model_weights,
)
from mcore_rl.parallel.mesh import split_into_chunks
from mcore_rl.reshard.rules import Shard, Weight, check_cover

# Megatron is imported inside functions: device.install() must have run before its first import.

_LAYERS = "decoder.layers."
_FULL = Shard(0, 1)


@dataclass(frozen=True)
class MetaModel:
    """The entries of a model's checkpoint, as the engine saves it."""

    # By Weight.get_local_name(). Without replicas, which a checkpoint does not repeat.
    parameters: Mapping[str, StorageLocation]
    # All other entries that Megatron's load requests: by key, the bytes that a save writes.
    objects: Mapping[str, bytes]
    num_layers: int

    def locate_parameters(self, keys: Collection[str]) -> Mapping[str, StorageLocation]:
        """Return the location of each parameter in a checkpoint that has these `keys`.

        Megatron stacks the decoder layers or keeps them separate, depending on the settings of the
        run that saved them (transformer/transformer_block.py:730), which may differ from this one.

        Raises:
            ConfigError: A parameter is there in neither form.
        """
        locations: dict[str, StorageLocation] = {}
        for name, location in self.parameters.items():
            forms = (location, switch_layer_stacking(location, self.num_layers))
            stored = next(
                (
                    f
                    for f in forms
                    if f is not None and all(key in keys for key in f.list_tensors())
                ),
                None,
            )
            if stored is None:
                raise ConfigError(f"the checkpoint has no {next(iter(location.list_tensors()))}")
            locations[name] = stored
        return locations


def switch_layer_stacking(location: StorageLocation, num_layers: int) -> StorageLocation | None:
    """Return the stacked location of a separate decoder layer's parameter, or the reverse.

    None for a parameter outside the decoder layers.

    >>> location = StorageLocation("decoder.layers.2.mlp.router.weight", (8, 64), ())
    >>> stacked = switch_layer_stacking(location, 3)
    >>> stacked.key, stacked.shape, stacked.index
    ('decoder.layers.mlp.router.weight', (3, 8, 64), (2,))
    """
    if not location.key.startswith(_LAYERS):
        return None
    first, _, rest = location.key.removeprefix(_LAYERS).partition(".")
    if first.isdigit():
        return replace(
            location,
            key=_LAYERS + rest,
            shape=(num_layers, *location.shape),
            index=(int(first), *location.index),
        )
    layer, *index = location.index
    key = f"{_LAYERS}{layer}.{first}.{rest}"
    return replace(location, key=key, shape=location.shape[1:], index=tuple(index))


def build_meta_model(hf_config: HFConfig, padded_vocab: int) -> MetaModel:
    """Build the meta model with its vocabulary padded to `padded_vocab` rows.

    The process must not be a rank. It computes on the CPU from then on, and may create engines.

    Raises:
        ConfigError: No family has the model.
        RuntimeError: The family's rules and Megatron's model differ (a bug in the family), or the
            process is a rank.
        ValueError: The rules do not cover each tensor of a checkpoint exactly once (a bug, too).
    """
    config = get_model_config(hf_config)
    weights = map_model_weights(config, padded_vocab)
    check_cover(weights, 1)
    device.install(torch.get_num_threads(), on_cpu=True)
    from mcore_rl.checkpoint.megatron import serialize_objects
    from mcore_rl.engine.megatron.training_state import build_save_shards
    from mcore_rl.engine.megatron.weights import get_local_tensors
    from mcore_rl.parallel.groups import use_single_rank_groups

    with torch.random.fork_rng(devices=()), use_single_rank_groups(), device.use_meta_device():
        chunk = build_single_rank_model(config, padded_vocab)
        tensors = {name: tuple(t.shape) for name, t in get_local_tensors(chunk).items()}
        check_rules(weights, tensors)
        state = build_save_shards(chunk)
        parameters = {
            name: get_storage_location(name, state[name])
            for name in (w.get_local_name() for w in weights if not w.replica)
        }
        objects = serialize_objects(state.values())
        return MetaModel(parameters, objects, config["num_hidden_layers"])


def build_single_rank_model(config: HFConfig, padded_vocab: int) -> Any:
    """Build the full model as one chunk, in bfloat16, with all prediction layers."""
    from mcore_rl.engine.megatron import heads, model

    family, engine = get_family(config), EngineConfig(layout=Layout())
    model_class: Any = model.PolicyModel
    if has_value_head(config):
        model_class = partial(heads.ValueModel, has_bias=has_value_bias(config))
    num_mtp_layers = family.num_mtp_layers(config)
    stages = split_into_chunks(engine.layout, config["num_hidden_layers"], num_mtp_layers)
    [chunk] = model.build_chunks(
        family, config, engine, torch.bfloat16, stages, 0, padded_vocab, model_class
    )
    return chunk


def check_rules(weights: Sequence[Weight], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise RuntimeError unless the weights are the parameters of the model on a single rank.

    Args:
        shapes: Shapes of the model's parameters, by name.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for weight in (weight for weight in weights if not weight.replica):
        name = weight.get_local_name()
        if name in expected:
            raise RuntimeError(f"{name}: two rules name this parameter")
        expected[name] = weight.rule.get_local_shape(_FULL)
        if name not in shapes:
            raise RuntimeError(
                f"{name}: a rule names this parameter, which the model does not have"
            )
        if shapes[name] != expected[name]:
            raise RuntimeError(
                f"{name}: the model has shape {shapes[name]}, its rule says {expected[name]}"
            )
    if missing := sorted(shapes.keys() - expected.keys()):
        more = f", nor {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RuntimeError(f"{missing[0]}: no rule names this parameter of the model{more}")


def get_storage_location(name: str, entry: Any) -> StorageLocation:
    """Return the location of an entry of a sharded state dict.

    Raises:
        RuntimeError: Its pieces are not the full parameter, from its first row to its last.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    pieces = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
    if pieces[0].key != entry.key:
        return _join_sections(entry.key, [get_storage_location(name, piece) for piece in pieces])
    key, shape, stacked = pieces[0].key, pieces[0].global_shape, pieces[0].prepend_axis_num
    index, rows = pieces[0].global_offset[:stacked], 0
    for piece in pieces:
        offsets = (*index, rows, *[0] * (len(shape) - stacked - 1))
        if (piece.key, piece.global_shape, piece.global_offset) != (key, shape, offsets):
            raise RuntimeError(f"{name}: {piece} does not follow on row {rows} of {key}")
        rows += piece.local_shape[0]
    if (rows, *pieces[0].local_shape[1:]) != shape[stacked:]:
        raise RuntimeError(f"{name}: {rows} rows of {key}, whose shape is {shape}")
    return StorageLocation(key, tuple(shape), tuple(index))


def _join_sections(key: str, locations: Sequence[StorageLocation]) -> StorageLocation:
    """Return the location of a parameter whose sections are tensors of their own."""
    first = locations[0]
    stacked = len(first.index)
    sections = tuple(
        (location.key.removeprefix(f"{key}."), location.shape[stacked]) for location in locations
    )
    rows = sum(rows for _, rows in sections)
    shape = (*first.shape[:stacked], rows, *first.shape[stacked + 1 :])
    return StorageLocation(key, shape, first.index, sections)


# Megatron-Bridge converts families that only it knows, on GPUs. It builds the full model on
# the GPUs and writes a checkpoint of its own kind, which this engine does not load
# (megatron/bridge/models/conversion/auto_bridge.py of 0.6.2).


def import_with_bridge(model: Path, output: Path) -> None:
    """Convert a Hugging Face folder to a checkpoint of Megatron-Bridge, in a new folder.

    Raises:
        ConfigError: Megatron-Bridge or a GPU is missing, or `output` exists.
    """
    bridge = _load_auto_bridge()
    with atomic_dir(output) as folder:
        bridge.import_ckpt(hf_model_id=str(model), megatron_path=str(folder))


def export_with_bridge(checkpoint: Path, reference: Path, output: Path) -> None:
    """Convert a checkpoint of Megatron-Bridge to a Hugging Face folder.

    Args:
        reference: A Hugging Face folder of the same model.

    Raises:
        ConfigError: Megatron-Bridge or a GPU is missing, or `output` exists.
    """
    bridge = _load_auto_bridge().from_auto_config(str(checkpoint), str(reference))
    with atomic_dir(output) as folder:
        bridge.export_ckpt(megatron_path=str(checkpoint), hf_path=str(folder))


def _load_auto_bridge() -> Any:
    has_bridge = importlib.util.find_spec("megatron.bridge") is not None
    if not has_bridge or not torch.cuda.is_available():
        missing = "a GPU" if has_bridge else "the package megatron-bridge"
        raise ConfigError(
            f"--bridge=megatron-bridge: {missing} is not installed; it needs GPUs and, in a "
            'separate environment, pip install "mcore-rl[bridge]"'
        )
    from megatron.bridge import AutoBridge

    return AutoBridge
