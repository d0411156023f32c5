"""Sharding rules: which part of a parameter a rank has. Pure data, invertible.

The rule of one parameter of an engine lists the blocks of logical (Hugging Face) tensors that
are in the local tensor of one shard. Loading, export and resharding only read the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from mcore_rl.reshard.boxes import Block, Box, LogicalTensor, rows

Axis = Literal["tp", "etp"]
# Where a parameter outside the decoder layers is: with the chunk of the model that has it.
Stage = Literal["embedding", "final_norm", "head", "mtp"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The index-th of count equal shards along the rule's mesh axis."""

    index: int
    count: int


class Rule(Protocol):
    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        """The logical tensors that the parameter is made of."""
        ...

    def local_shape(self, shard: Shard) -> tuple[int, ...]: ...

    def blocks(self, shard: Shard) -> tuple[Block, ...]: ...


def _part(size: int, shard: Shard, what: str) -> int:
    if size % shard.count:
        raise ValueError(f"{what} of size {size} does not divide into {shard.count} shards")
    return size // shard.count


@dataclass(frozen=True, slots=True)
class Whole:
    """The parameter is one logical tensor, replicated on every rank."""

    tensor: LogicalTensor

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return (self.tensor,)

    def local_shape(self, shard: Shard) -> tuple[int, ...]:
        return self.tensor.shape

    def blocks(self, shard: Shard) -> tuple[Block, ...]:
        zeros = (0,) * len(self.tensor.shape)
        return (Block(self.tensor, Box(zeros, self.tensor.shape), zeros),)


@dataclass(frozen=True, slots=True)
class Split:
    """Equal slices of one dim; `padded` is its size with padding, for a vocabulary.

    >>> Split(LogicalTensor("e", (5, 2)), dim=0, padded=6).blocks(Shard(1, 2))[0].box.sizes
    (2, 2)
    """

    tensor: LogicalTensor
    dim: int
    padded: int | None = None

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return (self.tensor,)

    def local_shape(self, shard: Shard) -> tuple[int, ...]:
        size = _part(self.padded or self.tensor.shape[self.dim], shard, self.tensor.name)
        return (*self.tensor.shape[: self.dim], size, *self.tensor.shape[self.dim + 1 :])

    def blocks(self, shard: Shard) -> tuple[Block, ...]:
        shape = self.local_shape(shard)
        start = shard.index * shape[self.dim]
        size = min(shape[self.dim], self.tensor.shape[self.dim] - start)
        if size <= 0:  # the shard has padding only
            return ()
        zeros = (0,) * len(shape)
        offsets = tuple(start if d == self.dim else 0 for d in range(len(shape)))
        sizes = tuple(size if d == self.dim else n for d, n in enumerate(shape))
        return (Block(self.tensor, Box(offsets, sizes), zeros),)


@dataclass(frozen=True, slots=True)
class GateUp:
    """[gate; up] of each shard: Megatron's gated linear_fc1."""

    gate: LogicalTensor
    up: LogicalTensor

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return (self.gate, self.up)

    def local_shape(self, shard: Shard) -> tuple[int, ...]:
        return (2 * _part(self.gate.shape[0], shard, self.gate.name), *self.gate.shape[1:])

    def blocks(self, shard: Shard) -> tuple[Block, ...]:
        part = _part(self.gate.shape[0], shard, self.gate.name)
        start = shard.index * part
        return (rows(self.gate, start, part, 0), rows(self.up, start, part, part))


@dataclass(frozen=True, slots=True)
class InterleavedQKV:
    """Megatron's linear_qkv: for each query group its q heads, its k head, its v head."""

    q: LogicalTensor
    k: LogicalTensor
    v: LogicalTensor
    num_groups: int  # key/value heads

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return (self.q, self.k, self.v)

    def local_shape(self, shard: Shard) -> tuple[int, ...]:
        total = self.q.shape[0] + self.k.shape[0] + self.v.shape[0]
        groups = _part(self.num_groups, shard, f"query groups of {self.q.name}")
        return (groups * (total // self.num_groups), *self.q.shape[1:])

    def blocks(self, shard: Shard) -> tuple[Block, ...]:
        groups = _part(self.num_groups, shard, f"query groups of {self.q.name}")
        found: list[Block] = []
        local = 0
        for group in range(shard.index * groups, (shard.index + 1) * groups):
            for tensor in self.tensors:
                size = tensor.shape[0] // self.num_groups
                found.append(rows(tensor, group * size, size, local))
                local += size
        return tuple(found)


@dataclass(frozen=True, slots=True)
class StackedQKV:
    """vLLM's qkv_proj: a shard's [q heads; k heads; v heads].

    With fewer key/value heads than shards, each head is on several of them
    (model_executor/layers/linear.py:1053 of vLLM 0.32).
    """

    q: LogicalTensor
    k: LogicalTensor
    v: LogicalTensor
    num_groups: int  # key/value heads

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return (self.q, self.k, self.v)

    def _runs(self, shard: Shard) -> tuple[tuple[LogicalTensor, int, int], ...]:
        """(tensor, first row, rows), in their order."""
        q_rows = _part(self.q.shape[0], shard, self.q.name)
        head = self.k.shape[0] // self.num_groups
        if self.num_groups < shard.count:
            copies = _part(shard.count, Shard(0, self.num_groups), f"shards of {self.k.name}")
            first, size = shard.index // copies * head, head
        else:
            size = _part(self.num_groups, shard, f"key/value heads of {self.k.name}") * head
            first = shard.index * size
        return (
            (self.q, shard.index * q_rows, q_rows),
            (self.k, first, size),
            (self.v, first, size),
        )

    def local_shape(self, shard: Shard) -> tuple[int, ...]:
        return (sum(size for _, _, size in self._runs(shard)), *self.q.shape[1:])

    def blocks(self, shard: Shard) -> tuple[Block, ...]:
        found, local = [], 0
        for tensor, first, size in self._runs(shard):
            found.append(rows(tensor, first, size, local))
            local += size
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Concat:
    """Whole tensors one behind the other, replicated: vLLM's fused_qkv_a_proj."""

    parts: tuple[LogicalTensor, ...]

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return self.parts

    def local_shape(self, shard: Shard) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def blocks(self, shard: Shard) -> tuple[Block, ...]:
        found, local = [], 0
        for part in self.parts:
            found.append(rows(part, 0, part.shape[0], local))
            local += part.shape[0]
        return tuple(found)


class Weight(NamedTuple):
    """One parameter of an engine: its name, what it is made of, and which axes place it.

    `name` is the engine's, Megatron's or vLLM's: "{layer}" and "{expert}" stand where a rank puts
    its local numbers. Where an engine stacks its experts into one parameter, "[{expert}]" at the
    end of the name is the place in the stack.
    """

    name: str
    rule: Rule
    axis: Axis | None = None  # mesh axis that shards it; None: replicated
    layer: int | None = None  # decoder layer, placed by the pipeline axis
    expert: int | None = None  # placed by the expert axis
    stage: Stage | None = None  # for what is outside the decoder layers
    # A second copy of tensors of another weight, which a pipeline needs when the first is on
    # another chunk (tied embeddings, multi-token prediction): loaded, never exported.
    replica: bool = False
    float32: bool = False  # kept in float32 whatever the dtype of the model

    def local_name(self, first_layer: int = 0, first_expert: int = 0) -> str:
        name = self.name
        if self.layer is not None:
            name = name.replace("{layer}", str(self.layer - first_layer))
        if self.expert is not None:
            name = name.replace("{expert}", str(self.expert - first_expert))
        return name


def logical_tensors(weights: Sequence[Weight]) -> Iterator[LogicalTensor]:
    """Every tensor of a checkpoint, in the order of the rules; copies behind their original."""
    for weight in weights:
        if not weight.replica:
            for tensor in weight.rule.tensors:
                yield tensor
                yield from tensor.copies


def check_cover(weights: Sequence[Weight], count: int) -> None:
    """Raise ValueError unless `count` shards cover each logical tensor exactly once.

    Counts elements and compares row starts; replicated rules are read at their first shard.
    """
    seen: set[str] = set()
    for weight in weights:
        if weight.replica:
            continue
        shards = range(count) if weight.axis else range(1)
        covered: dict[str, int] = {}
        boxes: set[tuple[str, Box]] = set()
        for index in shards:
            for block in weight.rule.blocks(Shard(index, count if weight.axis else 1)):
                if (block.tensor.name, block.box) in boxes:
                    raise ValueError(
                        f"{weight.name}: {block.box} of {block.tensor.name} occurs twice"
                    )
                boxes.add((block.tensor.name, block.box))
                covered[block.tensor.name] = covered.get(block.tensor.name, 0) + block.box.numel
        for tensor in weight.rule.tensors:
            for name in (tensor.name, *tensor.also):
                if name in seen:
                    raise ValueError(f"{name} is named by two parameters, {weight.name} the second")
                seen.add(name)
            whole = Box((0,) * len(tensor.shape), tensor.shape).numel
            if covered.get(tensor.name, 0) != whole:
                raise ValueError(
                    f"{weight.name}: {covered.get(tensor.name, 0)} of {whole} elements "
                    f"of {tensor.name}"
                )
