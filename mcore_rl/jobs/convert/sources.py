"""The Hugging Face tensors in a Megatron checkpoint, read by their names. No Megatron."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from mcore_rl.checkpoint.peft import Factors
from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.jobs.convert.plan import WHOLE, Buffer, Parameter
from mcore_rl.reshard.rules import Box, Shard


class MegatronTensors:
    """Reads tensors one after the other; those of one parameter should be read in a row.

    A tensor is valid until the next parameter is read into the same buffer.
    """

    def __init__(
        self, reader: DistReader, parameters: Iterable[Parameter], buffer: Buffer | None = None
    ) -> None:
        self._reader = reader
        self._buffer = buffer or Buffer()
        self._planned = tuple(parameters)
        self._parameters = {name: p for p in self._planned for name in p.names}
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
        whole = self._buffer.tensor(parameter.shape, parameter.dtype)
        self._reader.read(parameter.location.key, parameter.box, whole.view(parameter.box.sizes))
        rule = parameter.weight.rule
        tensors: dict[str, torch.Tensor] = {}
        for tensor in rule.tensors:
            blocks = [block for block in rule.get_blocks(WHOLE) if block.tensor == tensor]
            if len(blocks) == 1:  # its rows are contiguous
                tensors[tensor.name] = whole[blocks[0].local_slices]
                continue
            tensors[tensor.name] = found = whole.new_empty(tensor.shape)
            for block in blocks:
                found[block.box.slices] = whole[block.local_slices]
        if parameter.adapter is not None:
            self._merge(parameter, tensors)
        return {n: tensors[t.name] for t in rule.tensors for n in (t.name, *t.aliases)}

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
            blocks = sorted(rule.get_blocks(shard), key=lambda block: block.local_offset)
            local = torch.empty(rule.get_local_shape(shard), dtype=torch.float32)
            for block in blocks:
                local[block.local_slices] = tensors[block.tensor.name][block.box.slices]
            rows = torch.cat([b[block.tensor.name][block.box.slices[0]] for block in blocks])
            columns = a[:, blocks[0].box.slices[1]].contiguous()
            merged = torch.addmm(local, rows.float(), columns.float(), alpha=adapter.scale)
            merged = merged.to(parameter.dtype)
            for block in blocks:
                tensors[block.tensor.name][block.box.slices] = merged[block.local_slices]

    def all_factors(self) -> Iterator[Factors]:
        """Of all adapters of the checkpoint. Tensors of one parameter share their A."""
        for parameter in self._planned:
            if parameter.adapter is not None:
                a, b = self.factors(parameter)
                yield from (Factors(tensor, a, factor) for tensor, factor in b.items())

    def factors(self, parameter: Parameter) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A [rank, in] of a parameter, and by tensor its B [out, rank]."""
        prefix = f"lora.{parameter.weight.get_local_name()}"
        names = [tensor.name for tensor in parameter.weight.rule.tensors]
        return self._all(f"{prefix}.A"), {n: self._all(f"{prefix}.B.{n}") for n in names}

    def _all(self, key: str) -> torch.Tensor:
        shape = self._reader.tensors[key].shape
        return self._reader.read(key, Box((0,) * len(shape), shape))


def memory_bytes(parameters: Sequence[Parameter]) -> int:
    """That MegatronTensors takes for these: one, its tensors where they are copies, its adapter."""
    whole = gathered = merged = 0
    for parameter in parameters:
        rule, adapter = parameter.weight.rule, parameter.adapter
        whole = max(whole, parameter.nbytes)
        if adapter is not None or len(rule.get_blocks(WHOLE)) > len(rule.tensors):
            gathered = max(gathered, parameter.nbytes)
        if adapter is not None:  # a shard in float32, its sum with the adapter, that sum rounded
            shape = rule.get_local_shape(Shard(0, adapter.num_shards))
            element = 2 * torch.float32.itemsize + parameter.dtype.itemsize
            merged = max(merged, math.prod(shape) * element)
    return whole + gathered + merged
