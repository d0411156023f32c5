"""Sharding rules: which boxes of which tensors a rank's parameters have. Plain data, invertible.

The rule of a parameter lists the blocks of logical (Hugging Face) tensors in the local tensor of a
shard. Loading, export and resharding read the rules and nothing else. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

# "shared_tp": tp of shared experts, which are replicated where servers split tokens over tp.
Axis = Literal["tp", "etp", "shared_tp"]
# Part of the model that a parameter outside the decoder layers belongs to.
Stage = Literal["embedding", "final_norm", "head", "mtp"]


class LogicalTensor(NamedTuple):  # a large model has tens of thousands
    """An unsharded tensor of a Hugging Face checkpoint.

    `aliases` are further names under which the checkpoint repeats it: an export writes them, and
    nothing reads them. An expert of a tensor that stacks them has a name like `STACK[3]`, or
    `STACK[3].T` if it is transposed here (StackSlice).
    """

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def alias_tensors(self) -> tuple[LogicalTensor, ...]:
        return tuple(LogicalTensor(name, self.shape) for name in self.aliases)


@dataclass(frozen=True, slots=True)
class StackSlice:
    """A slice of a stacked tensor of a checkpoint: a logical tensor of its own."""

    stack: str  # name of the stacked tensor
    index: int  # along its first dimension
    is_transposed: bool  # whether the slice is a matrix with its dimensions exchanged

    def to_stack_shape(self, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Return the shape of a stack of `count` slices that have a shape here."""
        return (count, *(shape[::-1] if self.is_transposed else shape))


_SLICE = re.compile(r"(.+)\[(\d+)\](\.T)?")


def parse_slice(name: str) -> StackSlice | None:
    """Return the slice that a logical tensor is; None for a tensor of its own.

    >>> parse_slice("experts.down_proj[3].T")
    StackSlice(stack='experts.down_proj', index=3, is_transposed=True)
    """
    if not name.endswith(("]", "].T")):  # most are not, and a pattern takes longer
        return None
    match = _SLICE.fullmatch(name)
    return match and StackSlice(match[1], int(match[2]), bool(match[3]))


def join_slices(tensors: Iterable[LogicalTensor]) -> Iterator[LogicalTensor]:
    """Yield the tensors of a checkpoint: slices of a stack as the stack, where its first one is.

    Raises:
        ValueError: A stack lacks a slice, or its slices differ in shape.
    """
    tensors = list(tensors)
    slices: dict[str, dict[int, tuple[int, ...]]] = {}
    for tensor in tensors:
        if (part := parse_slice(tensor.name)) is not None:
            slices.setdefault(part.stack, {})[part.index] = tensor.shape
    for tensor in tensors:
        if (part := parse_slice(tensor.name)) is None:
            yield tensor
        elif (shapes := slices.pop(part.stack, None)) is not None:
            if shapes.keys() != set(range(len(shapes))) or len(set(shapes.values())) > 1:
                raise ValueError(f"{part.stack}: its slices are {shapes}")
            yield LogicalTensor(part.stack, part.to_stack_shape(tensor.shape, len(shapes)))


@dataclass(frozen=True, slots=True)
class Box:
    """Offsets and sizes of a hyper-rectangle.

    >>> Box((4, 0), (2, 8)).numel
    16
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"box offsets {self.offsets} and sizes {self.sizes} differ in rank")
        if min(self.offsets, default=0) < 0 or min(self.sizes, default=1) < 1:
            raise ValueError(f"empty or negative box: offsets {self.offsets}, sizes {self.sizes}")

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a logical tensor, and the offset of its first element in a local tensor."""

    tensor: LogicalTensor
    box: Box
    local_offset: tuple[int, ...]

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return Box(self.local_offset, self.box.sizes).slices


def slice_rows(tensor: LogicalTensor, start: int, count: int, local_start: int) -> Block:
    """Return rows [start, start + count) of a tensor, at row `local_start` of the local tensor."""
    rest = tensor.shape[1:]
    zeros = (0,) * len(rest)
    return Block(tensor, Box((start, *zeros), (count, *rest)), (local_start, *zeros))


@dataclass(frozen=True, slots=True)
class Shard:
    """The index-th of count equal shards along the rule's mesh axis."""

    index: int
    count: int


class Rule(Protocol):
    """Layout of a parameter: the blocks of logical tensors in each of its shards."""

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        """Logical tensors that the parameter consists of."""
        ...

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        """Return the shape of a shard."""
        ...

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        """Return the blocks of a shard."""
        ...


def _divide(size: int, shard: Shard, what: str) -> int:
    """Return the size of a shard; ValueError, naming `what`, if the shards are not equal."""
    if size % shard.count:
        raise ValueError(f"{what} of size {size} does not divide into {shard.count} shards")
    return size // shard.count


@dataclass(frozen=True, slots=True)
class Replicated:
    """A logical tensor, replicated on every rank."""

    tensor: LogicalTensor

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return (self.tensor,)

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        return self.tensor.shape

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        zeros = (0,) * len(self.tensor.shape)
        return (Block(self.tensor, Box(zeros, self.tensor.shape), zeros),)


@dataclass(frozen=True, slots=True)
class Split:
    """A logical tensor, split equally along `dim`; `padded`: size of a padded vocabulary.

    >>> Split(LogicalTensor("e", (5, 2)), dim=0, padded=6).get_blocks(Shard(1, 2))[0].box.sizes
    (2, 2)
    """

    tensor: LogicalTensor
    dim: int
    padded: int | None = None

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return (self.tensor,)

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        size = _divide(self.padded or self.tensor.shape[self.dim], shard, self.tensor.name)
        return (*self.tensor.shape[: self.dim], size, *self.tensor.shape[self.dim + 1 :])

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        shape = self.get_local_shape(shard)
        start = shard.index * shape[self.dim]
        size = min(shape[self.dim], self.tensor.shape[self.dim] - start)
        if size <= 0:  # only padding
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

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        return (2 * _divide(self.gate.shape[0], shard, self.gate.name), *self.gate.shape[1:])

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        part = _divide(self.gate.shape[0], shard, self.gate.name)
        start = shard.index * part
        return (slice_rows(self.gate, start, part, 0), slice_rows(self.up, start, part, part))


@dataclass(frozen=True, slots=True)
class InterleavedGateUp(Split):
    """Rows of gate and up in turns, in one tensor: gpt-oss's experts, in Megatron and in vLLM."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class InterleavedQKV:
    """Megatron's linear_qkv: for each query group its q heads, its k head, its v head.

    `gated`: q has [query; gate] of each head, and the local tensor the gates of a group after its
    queries (attention_output_gate of Megatron).
    """

    q: LogicalTensor
    k: LogicalTensor
    v: LogicalTensor
    num_groups: int  # key/value heads
    gated: bool = False

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return (self.q, self.k, self.v)

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        total = self.q.shape[0] + self.k.shape[0] + self.v.shape[0]
        groups = _divide(self.num_groups, shard, f"query groups of {self.q.name}")
        return (groups * (total // self.num_groups), *self.q.shape[1:])

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        groups = _divide(self.num_groups, shard, f"query groups of {self.q.name}")
        blocks: list[Block] = []
        local = 0
        for group in range(shard.index * groups, (shard.index + 1) * groups):
            for tensor, first, size in self._list_rows(group):
                blocks.append(slice_rows(tensor, first, size, local))
                local += size
        return tuple(blocks)

    def _list_rows(self, group: int) -> Iterator[tuple[LogicalTensor, int, int]]:
        """Yield (tensor, first row, number of rows) of a group, in local order."""
        sizes = [tensor.shape[0] // self.num_groups for tensor in self.tensors]
        q_rows, dim = sizes[0], sizes[1]
        if self.gated:
            for part in (0, dim):
                heads = range(group * q_rows + part, (group + 1) * q_rows, 2 * dim)
                yield from ((self.q, first, dim) for first in heads)
        else:
            yield self.q, group * q_rows, q_rows
        for tensor, size in zip(self.tensors[1:], sizes[1:], strict=True):
            yield tensor, group * size, size


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of a tensor that belong together: `size` rows of each of its units.

    The first unit begins at row `start`, and the next ones every `stride` rows.
    """

    tensor: int  # position in the tensors of the rule
    start: int
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class StackedSections:
    """Sections one below the other, each split by its units: projections of linear attention.

    A unit is a key head, whose rows are apart in a checkpoint that interleaves its sections.

    >>> w = LogicalTensor("in_proj", (8, 2))  # of two heads, 1 row of q and 3 of v each
    >>> rule = StackedSections((w,), (Section(0, 0, 1, 4), Section(0, 1, 3, 4)), num_units=2)
    >>> [(block.box.offsets[0], block.box.sizes[0]) for block in rule.get_blocks(Shard(0, 1))]
    [(0, 1), (4, 1), (1, 3), (5, 3)]
    """

    parts: tuple[LogicalTensor, ...]
    sections: tuple[Section, ...]
    num_units: int

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return self.parts

    def get_section_rows(self, shard: Shard) -> tuple[int, ...]:
        """Return the rows of each section in a shard."""
        units = _divide(self.num_units, shard, f"heads of {self.parts[0].name}")
        return tuple(units * section.size for section in self.sections)

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        return (sum(self.get_section_rows(shard)), *self.parts[0].shape[1:])

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        units = _divide(self.num_units, shard, f"heads of {self.parts[0].name}")
        blocks, local = [], 0
        for section in self.sections:
            first = section.start + shard.index * units * section.stride
            # Neighbouring units are one block.
            is_dense = section.size == section.stride
            count, size = (1, units * section.size) if is_dense else (units, section.size)
            for unit in range(count):
                start = first + unit * section.stride
                blocks.append(slice_rows(self.parts[section.tensor], start, size, local))
                local += size
        return tuple(blocks)


@dataclass(frozen=True, slots=True)
class StackedQKV:
    """vLLM's qkv_proj: [q heads; k heads; v heads] of each shard.

    With fewer key/value heads than shards, each head is replicated on several shards
    (model_executor/layers/linear.py:1053 of vLLM 0.32).
    """

    q: LogicalTensor
    k: LogicalTensor
    v: LogicalTensor
    num_groups: int  # key/value heads

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return (self.q, self.k, self.v)

    def _list_rows(self, shard: Shard) -> tuple[tuple[LogicalTensor, int, int], ...]:
        """Return (tensor, first row, number of rows) of a shard."""
        q_rows = _divide(self.q.shape[0], shard, self.q.name)
        first, size = _locate_heads(self.k, self.num_groups, shard)
        return (
            (self.q, shard.index * q_rows, q_rows),
            (self.k, first, size),
            (self.v, first, size),
        )

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        return (sum(size for _, _, size in self._list_rows(shard)), *self.q.shape[1:])

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        blocks, local = [], 0
        for tensor, first, size in self._list_rows(shard):
            blocks.append(slice_rows(tensor, first, size, local))
            local += size
        return tuple(blocks)


def _locate_heads(tensor: LogicalTensor, num_heads: int, shard: Shard) -> tuple[int, int]:
    """Return first row and number of rows of a shard, which has one head at least."""
    head = tensor.shape[0] // num_heads
    if num_heads < shard.count:
        copies = _divide(shard.count, Shard(0, num_heads), f"shards of {tensor.name}")
        return shard.index // copies * head, head
    size = _divide(num_heads, shard, f"heads of {tensor.name}") * head
    return shard.index * size, size


@dataclass(frozen=True, slots=True)
class SharedHeads:
    """Rows of a tensor by key/value head, as StackedQKV has them: vLLM's norm of all keys.

    >>> rule = SharedHeads(LogicalTensor("k_norm", (4,)), num_heads=2)
    >>> [rule.get_blocks(Shard(index, 4))[0].box.offsets for index in range(4)]
    [(0,), (0,), (2,), (2,)]
    """

    tensor: LogicalTensor
    num_heads: int

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return (self.tensor,)

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        return (_locate_heads(self.tensor, self.num_heads, shard)[1], *self.tensor.shape[1:])

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        return (slice_rows(self.tensor, *_locate_heads(self.tensor, self.num_heads, shard), 0),)


@dataclass(frozen=True, slots=True)
class FirstShard:
    """A logical tensor on the first shard, zeros on others: a bias that is added once.

    Biases of vLLM's down-projections of experts, whose sums over ranks have them once.
    """

    tensor: LogicalTensor

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return (self.tensor,)

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        return self.tensor.shape

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        return Replicated(self.tensor).get_blocks(shard) if shard.index == 0 else ()


@dataclass(frozen=True, slots=True)
class Concat:
    """Logical tensors, concatenated and replicated: vLLM's fused_qkv_a_proj."""

    parts: tuple[LogicalTensor, ...]

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return self.parts

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        blocks, local = [], 0
        for part in self.parts:
            blocks.append(slice_rows(part, 0, part.shape[0], local))
            local += part.shape[0]
        return tuple(blocks)


@dataclass(frozen=True, slots=True)
class StackedRows:
    """Whole tensors one below the other, divided by rows as torch.chunk does: FSDP2's parameters.

    A shard has ceil(units / shards) units, the last ones fewer or none. A unit is a row or, of
    stacked experts, all rows of an expert; a local tensor of those is viewed as rows.

    >>> rule = StackedRows((LogicalTensor("w", (5, 2)),), num_units=5)
    >>> [rule.get_local_shape(Shard(index, 4)) for index in range(4)]
    [(2, 2), (2, 2), (1, 2), (0, 2)]
    """

    parts: tuple[LogicalTensor, ...]
    num_units: int

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return self.parts

    def split_units(self, count: int) -> tuple[StackedRows, ...]:
        """Return `count` rules with equal shares of the tensors, in their order."""
        size = _divide(len(self.parts), Shard(0, count), f"tensors of {self.parts[0].name}")
        units = _divide(self.num_units, Shard(0, count), f"units of {self.parts[0].name}")
        return tuple(
            StackedRows(self.parts[start : start + size], units)
            for start in range(0, len(self.parts), size)
        )

    def get_rows(self, shard: Shard) -> range:
        """Return the rows of a shard."""
        rows_per_unit = sum(part.shape[0] for part in self.parts) // self.num_units
        step = -(-self.num_units // shard.count)
        start, end = (min(index * step, self.num_units) for index in (shard.index, shard.index + 1))
        return range(start * rows_per_unit, end * rows_per_unit)

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        return (len(self.get_rows(shard)), *self.parts[0].shape[1:])

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        rows, blocks, first = self.get_rows(shard), [], 0
        for part in self.parts:
            start, end = max(rows.start, first), min(rows.stop, first + part.shape[0])
            if start < end:
                blocks.append(slice_rows(part, start - first, end - start, start - rows.start))
            first += part.shape[0]
        return tuple(blocks)


@dataclass(frozen=True, slots=True)
class ListedRule:
    """A parameter whose blocks are listed, the same on all ranks that have it."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    ranks: tuple[int, ...]  # of the tensor-parallel ranks of a server

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return tuple(dict.fromkeys(block.tensor for block in self.blocks))

    def get_local_shape(self, shard: Shard) -> tuple[int, ...]:
        return self.shape

    def get_blocks(self, shard: Shard) -> tuple[Block, ...]:
        return self.blocks


class Weight(NamedTuple):
    """A parameter of an engine: its name, its rule, and the mesh axes that place it.

    `name` is Megatron's or vLLM's; "{layer}" and "{expert}" are replaced by local indices of a
    rank. If experts are stacked in a parameter, "[{expert}]" at the end is the index in the stack.
    """

    name: str
    rule: Rule
    axis: Axis | None = None  # mesh axis that shards it; None: replicated
    layer: int | None = None  # decoder layer, placed by the pipeline axis
    expert: int | None = None  # placed by the expert axis
    stage: Stage | None = None  # for what is outside the decoder layers
    # A copy of another weight's tensors, which a pipeline needs if that is on another chunk (tied
    # embeddings, multi-token prediction): loaded, never exported.
    replica: bool = False
    float32: bool = False  # float32 for any dtype of the model
    float8: bool = False  # codes of float8 blocks (float8.py)

    @property
    def itemsize(self) -> int | None:
        """Bytes of an element as it is sent; None: those of the update's dtype."""
        return 1 if self.float8 else 4 if self.float32 else None

    def get_local_name(self, first_layer: int = 0, first_expert: int = 0) -> str:
        """Return the name on a rank with these first layer and expert."""
        name = self.name
        if self.layer is not None:
            name = name.replace("{layer}", str(self.layer - first_layer))
        if self.expert is not None:
            name = name.replace("{expert}", str(self.expert - first_expert))
        return name


def rename_tensors(weights: Iterable[Weight], rename: Callable[[str], str]) -> Iterator[Weight]:
    """Yield weights whose logical tensors, aliases included, have other names in a checkpoint."""

    def convert(value: Any) -> Any:
        if isinstance(value, LogicalTensor):
            return LogicalTensor(rename(value.name), value.shape, tuple(map(rename, value.aliases)))
        return tuple(map(convert, value)) if type(value) is tuple else value

    for weight in weights:
        rule: Any = weight.rule
        tensors = {field.name: convert(getattr(rule, field.name)) for field in fields(rule)}
        yield weight._replace(rule=replace(rule, **tensors))


def list_logical_tensors(weights: Sequence[Weight]) -> Iterator[LogicalTensor]:
    """Yield every tensor of a checkpoint in the order of the rules, aliases after their tensor."""
    for weight in weights:
        if not weight.replica:
            for tensor in weight.rule.tensors:
                yield tensor
                yield from tensor.alias_tensors


def check_cover(weights: Sequence[Weight], count: int) -> None:
    """Raise ValueError unless `count` shards cover each logical tensor exactly once.

    Elements are counted and blocks compared; of replicated rules the first shard is taken.
    """
    names: set[str] = set()
    for weight in weights:
        if weight.replica:
            continue
        shards = range(count) if weight.axis else range(1)
        covered: dict[str, int] = {}
        boxes: set[tuple[str, Box]] = set()
        for index in shards:
            for block in weight.rule.get_blocks(Shard(index, count if weight.axis else 1)):
                if (block.tensor.name, block.box) in boxes:
                    raise ValueError(
                        f"{weight.name}: {block.box} of {block.tensor.name} occurs twice"
                    )
                boxes.add((block.tensor.name, block.box))
                covered[block.tensor.name] = covered.get(block.tensor.name, 0) + block.box.numel
        for tensor in weight.rule.tensors:
            for name in (tensor.name, *tensor.aliases):
                if name in names:
                    raise ValueError(f"{name} is named by two parameters, {weight.name} the second")
                names.add(name)
            numel = math.prod(tensor.shape)
            if covered.get(tensor.name, 0) != numel:
                raise ValueError(
                    f"{weight.name}: {covered.get(tensor.name, 0)} of {numel} elements "
                    f"of {tensor.name}"
                )
