"""The Hugging Face tensors in a Megatron checkpoint, read by their names. No Megatron."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.jobs.convert.buffer import Buffer
from mcore_rl.jobs.convert.plan import WHOLE, Parameter
from mcore_rl.reshard.boxes import Block, Box, LogicalTensor
from mcore_rl.reshard.rules import Shard


class MegatronTensors:
    """Reads tensors one after the other; those of one parameter should be read in a row.

    A tensor stays as it is until the next parameter is read into the same buffer.
    """

    def __init__(
        self, reader: DistReader, parameters: Iterable[Parameter], buffer: Buffer | None = None
    ) -> None:
        self._reader = reader
        self._buffer = buffer or Buffer()
        self._parameters = {name: p for p in parameters for name in p.names}
        self._buffer.reserve(max((p.nbytes for p in self._parameters.values()), default=0))
        self._current: Parameter | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, merged with its adapter; the caller does not write into it.

        Raises:
            ConfigError: the checkpoint is damaged.
        """
        parameter = self._parameters[name]
        if parameter is not self._current:
            self._tensors = {}  # before others are made
            self._tensors, self._current = self._read(parameter), parameter
        return self._tensors[name]

    def _read(self, parameter: Parameter) -> dict[str, torch.Tensor]:
        box = parameter.stored.box(Box((0,) * len(parameter.shape), parameter.shape))
        whole = self._buffer.tensor(parameter.shape, parameter.dtype)
        self._reader.read(parameter.stored.key, box, whole.view(box.sizes))
        rule = parameter.weight.rule
        blocks = rule.blocks(WHOLE)
        tensors = {
            tensor.name: _gathered(whole, tensor, [b for b in blocks if b.tensor == tensor])
            for tensor in rule.tensors
        }
        if parameter.adapter is not None:
            self._merge(parameter, tensors)
        return {n: tensors[t.name] for t in rule.tensors for n in (t.name, *t.also)}

    def _merge(self, parameter: Parameter, tensors: dict[str, torch.Tensor]) -> None:
        """Add the product of the factors, shard by shard as the ranks of the engine do.

        The same arithmetic in the same shapes as engine/megatron/lora.py, Adapter.forward: the
        same bits.
        """
        adapter, rule = parameter.adapter, parameter.weight.rule
        assert adapter is not None
        a, b = self.factors(parameter)
        for index in range(adapter.num_shards):
            shard = Shard(index, adapter.num_shards)
            blocks = sorted(rule.blocks(shard), key=lambda block: block.local_offset)
            local = torch.empty(rule.local_shape(shard), dtype=torch.float32)
            for block in blocks:
                local[block.local_slices] = tensors[block.tensor.name][block.box.slices]
            rows = torch.cat([b[block.tensor.name][block.box.slices[0]] for block in blocks])
            columns = a[:, blocks[0].box.slices[1]].contiguous()
            merged = torch.addmm(local, rows.float(), columns.float(), alpha=adapter.scale)
            merged = merged.to(parameter.dtype)
            for block in blocks:
                tensors[block.tensor.name][block.box.slices] = merged[block.local_slices]

    def factors(self, parameter: Parameter) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A [rank, in] of a parameter, and by tensor its B [out, rank]."""
        prefix = f"lora.{parameter.weight.local_name()}"
        names = [tensor.name for tensor in parameter.weight.rule.tensors]
        return self._all(f"{prefix}.A"), {n: self._all(f"{prefix}.B.{n}") for n in names}

    def _all(self, key: str) -> torch.Tensor:
        shape = self._reader.tensors[key].shape
        return self._reader.read(key, Box((0,) * len(shape), shape))


def _gathered(whole: torch.Tensor, tensor: LogicalTensor, blocks: list[Block]) -> torch.Tensor:
    """One tensor out of a whole parameter: a view, where its rows stand together."""
    if len(blocks) == 1:
        return whole[blocks[0].local_slices]
    found = whole.new_empty(tensor.shape)
    for block in blocks:
        found[block.box.slices] = whole[block.local_slices]
    return found


def memory_bytes(parameters: Sequence[Parameter]) -> int:
    """That MegatronTensors takes for these."""
    gathered = [p.nbytes for p in parameters if _is_gathered(p) or p.adapter is not None]
    merged = [_merge_bytes(parameter) for parameter in parameters]
    largest = max(parameter.nbytes for parameter in parameters)
    return largest + max(gathered, default=0) + max(merged)


def _is_gathered(parameter: Parameter) -> bool:
    rule = parameter.weight.rule
    return len(rule.blocks(WHOLE)) > len(rule.tensors)


def _merge_bytes(parameter: Parameter) -> int:
    """A shard in float32, its sum with the adapter, and that sum rounded."""
    if parameter.adapter is None:
        return 0
    shape = parameter.weight.rule.local_shape(Shard(0, parameter.adapter.num_shards))
    return math.prod(shape) * (2 * torch.float32.itemsize + parameter.dtype.itemsize)
