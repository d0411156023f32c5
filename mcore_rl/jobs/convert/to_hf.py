"""mcore-rl convert mcore-to-hf: a distributed checkpoint becomes a Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint import fp8
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.hf_writer import (
    ShardPlan,
    TensorPlan,
    copy_companions,
    plan_shards,
    write_index,
    writing_shard,
)
from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.config.checks import one_of
from mcore_rl.jobs.convert.adapters import write_adapters
from mcore_rl.jobs.convert.buffer import Buffer
from mcore_rl.jobs.convert.megatron_folder import MegatronFolder, open_megatron
from mcore_rl.jobs.convert.memory import READ_ENTRY_BYTES
from mcore_rl.jobs.convert.options import Resources
from mcore_rl.jobs.convert.plan import Parameter, files_of, main_dtype, named_dtype, versions
from mcore_rl.jobs.convert.run import Conversion, run
from mcore_rl.jobs.convert.sources import MegatronTensors, memory_bytes
from mcore_rl.reshard.boxes import LogicalTensor, rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": fp8.QUANTIZED}
LORA = ("merge", "separate")


def convert(
    checkpoint: Path,
    output: Path,
    reference: Path | None,
    dtype: str | None,
    max_shard_bytes: int,
    lora: str,
    resources: Resources,
) -> None:
    """Write the weights of a checkpoint as Hugging Face has them, config and tokenizer beside them.

    Raises:
        ConfigError, RunFailed: see plan and run.run.
    """
    run(plan(checkpoint, output, reference, dtype, max_shard_bytes, lora), resources)


def plan(
    checkpoint: Path,
    output: Path,
    reference: Path | None,
    dtype: str | None,
    max_shard_bytes: int,
    lora: str,
) -> Conversion:
    """The conversion, after every check that can be made before weights are read.

    Raises:
        ConfigError: the folder is no checkpoint, or of another model than it says.
    """
    one_of("--lora", lora, LORA)
    asked = named_dtype("--dtype", DTYPES, dtype) if dtype else None
    folder = open_megatron(checkpoint, reference)
    if lora == "separate":
        plain = tuple(replace(p, adapter=None) for p in folder.parameters)
        written = replace(folder, parameters=plain)
    else:
        written = folder
    tensors = list(_tensors(written, asked))
    shards = plan_shards(tensors, max_shard_bytes)
    index_bytes = READ_ENTRY_BYTES * folder.num_chunks
    notes = folder.notes
    if lora == "separate" and not folder.lora:
        notes += (f"warning: {checkpoint} has no adapters: --lora=separate writes none",)
    options = {"command": "mcore-to-hf", "--dtype": dtype, "--lora": lora}
    sources = {
        **files_of("checkpoint", folder.path),
        **(files_of("reference", reference) if reference else {}),
    }
    return Conversion(
        output=output,
        fingerprint={**options, "--max-shard-size": max_shard_bytes, **versions(), **sources},
        units=tuple(_unit(written, shard, tensors, index_bytes) for shard in shards),
        finish=partial(
            _finish,
            source=folder,
            shards=shards,
            tensors=tensors,
            separate=lora == "separate" and bool(folder.lora),
        ),
        notes=notes,
        kept={"reader": folder.reader},
    )


def _tensors(folder: MegatronFolder, asked: torch.dtype | None) -> Iterator[TensorPlan]:
    """What is to be written, in the order of the rules; scales behind what they scale."""
    held = {name: parameter for parameter in folder.parameters for name in parameter.names}
    others: CheckpointReader | None = None
    for weight in folder.weights:
        for tensor in () if weight.replica else weight.rule.tensors:
            for name in (tensor.name, *tensor.also):
                if name in held:
                    stored = held[name].dtype
                else:
                    others = others or CheckpointReader(folder.companions)
                    stored = others.dtype(name)
                dtype = folder.hf_dtype(name, stored)
                if asked is not None:
                    plain = torch.bfloat16 if asked == fp8.QUANTIZED else asked
                    dtype = torch.float32 if weight.float32 else plain
                if asked == fp8.QUANTIZED and fp8.is_block_quantized(name, tensor.shape):
                    yield TensorPlan(name, tensor.shape, fp8.QUANTIZED)
                    scales = fp8.scale_shape(tensor.shape)
                    yield TensorPlan(name + fp8.SCALE_SUFFIX, scales, torch.float32)
                else:
                    yield TensorPlan(name, tensor.shape, dtype)


@dataclass(frozen=True, slots=True)
class HFUnit:
    """One safetensors file: some tensors of a checkpoint, the rest from a Hugging Face folder."""

    shard: ShardPlan
    names: tuple[str, ...]  # in the order in which they are read
    checkpoint: Path
    parameters: tuple[Parameter, ...]
    companions: Path
    memory_bytes: int

    @property
    def name(self) -> str:
        return self.shard.file

    @property
    def nbytes(self) -> int:
        return self.shard.nbytes

    def write(self, folder: Path, wrote: Callable[[int], None], kept: dict[str, Any]) -> None:
        if "reader" not in kept:
            kept["reader"] = DistReader(self.checkpoint)
        buffer = kept.setdefault("buffer", Buffer())
        held = MegatronTensors(kept["reader"], self.parameters, buffer)
        with writing_shard(folder, self.shard) as writer:
            for name, tensor in self._read(held):
                writer.write(name, tensor)
                wrote(tensor.nbytes)
                del tensor  # before the next one is made

    def _read(self, held: MegatronTensors) -> Iterator[tuple[str, torch.Tensor]]:
        others: CheckpointReader | None = None
        quantized: dict[str, torch.Tensor] = {}  # the last, by name: a weight and its scales
        for name in self.names:
            if name in quantized:
                yield name, quantized[name]
                continue
            base = name.removesuffix(fp8.SCALE_SUFFIX)
            if base in held:
                tensor = held.read(base)
            else:
                others = others or CheckpointReader(self.companions)
                shape = others.shape(base)
                tensor = others.read(rows(LogicalTensor(base, shape), 0, shape[0], 0))
            entry = self.shard.entries[name]
            if base != name or entry.dtype == fp8.QUANTIZED:
                pair = fp8.quantize_blocks(tensor, base)
                quantized = dict(zip((base, base + fp8.SCALE_SUFFIX), pair, strict=True))
                tensor = quantized[name]
            tensor = tensor.to(entry.dtype)
            yield name, tensor
            del tensor


def _unit(
    folder: MegatronFolder, shard: ShardPlan, tensors: Sequence[TensorPlan], index_bytes: int
) -> HFUnit:
    names = tuple(tensor.name for tensor in tensors if tensor.name in shard.entries)
    bases = {name.removesuffix(fp8.SCALE_SUFFIX) for name in names}
    parameters = tuple(p for p in folder.parameters if not bases.isdisjoint(p.names))
    held = {name: parameter.dtype for parameter in parameters for name in parameter.names}
    reading = memory_bytes(parameters) if parameters else 0
    own = [_own_bytes(tensor, held) for tensor in tensors if tensor.name in shard.entries]
    return HFUnit(
        shard=shard,
        names=names,
        checkpoint=folder.path,
        parameters=parameters,
        companions=folder.companions,
        memory_bytes=reading + 2 * max(own) + index_bytes,
    )


def _own_bytes(tensor: TensorPlan, held: Mapping[str, torch.dtype]) -> int:
    """What a tensor takes beside the memory it is read in; `held` are dtypes in the checkpoint."""
    if tensor.dtype == fp8.QUANTIZED:
        return tensor.nbytes + fp8.BLOCK * tensor.shape[1] * 4 * torch.float32.itemsize
    return 0 if held.get(tensor.name) == tensor.dtype else 2 * tensor.nbytes


def _finish(
    folder: Path,
    results: list[Any],
    *,
    source: MegatronFolder,
    shards: Sequence[ShardPlan],
    tensors: Sequence[TensorPlan],
    separate: bool,
) -> None:
    write_index(folder, shards)
    changes = dict(source.config_changes)
    most = main_dtype((t.dtype, math.prod(t.shape)) for t in tensors)
    if most == fp8.QUANTIZED:
        most = torch.bfloat16
        changes["quantization_config"] = fp8.quantization_config(t.name for t in tensors)
    copy_companions(source.companions, folder, most, changes)
    if separate:
        write_adapters(folder / "adapter", source)
