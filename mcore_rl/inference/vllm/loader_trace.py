"""The layout of a worker's parameters, from watching vLLM's own loader: for any model of vLLM.

The loader of a model cuts tensors of a checkpoint and copies the pieces into parameters. Here it
gets tensors on torch's meta device, which have shapes, offsets and strides but no memory, and each
copy into a parameter is recorded instead of made. The views on both sides of it say which box of
which tensor goes where. A value that the loader computes is of no tensor, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.rules import Block, Box, LogicalTensor
from mcore_rl.weight_sync.spec import ListedParameter

_COPIES = (torch.ops.aten.copy_.default,)
# Operations whose result has the elements of their input, in the same places.
_SAME = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
)


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the checkpoint, or a box of one that the loader has copied to new memory."""

    tensor: LogicalTensor
    box: Box


class _CopyRecorder(TorchDispatchMode):
    """Records copies from tensors of a checkpoint into parameters, and makes none of them."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._targets = {
            parameter.untyped_storage()._cdata: (name, parameter)
            for name, parameter in parameters.items()
        }
        self._sources: dict[int, _Source] = {}
        self._alive: list[torch.Tensor] = []  # so that no storage is used twice
        self.blocks: dict[str, list[Block]] = {}
        self.computed: set[str] = set()  # parameters with values that are of no tensor

    def add(self, name: str, value: torch.Tensor) -> None:
        """Make a meta tensor known as one of the checkpoint."""
        tensor = LogicalTensor(name, tuple(value.shape))
        box = Box((0,) * value.dim(), tensor.shape)
        self._remember(value, _Source(tensor, box))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _COPIES and isinstance(args[1], torch.Tensor) and args[1].is_meta:
            self._record(args[0], args[1])
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func in _SAME and args[0].is_meta and not _share_storage(result, args[0]):
            source = self._find(args[0])
            if source is not None:
                self._remember(result, source)
        return result

    def _remember(self, value: torch.Tensor, source: _Source) -> None:
        self._sources[value.untyped_storage()._cdata] = source
        self._alive.append(value)

    def _find(self, view: torch.Tensor) -> _Source | None:
        """Return the box of the checkpoint that a view has, with its dimensions."""
        source = self._sources.get(view.untyped_storage()._cdata)
        if source is None:
            return None
        box = _locate(view, source.box.sizes, 0)
        if box is None:
            return None
        offsets = zip(source.box.offsets, box.offsets, strict=True)
        return _Source(source.tensor, Box(tuple(a + b for a, b in offsets), box.sizes))

    def _record(self, target: torch.Tensor, value: torch.Tensor) -> None:
        if (known := self._targets.get(target.untyped_storage()._cdata)) is None:
            return  # not into a parameter
        name, parameter = known
        source = self._find(value)
        box = _locate(target, tuple(parameter.shape), int(parameter.storage_offset()))
        shape = tuple(n for n in target.shape if n != 1)
        if source is None or box is None or shape != tuple(n for n in source.box.sizes if n != 1):
            self.computed.add(name)
            return
        self.blocks.setdefault(name, []).append(Block(source.tensor, source.box, box.offsets))


def _share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _locate(view: torch.Tensor, shape: tuple[int, ...], first: int) -> Box | None:
    """Return the box of a view of a contiguous tensor of `shape` at `first`; None if it is none.

    A view has the dimensions in their order, some of them selected or of size 1.
    """
    if not view.numel():
        return None
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    strides.reverse()
    offset, offsets = view.storage_offset() - first, []
    for stride in strides:
        offsets.append(offset // stride)
        offset %= stride
    sizes, dims = [1] * len(shape), iter(range(len(shape)))
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        dim = next((d for d in dims if strides[d] == stride and shape[d] > 1), None)
        if dim is None or offsets[dim] + size > shape[dim]:
            return None
        sizes[dim] = size
    return Box(tuple(offsets), tuple(sizes))


def trace_loader(model: Any, model_path: str) -> list[ListedParameter]:
    """Return which boxes of a checkpoint vLLM's loader puts where, of a model not yet processed.

    Raises:
        ConfigError: The loader computes a parameter, or fills only a part of it.
    """
    parameters = dict(model.named_parameters())
    recorder = _CopyRecorder(parameters)
    reader = CheckpointReader(model_path)

    def list_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in reader.get_shapes().items():
            value = torch.empty(shape, dtype=reader.get_dtype(name), device="meta")
            recorder.add(name, value)
            yield name, value

    with torch.no_grad(), recorder:
        model.load_weights(list_tensors())
    padding = _count_padding(model)
    listed = []
    for name, parameter in parameters.items():
        blocks = recorder.blocks.get(name, [])
        num_written = sum(block.box.numel for block in blocks)
        if name in recorder.computed or num_written != parameter.numel() - padding.get(name, 0):
            raise ConfigError(
                f"{type(model).__name__}: vLLM's loader computes {name} ({num_written} of "
                f"{parameter.numel()} elements are copies); allowed: "
                "weight_sync.method='full_export'"
            )
        listed += _split_stack(name, parameter, blocks)
    return listed


def _count_padding(model: Any) -> dict[str, int]:
    """Return the elements of padding of a vocabulary, by name of the parameter."""
    padding = {}
    for prefix, layer in model.named_modules():
        if isinstance(layer, VocabParallelEmbedding):
            rows = layer.weight.shape[0] - layer.shard_indices.num_org_elements
            padding[f"{prefix}.weight"] = rows * layer.weight[0].numel()
    return padding


def _split_stack(name: str, parameter: torch.Tensor, blocks: list[Block]) -> list[ListedParameter]:
    """Return a parameter, or each row of one that is a stack of tensors with a dimension less."""
    dtype, shape = str(parameter.dtype).partition(".")[2], tuple(parameter.shape)
    if all(len(block.box.sizes) == len(shape) for block in blocks):
        return [ListedParameter(name, dtype, shape, tuple(blocks))]
    rows: dict[int, list[Block]] = {}
    for block in blocks:
        row, *offset = block.local_offset
        rows.setdefault(row, []).append(Block(block.tensor, block.box, tuple(offset)))
    return [
        ListedParameter(f"{name}[{row}]", dtype, shape[1:], tuple(rows[row]))
        for row in sorted(rows)
    ]
