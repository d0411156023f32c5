"""Which part of the model each pipeline rank holds. Pure: no torch, no process group."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of decoder layers that one pipeline rank holds, and what stands around them."""

    pp_rank: int
    vpp_rank: int  # place among the chunks of its rank
    layers: range  # decoder layers, numbered over the whole model
    has_embedding: bool
    has_head: bool
    has_final_norm: bool
    num_mtp_layers: int

    @property
    def contents(self) -> list[str]:
        """As Megatron's pipeline_model_parallel_layout spells it."""
        found = ["embedding"] * self.has_embedding + ["decoder"] * len(self.layers)
        return found + ["mtp"] * self.num_mtp_layers + ["loss"] * self.has_head


def split_into_chunks(layout: Layout, num_layers: int, num_mtp_layers: int = 0) -> list[Chunk]:
    """The pp * vpp chunks of a model in the order of its layers.

    Chunk i stands on pipeline rank i % pp. Multi-token prediction stands with the output head.

    >>> [list(c.layers) for c in split_into_chunks(Layout(pp=2, first_stage_layers=1), 4)]
    [[0], [1, 2, 3]]

    Raises:
        ConfigError: the layers do not divide over the chunks.
    """
    counts = _layers_of_chunks(layout, num_layers)
    last = len(counts) - 1
    chunks, start = [], 0
    for index, count in enumerate(counts):
        layers = range(start, start + count)
        start += count
        holds_last_layer = count > 0 and layers.stop == num_layers
        chunks.append(
            Chunk(
                pp_rank=index % layout.pp,
                vpp_rank=index // layout.pp,
                layers=layers,
                has_embedding=index == 0,
                has_head=index == last,
                # Megatron moves the norm to the last decoder layer when the model has MTP layers
                # (transformer/transformer_block.py:390).
                has_final_norm=holds_last_layer if num_mtp_layers else index == last,
                num_mtp_layers=num_mtp_layers if index == last else 0,
            )
        )
    return chunks


def _layers_of_chunks(layout: Layout, num_layers: int) -> list[int]:
    num_chunks = layout.pp * layout.vpp
    if layout.vpp > 1 and layout.pp == 1:
        raise ConfigError(f"layout.vpp={layout.vpp} needs layout.pp above 1; layout.pp=1")
    ends = (layout.first_stage_layers, layout.last_stage_layers)
    for name, given in zip(("first_stage_layers", "last_stage_layers"), ends, strict=True):
        if given is not None and num_chunks == 1:
            raise ConfigError(f"layout.{name}={given} needs layout.pp above 1; layout.pp=1")
        if given is not None and given < 0:
            raise ConfigError(f"layout.{name}={given}; allowed: at least 0")
    free = num_chunks - sum(given is not None for given in ends)
    rest = num_layers - sum(given or 0 for given in ends)
    if rest < 0 or (free == 0 and rest) or (free and (rest % free or rest == 0)):
        raise ConfigError(
            f"layout.pp * layout.vpp = {layout.pp} * {layout.vpp} chunks with "
            f"first_stage_layers={ends[0]}, last_stage_layers={ends[1]}: the {num_layers} layers "
            f"of the model leave {rest} for {free} equal chunks; allowed: a multiple, above 0"
        )
    counts = [rest // free if free else 0] * num_chunks
    for index, given in ((0, ends[0]), (num_chunks - 1, ends[1])):
        if given is not None:
            counts[index] = given
    return counts
