"""Where each parameter of a model is in a distributed checkpoint, according to Megatron itself.

The whole model is built as a single rank has it, on torch's meta device: full-size models take
seconds, no memory and no GPU. Always with torch's modules, whose parameters are those of
Transformer Engine's.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

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
_WHOLE = Shard(0, 1)


@dataclass(frozen=True)
class MetaModel:
    """A model in a checkpoint as the engine saves it.

    `parameters` are by Weight.get_local_name(); replicas are not among them, since a checkpoint has
    what they repeat once. `objects` is all else that Megatron's load asks for: by key, the
    bytes that a save writes.
    """

    parameters: Mapping[str, StorageLocation]
    objects: Mapping[str, bytes]
    num_layers: int

    def parameters_in(self, keys: Collection[str]) -> Mapping[str, StorageLocation]:
        """The parameters where a checkpoint that has these `keys` keeps them.

        Megatron stacks the layers of a decoder, or keeps each one apart, as the settings of the run
        that saved it are (transformer/transformer_block.py:822). This run's need not be the same.

        Raises:
            ConfigError: a parameter is in neither form there.
        """
        found: dict[str, StorageLocation] = {}
        for name, location in self.parameters.items():
            forms = (location, other_form(location, self.num_layers))
            held = next((form for form in forms if form is not None and form.key in keys), None)
            if held is None:
                raise ConfigError(f"the checkpoint has no {location.key}")
            found[name] = held
        return found


def other_form(location: StorageLocation, num_layers: int) -> StorageLocation | None:
    """A parameter of a decoder layer stacked if it is separate, or separate if it is stacked.

    None for a parameter outside the decoder layers.

    >>> other_form(StorageLocation("decoder.layers.2.mlp.router.weight", (8, 64), ()), 3)
    StorageLocation(key='decoder.layers.mlp.router.weight', shape=(3, 8, 64), index=(2,))
    """
    if not location.key.startswith(_LAYERS):
        return None
    first, _, rest = location.key.removeprefix(_LAYERS).partition(".")
    if first.isdigit():
        return StorageLocation(
            _LAYERS + rest, (num_layers, *location.shape), (int(first), *location.index)
        )
    layer, *index = location.index
    return StorageLocation(f"{_LAYERS}{layer}.{first}.{rest}", location.shape[1:], tuple(index))


def meta_model(hf_config: HFConfig, padded_vocab: int) -> MetaModel:
    """The meta model with its vocabulary padded to `padded_vocab` rows.

    For a process that is no rank; it becomes one of the CPU lane, and can make engines afterwards.

    Raises:
        ConfigError: the model is of no family that the engine has.
        RuntimeError: the family's rules and Megatron's model differ (a bug in the family), or the
            process is a rank.
        ValueError: the rules do not cover each tensor of a checkpoint exactly once (likewise).
    """
    config = get_model_config(hf_config)
    weights = map_model_weights(config, padded_vocab)
    check_cover(weights, 1)
    device.install(torch.get_num_threads(), on_cpu=True)
    from mcore_rl.engine.megatron.shards import shards_to_save
    from mcore_rl.engine.megatron.weights import local_tensors
    from mcore_rl.parallel.groups import use_single_rank_groups

    with torch.random.fork_rng(devices=()), use_single_rank_groups(), device.without_memory():
        chunk = _whole_model(config, padded_vocab)
        tensors = {name: tuple(t.shape) for name, t in local_tensors(chunk).items()}
        check_rules(weights, tensors)
        state = shards_to_save(chunk)
        parameters = {
            weight.get_local_name(): storage_location(name, state[name])
            for weight, name in _named(weights)
        }
        return MetaModel(parameters, _objects(state.values()), config["num_hidden_layers"])


def _whole_model(config: HFConfig, padded_vocab: int) -> Any:
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


def _named(weights: Iterable[Weight]) -> list[tuple[Weight, str]]:
    """Each weight that a single rank has, with its parameter's name."""
    return [(w, w.get_local_name()) for w in weights if not w.replica]


def check_rules(weights: Sequence[Weight], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise RuntimeError unless the weights are the parameters of the model on a single rank.

    Args:
        shapes: of the model's parameters, by name.
    """
    wanted: dict[str, tuple[int, ...]] = {}
    for weight, name in _named(weights):
        if name in wanted:
            raise RuntimeError(f"{name}: two rules name this parameter")
        wanted[name] = weight.rule.get_local_shape(_WHOLE)
        if name not in shapes:
            raise RuntimeError(f"{name}: a rule names this parameter, which the model has not")
        if shapes[name] != wanted[name]:
            raise RuntimeError(
                f"{name}: the model has shape {shapes[name]}, its rule says {wanted[name]}"
            )
    if missing := sorted(shapes.keys() - wanted.keys()):
        more = f", nor {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RuntimeError(f"{missing[0]}: no rule names this parameter of the model{more}")


def storage_location(name: str, entry: Any) -> StorageLocation:
    """Where an entry of a sharded state dict is stored.

    Raises:
        RuntimeError: its pieces are not the whole parameter, from its first row to its last.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    pieces = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
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


def _objects(entries: Iterable[Any]) -> dict[str, bytes]:
    """By key, what a save writes of objects (dist_checkpointing/strategies/torch.py:320)."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    found: dict[str, bytes] = {}
    for entry in entries:
        if isinstance(entry, ShardedObject):
            file = io.BytesIO()
            torch.save([entry.data], file)
            found[entry.unique_key] = file.getvalue()
    return found
