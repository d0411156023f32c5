"""A rank's weights as reshard plans name them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from mcore_rl.engine.megatron.weights import (
    WeightPlacement,
    adapter_of,
    computed,
    local_tensors,
    parameter_of,
)
from mcore_rl.parallel.mesh import Coordinate
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.rules import Weight


def get_local_weights(
    chunks: Sequence[torch.nn.Module],
    weights: Sequence[Weight],
    placement: WeightPlacement,
    at: Coordinate,
) -> LocalWeights:
    """The rank's shards, as the model computes with them: layers with adapters are merged.

    Merged weights are made when they are asked for. The others are the live parameters, which must
    not change while they are read.
    """
    tensors = [local_tensors(chunk) for chunk in chunks]
    found = LocalWeights({}, {})
    for weight in weights:
        if not placement.holds(weight, at):
            continue
        name = placement.ranks.get_local_name(weight)
        index, parameter = parameter_of(name)
        tensor = tensors[index][parameter]
        if adapter_of(chunks[index], parameter) is None:
            found.stored[name] = tensor.data
        else:
            found.computed[name] = partial(computed, chunks[index], parameter, tensor)
    return found
