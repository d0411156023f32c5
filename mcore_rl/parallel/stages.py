"""Which part of the model is on each pipeline rank. Pure: no torch, no process group."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.resolve_engine import count_chunk_layers
from mcore_rl.config.schema import Layout


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive decoder layers on one pipeline rank, and what is before and after them."""

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

    Chunk i is on pipeline rank i % pp. Multi-token prediction is with the output head.

    >>> [list(c.layers) for c in split_into_chunks(Layout(pp=2, first_stage_layers=1), 4)]
    [[0], [1, 2, 3]]

    Raises:
        ConfigError: the layers do not divide over the chunks.
    """
    counts = count_chunk_layers("layout", layout, num_layers)
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
