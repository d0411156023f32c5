"""Training ranks without an engine: parameters as the rules of a model's family place them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mcore_rl.reshard.planner import Side
from mcore_rl.reshard.rules import Block, Shard

ReadBlock = Callable[[Block], torch.Tensor]


def fill_parameters(side: Side, rank: int, read: ReadBlock) -> dict[str, torch.Tensor]:
    """Return a rank's parameters by name; NaN where no tensor is: in the vocabulary's padding."""
    ranks, weights = side
    parameters = {}
    for weight in weights:
        holders = ranks.get_holders(weight)
        index = next((n for n, members in enumerate(holders) if rank in members), None)
        if index is None:
            continue
        shard = Shard(index, len(holders))
        local = torch.full(weight.rule.get_local_shape(shard), torch.nan)
        for block in weight.rule.get_blocks(shard):
            local[block.local_slices] = read(block)
        parameters[ranks.get_local_name(weight)] = local
    return parameters
