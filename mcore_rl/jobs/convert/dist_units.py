"""The files of a distributed checkpoint, each written from a Hugging Face folder. No Megatron."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint import fp8
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.integrity import require_finite
from mcore_rl.checkpoint.stored import chunks
from mcore_rl.checkpoint.torch_dist_writer import DistFile, Record
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.convert.buffer import Buffer
from mcore_rl.jobs.convert.memory import READ_ENTRY_BYTES
from mcore_rl.jobs.convert.plan import WHOLE, Parameter, num_shards, runs
from mcore_rl.reshard.boxes import rows

_RECORD = [field.name for field in fields(Record)]


@dataclass(frozen=True, slots=True)
class DistUnit:
    """One .distcp file: some parameters, read from the Hugging Face folder `model`."""

    name: str
    model: Path
    layout: Layout
    parameters: tuple[Parameter, ...]
    objects: Mapping[str, bytes]
    scratch_bytes: int
    memory_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parameters) + sum(map(len, self.objects.values()))

    def write(
        self, folder: Path, wrote: Callable[[int], None], kept: dict[str, Any]
    ) -> list[dict[str, Any]]:
        if "reader" not in kept:
            kept["reader"] = CheckpointReader(self.model)
        whole, scratch = kept.setdefault("buffers", (Buffer(), Buffer()))
        whole.reserve(max(parameter.nbytes for parameter in self.parameters))
        scratch.reserve(self.scratch_bytes)
        with DistFile(folder / self.name, self.nbytes) as file:
            for parameter in self.parameters:
                _fill(parameter, kept["reader"], whole, scratch)
                count = num_shards(parameter.weight, self.layout)
                _add_chunks(parameter, count, whole, scratch, file)
                wrote(parameter.nbytes)
            for key, data in self.objects.items():
                file.add_object(key, data)
        return [{name: getattr(record, name) for name in _RECORD} for record in file.records]


def plan_units(
    model: Path,
    layout: Layout,
    parameters: Sequence[Parameter],
    objects: Mapping[str, bytes],
    stored: Mapping[str, torch.dtype],
) -> Iterator[DistUnit]:
    """The files of a checkpoint; `stored` is the dtype of each tensor in the files of `model`."""
    index_bytes = READ_ENTRY_BYTES * len(stored)
    for number, run_of in enumerate(runs(parameters)):
        scratch = max(_scratch_bytes(p, num_shards(p.weight, layout)) for p in run_of)
        casts = max(_cast_bytes(p, stored) for p in run_of)
        yield DistUnit(
            name=f"__{number}_0.distcp",
            model=model,
            layout=layout,
            parameters=run_of,
            objects={} if number else objects,
            scratch_bytes=scratch,
            memory_bytes=max(p.nbytes for p in run_of) + scratch + casts + index_bytes,
        )


def _scratch_bytes(parameter: Parameter, count: int) -> int:
    """Beside the parameter: a tensor whose rows are dealt out, or a chunk of some columns."""
    rule = parameter.weight.rule
    num_blocks = Counter(block.tensor for block in rule.blocks(WHOLE))
    dealt = [math.prod(tensor.shape) for tensor in rule.tensors if num_blocks[tensor] > 1]
    cut = [
        box.numel for box in chunks(parameter.weight, count) if box.sizes[1:] != parameter.shape[1:]
    ]
    return max([0, *dealt, *cut]) * parameter.dtype.itemsize


def _cast_bytes(parameter: Parameter, stored: Mapping[str, torch.dtype]) -> int:
    """What the reader takes for a tensor in another dtype: as it stands, and rows of blocks."""
    found = 0
    for tensor in parameter.weight.rule.tensors:
        dtype = stored[tensor.name]
        if dtype != parameter.dtype:
            blocks = 0
            if dtype == fp8.QUANTIZED:
                blocks = fp8.BLOCK * tensor.shape[1] * 4 * torch.float32.itemsize
            found = max(found, math.prod(tensor.shape) * dtype.itemsize + blocks)
    return found


def _fill(parameter: Parameter, reader: CheckpointReader, whole: Buffer, scratch: Buffer) -> None:
    """Fill `whole`; vocabulary padding is zero. Tensors are read whole, and so checked whole."""
    target = whole.tensor(parameter.shape, parameter.dtype)
    rule = parameter.weight.rule
    if sum(math.prod(tensor.shape) for tensor in rule.tensors) < target.numel():
        target.zero_()
    for tensor in rule.tensors:
        blocks = [block for block in rule.blocks(WHOLE) if block.tensor == tensor]
        in_place = len(blocks) == 1
        if in_place:
            read = target[blocks[0].local_slices]
        else:
            read = scratch.tensor(tensor.shape, parameter.dtype)
        reader.read_into(rows(tensor, 0, tensor.shape[0], 0), read)
        if not reader.has_checksum(tensor.name):
            require_finite(tensor.name, read)
        for block in () if in_place else blocks:
            target[block.local_slices] = read[block.box.slices]


def _add_chunks(
    parameter: Parameter, count: int, whole: Buffer, scratch: Buffer, file: DistFile
) -> None:
    stored, shape, dtype = parameter.stored, parameter.shape, parameter.dtype
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    for box in chunks(parameter.weight, count):
        if box.sizes[1:] == shape[1:]:
            chunk = whole.tensor(box.sizes, dtype, start=box.offsets[0] * row_bytes)
        else:
            chunk = scratch.tensor(box.sizes, dtype)
            chunk.copy_(whole.tensor(shape, dtype)[box.slices])
        place = stored.box(box)
        file.add_tensor(stored.key, stored.shape, place.offsets, chunk.view(place.sizes))
