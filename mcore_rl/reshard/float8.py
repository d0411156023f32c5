"""Rules of parameters in float8: codes, and a float32 scale for each block of 128 x 128. No torch.

A parameter `NAME` in float8 has its scales in `NAME_scale_inv` (DeepSeek-V3's format, also vLLM's
names). Its blocks are those of the full tensor of the checkpoint: a shard must consist of complete
blocks, so that any rank quantises its own part to the same codes and scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.rules import Block, Box, LogicalTensor, Rule, Shard, Weight

BLOCK = 128  # rows and columns per scale
SCALE_SUFFIX = "_scale_inv"
IsQuantized = Callable[[str, tuple[int, ...]], bool]  # by name and shape of a logical tensor


def get_scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight.

    >>> get_scale_shape((576, 128))
    (5, 1)
    """
    return tuple(-(-size // BLOCK) for size in shape)


def add_scale_suffix(name: str) -> str:
    """Return the parameter with the scales of a parameter, or of a row of a stacked one.

    >>> add_scale_suffix("experts.w2_weight[3]")
    'experts.w2_weight_scale_inv[3]'
    """
    name, bracket, index = name.partition("[")
    return f"{name}{SCALE_SUFFIX}{bracket}{index}"


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Scales of the float8 blocks of a parameter, in the same places as the blocks in it.

    >>> from mcore_rl.reshard.rules import Split
    >>> weight, scales = LogicalTensor("w", (256, 512)), LogicalTensor("w_scale_inv", (2, 4))
    >>> rule = BlockScales(Split(weight, 1), (0,), (scales,))
    >>> rule.get_local_shape(Shard(1, 2)), rule.get_blocks(Shard(1, 2))[0].box.offsets
    ((2, 2), (0, 2))
    """

    rule: Rule  # of the parameter
    positions: tuple[int, ...]  # of the quantised tensors among the tensors of the rule
    scales: tuple[LogicalTensor, ...]  # of each of them

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return self.scales

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        return get_scale_shape(self.rule.get_local_shape(shard))

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        """Return the blocks of a shard.

        Raises:
            ConfigError: A block of 128 x 128 is on several shards, or in parts of the parameter.
        """
        tensors, shape = self.rule.tensors, self.rule.get_local_shape(shard)
        scales = {
            tensors[position].name: scale
            for position, scale in zip(self.positions, self.scales, strict=True)
        }
        return tuple(
            _divide_block(block, scales[block.tensor.name], shape, shard)
            for block in self.rule.get_blocks(shard)
            if block.tensor.name in scales
        )


def _divide_block(
    block: Block, scales: LogicalTensor, local_shape: tuple[int, ...], shard: Shard
) -> Block:
    """Return a block of a parameter in units of 128 x 128."""
    sides = zip(
        block.box.offsets,
        block.box.sizes,
        block.tensor.shape,
        block.local_offset,
        local_shape,
        strict=True,
    )
    for dim, (start, size, full, local, local_full) in enumerate(sides):
        is_last = start + size == full and local + size == local_full
        if start % BLOCK or local % BLOCK or (size % BLOCK and not is_last):
            raise ConfigError(
                f"float8 blocks of {BLOCK} x {BLOCK}: {block.tensor.name} of shape "
                f"{block.tensor.shape} has the indices {start} to {start + size} of dimension "
                f"{dim} at {local} of shard {shard.index} of {shard.count}, which cuts a block; "
                f"allowed: heads, and MLP columns on each rank, of a multiple of {BLOCK}"
            )
    return Block(
        scales,
        Box(
            tuple(start // BLOCK for start in block.box.offsets),
            get_scale_shape(block.box.sizes),
        ),
        tuple(start // BLOCK for start in block.local_offset),
    )


def add_scales(weights: Sequence[Weight], is_quantized: IsQuantized) -> Iterator[Weight]:
    """Yield the parameters of the sending side, each quantised one followed by its scales.

    A sender has the parameters in another dtype, and quantises them as it sends (executor.py).
    """
    for weight in weights:
        yield weight
        if (scales := _build_scales(weight, is_quantized)) is not None:
            yield scales


def quantize_weights(weights: Sequence[Weight], is_quantized: IsQuantized) -> Iterator[Weight]:
    """Yield the parameters of the receiving side, each quantised one in float8 and its scales.

    Raises:
        ConfigError: A parameter consists of tensors that are quantised and of others.
    """
    for weight in weights:
        scales = _build_scales(weight, is_quantized)
        if scales is None:
            yield weight
            continue
        if len(scales.rule.tensors) != len(weight.rule.tensors):
            names = ", ".join(tensor.name for tensor in weight.rule.tensors)
            raise ConfigError(f"{weight.name} has tensors in float8 and others: {names}")
        yield weight._replace(float8=True)
        yield scales


def _build_scales(weight: Weight, is_quantized: IsQuantized) -> Weight | None:
    """Return the parameter with the scales of a parameter; None if nothing in it is quantised."""
    tensors = weight.rule.tensors
    positions = tuple(n for n, tensor in enumerate(tensors) if is_quantized(*tensor[:2]))
    if not positions:
        return None
    scales = tuple(
        LogicalTensor(tensors[n].name + SCALE_SUFFIX, get_scale_shape(tensors[n].shape))
        for n in positions
    )
    rule = BlockScales(weight.rule, positions, scales)
    return weight._replace(name=add_scale_suffix(weight.name), rule=rule, float32=True)
