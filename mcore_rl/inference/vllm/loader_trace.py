"""The layout of a worker's parameters, from watching vLLM's own loader: for any model of vLLM.

The loader of a model cuts tensors of a checkpoint and copies the pieces into parameters. Here it
gets tensors on torch's meta device, which have shapes, offsets and strides but no memory, and each
copy into a parameter is recorded instead of made. The views on both sides of it say which box of
which tensor goes where. A value that the loader computes is of no tensor, and is refused by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.planner import intersect
from mcore_rl.reshard.rules import Block, Box, LogicalTensor
from mcore_rl.weight_sync.spec import ListedParameter

_aten = torch.ops.aten
_COPIES = (_aten.copy_.default, _aten._foreach_copy_.default)
_FILLS = (_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor)
# Operations whose result has the elements of their input, in the same places.
_SAME = (_aten._to_copy.default, _aten.clone.default)
_JOINS = (_aten.cat.default, _aten.stack.default)


@dataclass(slots=True)
class _Memory:
    """The memory of a parameter, of a tensor of the checkpoint or of a copy of some of these.

    Blocks may have fewer dimensions than the memory: those are rows of a stack.
    """

    name: str  # of the parameter, or of a tensor that it has elements of
    tensor: torch.Tensor  # all of the memory; no other tensor gets its place while this lives
    shape: tuple[int, ...]  # in which it is contiguous
    first: int  # offset in the storage
    blocks: dict[Block, None]  # in the order of copies
    reason: str = ""  # why it has other elements than those of blocks

    def find_blocks(self, view: torch.Tensor) -> tuple[Box, list[Block]] | None:
        """Return the box of a view and its blocks, or None if it has elements of no tensor."""
        box = self.locate(view)
        if box is None or self.reason:
            return None
        blocks = [part for block in self.blocks if (part := _cut_block(block, box)) is not None]
        boxes = [_get_local_box(block) for block in blocks]
        return (box, blocks) if _is_cover(boxes, box.numel) else None

    def locate(self, view: torch.Tensor) -> Box | None:
        """Return the box of a view, or None if it is none.

        A view has the dimensions in their order, some of them selected or of size 1.
        """
        if view.dtype != self.tensor.dtype:  # then offsets and strides are those of other elements
            return None
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        offset, offsets = view.storage_offset() - self.first, []
        for stride in strides:
            offsets.append(offset // stride)
            offset %= stride
        sizes, dims = [1] * len(self.shape), iter(range(len(self.shape)))
        for size, stride in zip(view.shape, view.stride(), strict=True):
            if size == 1:
                continue
            dim = next((d for d in dims if strides[d] == stride and self.shape[d] > 1), None)
            if dim is None or offsets[dim] + size > self.shape[dim]:
                return None
            sizes[dim] = size
        return Box(tuple(offsets), tuple(sizes))

    def refuse(self, reason: str) -> None:
        self.blocks, self.reason = {}, self.reason or reason


class _CopyRecorder(TorchDispatchMode):
    """Records copies from tensors of a checkpoint into parameters, and makes none of them."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._memories: dict[int, _Memory] = {}  # by storage
        self.parameters: dict[str, _Memory] = {}
        self.tensor_name = ""  # of the checkpoint: the last that the loader used
        for name, parameter in parameters.items():
            first = int(parameter.storage_offset())
            memory = _Memory(name, parameter.data, tuple(parameter.shape), first, {})
            self.parameters[name] = memory
            other = self._memories.setdefault(_get_storage(parameter), memory)
            if other is not memory:
                for shared in (memory, other):
                    shared.refuse(f"{other.name} and {name} share memory")

    def add(self, name: str, value: torch.Tensor) -> None:
        """Make a meta tensor known as one of the checkpoint."""
        tensor = LogicalTensor(name, tuple(value.shape))
        zeros = (0,) * value.dim()
        self.tensor_name = name
        self._remember(name, value, tensor.shape, [Block(tensor, Box(zeros, tensor.shape), zeros)])

    def copy(self, target: torch.Tensor, value: torch.Tensor) -> bool:
        """Record a copy; return False if `target` is no memory that is known."""
        memory = self._find_memory(target)
        if memory is None:
            return False
        if target.numel():
            blocks = self._find_blocks(memory, target, value)
            if blocks is None:
                memory.refuse("it copies elements that are of no tensor, or are in another shape")
            elif not memory.reason:
                memory.blocks |= dict.fromkeys(blocks)
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        known = [m for value in _list_tensors((args, kwargs)) if (m := self._find_memory(value))]
        for memory in known:
            if memory.name not in self.parameters:
                self.tensor_name = memory.name
        if func._schema.is_mutable:
            return self._change(func, args, kwargs)
        if func is _aten._to_copy.default and known and args[0].is_meta:
            kwargs["device"] = "meta"
        result = func(*args, **kwargs)
        if known and isinstance(result, torch.Tensor) and self._find_memory(result) is None:
            self._follow(func, args, kwargs, result)
        return result

    def _change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation that writes into tensors; make it if none of them is known."""
        arguments = func._schema.arguments
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        is_written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        written = [given.get(a.name) for a in itertools.compress(arguments, is_written)]
        targets = list(_list_tensors(written))
        values: list[Any] = [None] * len(targets)
        if func in _COPIES:
            values = list(_list_tensors(given["src"]))
        is_known = False
        for target, value in zip(targets, values, strict=True):
            if value is not None:
                # The memory of a tensor that is not known stays so: whatever it gets is refused.
                is_known |= self.copy(target, value) or value.is_meta
            elif (memory := self._find_memory(target)) is not None:
                is_known = True
                value = given.get("value", 0) if func in _FILLS else None
                if target.numel() and not _is_zero_fill(memory, target, value):
                    memory.refuse(f"it changes elements by {func}")
        if not is_known:
            return func(*args, **kwargs)
        results = written[: len(func._schema.returns)]
        return results[0] if len(results) == 1 else tuple(results) or None

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
    ) -> None:
        """Make the result of an operation known if it is a copy of elements that are."""
        joined = []
        if func in _SAME and _is_weight_dtype(args[0].dtype) and _is_weight_dtype(result.dtype):
            joined, dim, step = list(args[:1]), 0, 0
        elif func in _JOINS:
            joined, dim = list(args[0]), args[1] if len(args) > 1 else kwargs.get("dim", 0)
            step = 1 if func is _aten.stack.default else 0
        if not joined or not result.numel():
            return
        dim %= max(result.dim(), 1)
        if step and dim:  # rows of a stack come first
            return
        name, shape, blocks, start = "", list(result.shape), list[Block](), 0
        for value in joined:
            memory = self._find_memory(value)
            if memory is None or (part := memory.find_blocks(value)) is None:
                return
            box, cut = part
            if func in _JOINS:
                if box.sizes != tuple(value.shape):  # with dimensions that are selected
                    return
                offset = [0] * result.dim()
                offset[dim] = start
                start += 1 if step else value.shape[dim]
                cut = [
                    replace(b, local_offset=_add(offset, (*(0,) * step, *b.local_offset)))
                    for b in cut
                ]
            else:
                shape = list(box.sizes)
            name, blocks = memory.name, blocks + cut
        self._remember(name, result, tuple(shape), blocks)

    def _find_blocks(
        self, memory: _Memory, target: torch.Tensor, value: torch.Tensor
    ) -> list[Block] | None:
        """Return the blocks that a copy brings into a memory; None if it does not bring tensors."""
        source, box = self._find_memory(value), memory.locate(target)
        part = None if source is None else source.find_blocks(value)
        if box is None or part is None or tuple(_drop_ones(target)) != tuple(_drop_ones(value)):
            return None
        sizes, rank = part[0].sizes, len(part[0].sizes)
        # The same dimensions, or those of a row of a stack.
        if not rank or box.sizes not in (sizes, (1, *sizes)):
            return None
        row = (0,) * (len(box.sizes) - rank)
        return [
            replace(b, local_offset=_add(box.offsets, (*row, *b.local_offset))) for b in part[1]
        ]

    def _find_memory(self, value: torch.Tensor) -> _Memory | None:
        return self._memories.get(_get_storage(value))

    def _remember(
        self, name: str, value: torch.Tensor, shape: tuple[int, ...], blocks: Iterable[Block]
    ) -> None:
        memory = _Memory(name, value, shape, 0, dict.fromkeys(blocks))
        self._memories[_get_storage(value)] = memory


class _DataRecorder(TorchFunctionMode):
    """Records `parameter.data = tensor`, which no TorchDispatchMode gets, as a copy."""

    def __init__(self, recorder: _CopyRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            target, value = args
            # A dtype or shape that changes is refused as a value that is of no tensor.
            is_same = target.shape == value.shape and target.dtype == value.dtype
            if self._recorder.copy(target, value if is_same else target.new_empty(target.shape)):
                return None
        return func(*args, **(kwargs or {}))


def _get_storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _list_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _list_tensors(item)


def _is_weight_dtype(dtype: torch.dtype) -> bool:
    """Return whether a copy in a dtype has the values of a weight, up to rounding."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _is_zero_fill(memory: _Memory, target: torch.Tensor, value: Any) -> bool:
    """Return whether a value that fills a view is zero, and nothing has been copied there."""
    box = memory.locate(target)
    if (isinstance(value, torch.Tensor) and value.is_meta) or value != 0 or box is None:
        return False
    return not any(intersect(_get_local_box(block), box) for block in memory.blocks)


def _drop_ones(value: torch.Tensor) -> Iterator[int]:
    return (size for size in value.shape if size != 1)


def _add(a: Iterable[int], b: Iterable[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _get_local_box(block: Block) -> Box:
    """Return the box of a block in the memory that has it."""
    row_sizes = (1,) * (len(block.local_offset) - len(block.box.sizes))
    return Box(block.local_offset, (*row_sizes, *block.box.sizes))


def _cut_block(block: Block, box: Box) -> Block | None:
    """Return the part of a block in a box of its memory, with its offset in that box."""
    part = intersect(_get_local_box(block), box)
    if part is None:
        return None
    rank = len(block.box.sizes)
    shift = _subtract(part.offsets, block.local_offset)[len(part.offsets) - rank :]
    sizes = part.sizes[len(part.sizes) - rank :]
    local_offset = _subtract(part.offsets, box.offsets)
    return Block(block.tensor, Box(_add(block.box.offsets, shift), sizes), local_offset)


def _subtract(a: Iterable[int], b: Iterable[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _is_cover(boxes: list[Box], numel: int) -> bool:
    """Return whether boxes are disjoint and have `numel` elements."""
    reaching: list[Box] = []  # to the rows of the box, or further
    for box in sorted(boxes, key=lambda box: box.offsets):
        start = box.offsets[:1]
        reaching = [b for b in reaching if _add(b.offsets[:1], b.sizes[:1]) > start or not start]
        if any(intersect(b, box) for b in reaching):
            return False
        reaching.append(box)
    return sum(box.numel for box in boxes) == numel


def trace_loader(model: Any, model_path: str) -> list[ListedParameter]:
    """Return which boxes of a checkpoint vLLM's loader puts where, of a model not yet processed.

    Raises:
        ConfigError: The loader computes a parameter, fills only a part of it, or needs values of
            tensors.
    """
    parameters = dict(model.named_parameters())
    recorder = _CopyRecorder(parameters)
    reader = CheckpointReader(model_path)

    def list_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in reader.get_shapes().items():
            value = torch.empty(shape, dtype=reader.get_dtype(name), device="meta")
            recorder.add(name, value)
            yield name, reader.view_as_stored(name, value)

    with torch.no_grad(), _keep_tensors(model), _DataRecorder(recorder), recorder:
        try:
            model.load_weights(list_tensors())
        except Exception as error:
            raise ConfigError(
                f"{type(model).__name__}: vLLM's loader needs values of {recorder.tensor_name}: "
                f"{type(error).__name__}: {error}"
            ) from error
    padding = _find_padding(model)
    listed = []
    for name, memory in recorder.parameters.items():
        rows = _split_stack(memory)
        boxes = [_get_local_box(block) for block in memory.blocks]
        num_copied = sum(box.numel for box in boxes)
        boxes += padding.get(name, [])
        if memory.reason or rows is None or not _is_cover(boxes, parameters[name].numel()):
            reason = memory.reason or "its copies overlap, or leave elements out"
            raise ConfigError(
                f"{type(model).__name__}: vLLM's loader computes {name} ({num_copied} of "
                f"{parameters[name].numel()} elements are copies): {reason}"
            )
        listed += rows
    return listed


@contextmanager
def _keep_tensors(model: torch.nn.Module) -> Iterator[None]:
    """Put the parameters and buffers of all modules back that a loader replaces."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (tensors, dict(tensors))
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
    ]
    try:
        yield
    finally:
        for tensors, values in before:
            tensors.clear()
            tensors.update(values)


def _find_padding(model: Any) -> dict[str, list[Box]]:
    """Return the rows of padding of each vocabulary, by name of the parameter."""
    padding = {}
    for prefix, layer in model.named_modules():
        if isinstance(layer, VocabParallelEmbedding):
            first, (rows, columns) = layer.shard_indices.num_org_elements, layer.weight.shape
            if first < rows:
                padding[f"{prefix}.weight"] = [Box((first, 0), (rows - first, columns))]
    return padding


def _split_stack(memory: _Memory) -> list[ListedParameter] | None:
    """Return a parameter, or each row of one that is a stack of tensors with a dimension less.

    None if it is neither.
    """
    dtype, shape = str(memory.tensor.dtype).partition(".")[2], memory.shape
    ranks = {len(shape) - len(block.box.sizes) for block in memory.blocks}
    if ranks <= {0}:
        return [ListedParameter(memory.name, dtype, shape, tuple(memory.blocks))]
    if ranks != {1}:
        return None
    rows: dict[int, list[Block]] = {}
    for block in memory.blocks:
        row, *offset = block.local_offset
        rows.setdefault(row, []).append(Block(block.tensor, block.box, tuple(offset)))
    return [
        ListedParameter(f"{memory.name}[{row}]", dtype, shape[1:], tuple(rows[row]))
        for row in sorted(rows)
    ]
