"""mcore-rl convert mcore-to-hf: a distributed checkpoint becomes a Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint import fp8, peft
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.hf_writer import (
    ShardPlan,
    TensorPlan,
    copy_companions,
    plan_shards,
    write_index,
    write_shard,
)
from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.config.checks import one_of
from mcore_rl.jobs.convert.megatron_folder import MegatronFolder, open_megatron
from mcore_rl.jobs.convert.options import READ_ENTRY_BYTES, Resources
from mcore_rl.jobs.convert.plan import Buffer, Parameter, fingerprint, main_dtype, named_dtype
from mcore_rl.jobs.convert.run import Conversion, run
from mcore_rl.jobs.convert.sources import MegatronTensors, memory_bytes
from mcore_rl.jobs.convert.workers import Wrote

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
    """Write the weights of a checkpoint in Hugging Face's format, with config and tokenizer.

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
    notes, adapted, written = folder.notes, None, folder
    if lora == "separate":
        written = replace(
            folder, parameters=tuple(replace(p, adapter=None) for p in folder.parameters)
        )
        if folder.lora:
            adapted = folder
        else:
            notes += (f"warning: {checkpoint} has no adapters: --lora=separate writes none",)
    tensors = list(_tensors(written, asked))
    shards = plan_shards(tensors, max_shard_bytes)
    options = {"--dtype": dtype, "--lora": lora, "--max-shard-size": max_shard_bytes}
    sources = {"checkpoint": folder.path, "reference": reference}
    return Conversion(
        output=output,
        fingerprint=fingerprint("mcore-to-hf", sources, **options),
        units=tuple(_unit(written, shard, tensors) for shard in shards),
        finish=partial(_finish, source=folder, shards=shards, tensors=tensors, adapted=adapted),
        notes=notes,
        kept={"reader": folder.reader},
    )


def _tensors(folder: MegatronFolder, asked: torch.dtype | None) -> Iterator[TensorPlan]:
    """What is to be written, in the order of the rules; scales behind what they scale."""
    held = {name: parameter for parameter in folder.parameters for name in parameter.names}
    others: CheckpointReader | None = None
    for weight in folder.weights:
        for tensor in () if weight.replica else weight.rule.tensors:
            for name in (tensor.name, *tensor.aliases):
                if name in held:
                    stored = held[name].dtype
                else:
                    others = others or CheckpointReader(folder.companions)
                    stored = others.get_dtype(name)
                dtype = folder.hf_dtype(name, stored)
                if asked is not None:
                    plain = torch.bfloat16 if asked == fp8.QUANTIZED else asked
                    dtype = torch.float32 if weight.float32 else plain
                if asked == fp8.QUANTIZED and fp8.is_block_quantized(name, tensor.shape):
                    yield TensorPlan(name, tensor.shape, fp8.QUANTIZED)
                    scales = fp8.get_scale_shape(tensor.shape)
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

    def write(self, folder: Path, wrote: Wrote, kept: dict[str, Any]) -> None:
        if "reader" not in kept:
            kept["reader"] = DistReader(self.checkpoint)
        buffer = kept.setdefault("buffer", Buffer())
        held = MegatronTensors(kept["reader"], self.parameters, buffer)
        write_shard(folder, self.shard, self._read(held, wrote))

    def _read(self, held: MegatronTensors, wrote: Wrote) -> Iterator[tuple[str, torch.Tensor]]:
        others: CheckpointReader | None = None
        quantized: dict[str, torch.Tensor] = {}  # the last, by name: a weight and its scales
        for name in self.names:
            if name not in quantized:
                base, dtype = name.removesuffix(fp8.SCALE_SUFFIX), self.shard.entries[name].dtype
                if base in held:
                    tensor = held.read(base)
                else:
                    others = others or CheckpointReader(self.companions)
                    tensor = others.read_tensor(base)
                if base == name and dtype != fp8.QUANTIZED:
                    tensor = tensor.to(dtype)
                    yield name, tensor
                    wrote(tensor.nbytes)
                    del tensor  # before the next one is made
                    continue
                pair = fp8.quantize_blocks(tensor, base)
                del tensor
                quantized = dict(zip((base, base + fp8.SCALE_SUFFIX), pair, strict=True))
            yield name, quantized[name]
            wrote(quantized[name].nbytes)


def _unit(folder: MegatronFolder, shard: ShardPlan, tensors: Sequence[TensorPlan]) -> HFUnit:
    own = [tensor for tensor in tensors if tensor.name in shard.entries]
    bases = {tensor.name.removesuffix(fp8.SCALE_SUFFIX) for tensor in own}
    parameters = tuple(p for p in folder.parameters if not bases.isdisjoint(p.names))
    held = {name: parameter.dtype for parameter in parameters for name in parameter.names}
    memory = memory_bytes(parameters) + 2 * max(_own_bytes(tensor, held) for tensor in own)
    return HFUnit(
        shard=shard,
        names=tuple(tensor.name for tensor in own),
        checkpoint=folder.path,
        parameters=parameters,
        companions=folder.companions,
        memory_bytes=memory + READ_ENTRY_BYTES * folder.num_chunks,
    )


def _own_bytes(tensor: TensorPlan, held: Mapping[str, torch.dtype]) -> int:
    """What a tensor takes beside the memory it is read in; `held` are dtypes in the checkpoint."""
    if tensor.dtype == fp8.QUANTIZED:
        return tensor.nbytes + fp8.compute_buffer_bytes(tensor.dtype, tensor.shape)
    return 0 if held.get(tensor.name) == tensor.dtype else 2 * tensor.nbytes


def _finish(
    folder: Path,
    results: list[Any],
    *,
    source: MegatronFolder,
    shards: Sequence[ShardPlan],
    tensors: Sequence[TensorPlan],
    adapted: MegatronFolder | None,
) -> None:
    write_index(folder, shards)
    changes = dict(source.config_changes)
    most = main_dtype((t.dtype, math.prod(t.shape)) for t in tensors)
    if most == fp8.QUANTIZED:
        most = torch.bfloat16
        changes["quantization_config"] = fp8.build_quantization_config(t.name for t in tensors)
    copy_companions(source.companions, folder, most, changes)
    if adapted is not None:
        assert adapted.lora is not None
        held = MegatronTensors(adapted.reader, adapted.parameters)
        rank, alpha = adapted.lora["rank"], adapted.lora["alpha"]
        peft.write_adapters(folder / peft.FOLDER, held.all_factors, rank, alpha)
