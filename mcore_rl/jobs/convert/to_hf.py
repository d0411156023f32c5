"""mcore-rl convert mcore-to-hf: write a distributed checkpoint in Hugging Face's format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from mcore_rl.checkpoint.stacks import Shapes, list_experts, locate_expert, stack_experts
from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.config.checks import check_choice, check_exists, check_model_exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.jobs.convert.megatron_checkpoint import (
    MegatronCheckpoint,
    MegatronTensors,
    compute_read_bytes,
    open_megatron_checkpoint,
)
from mcore_rl.jobs.convert.plan import (
    READ_ENTRY_BYTES,
    Buffer,
    Parameter,
    Resources,
    compute_fingerprint,
    find_main_dtype,
    parse_bytes,
    parse_dtype,
    parse_resources,
    uses_bridge,
)
from mcore_rl.jobs.convert.run import Conversion, ReportBytes, run
from mcore_rl.models.base import get_frozen_prefixes, read_config
from mcore_rl.reshard.float8 import SCALE_SUFFIX, get_scale_shape
from mcore_rl.reshard.rules import join_slices, list_logical_tensors, parse_slice

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": fp8.QUANTIZED}
LORA = ("merge", "separate")


def convert_checkpoint(
    *,
    checkpoint: Path,
    output: Path,
    reference: Path | None,
    max_shard_size: str,
    lora: str,
    **options: Any,
) -> None:
    """Run the command with its options.

    Raises:
        ConfigError, RunFailed: See plan_conversion and run.run.
    """
    check_exists("--checkpoint", checkpoint)
    if reference is not None:
        check_model_exists("--reference", reference)
    resources, dtype = parse_resources(**options), options["dtype"]
    shard_bytes = parse_bytes("--max-shard-size", max_shard_size)
    if not uses_bridge(options):
        convert(checkpoint, output, reference, dtype, shard_bytes, lora, resources)
    elif reference is None:
        raise ConfigError(f"--bridge={options['bridge']} needs --reference")
    else:
        from mcore_rl.engine.megatron.conversion import export_with_bridge

        export_with_bridge(checkpoint, reference, output)


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
        ConfigError, RunFailed: See plan_conversion and run.run.
    """
    conversion = plan_conversion(checkpoint, output, reference, dtype, max_shard_bytes, lora)
    run(conversion, resources)


def plan_conversion(
    checkpoint: Path,
    output: Path,
    reference: Path | None,
    dtype: str | None,
    max_shard_bytes: int,
    lora: str,
) -> Conversion:
    """Plan a conversion, after every check that can be made before weights are read.

    Raises:
        ConfigError: The folder is no checkpoint, or of another model than it says.
    """
    check_choice("--lora", lora, LORA)
    target = parse_dtype(dtype, DTYPES) if dtype else None
    source = open_megatron_checkpoint(checkpoint, reference)
    if target == fp8.QUANTIZED and get_frozen_prefixes(read_config(source.companions)):
        raise ConfigError(
            f"--dtype={dtype}: the model of {checkpoint} is a wrapper, whose tensors have other "
            "names than those of float8 checkpoints; allowed: bfloat16, float32"
        )
    notes, adapted, base = source.notes, None, source
    if lora == "separate":
        base = replace(
            source, parameters=tuple(replace(p, adapter=None) for p in source.parameters)
        )
        if source.lora:
            adapted = source
        else:
            notes += (f"warning: {checkpoint} has no adapters: --lora=separate writes none",)
    stacks = {} if target == fp8.QUANTIZED else source.list_stacks()
    plans = _stack_plans(_plan_tensors(base, target), stacks)
    tensors = [*plans, *source.plan_frozen()]
    if target == fp8.QUANTIZED and all(tensor.dtype != target for tensor in tensors):
        raise ConfigError(
            f"--dtype={dtype}: no tensor of {checkpoint} has the name of a projection that float8 "
            "checkpoints have; allowed: bfloat16, float32"
        )
    shards = plan_shards(tensors, max_shard_bytes)
    options = {"--dtype": dtype, "--lora": lora, "--max-shard-size": max_shard_bytes}
    sources = {"checkpoint": source.path, "reference": reference}
    return Conversion(
        output=output,
        fingerprint=compute_fingerprint("mcore-to-hf", sources, **options),
        units=tuple(_build_unit(base, shard, tensors, stacks) for shard in shards),
        finish=partial(_finish, source=source, shards=shards, tensors=tensors, adapted=adapted),
        notes=notes,
        shared={"reader": source.reader},
    )


def _plan_tensors(source: MegatronCheckpoint, target: torch.dtype | None) -> Iterator[TensorPlan]:
    """Yield the tensors to write, in the order of the rules; scales follow their tensor."""
    parameters = {name: parameter for parameter in source.parameters for name in parameter.names}
    shapes = {t.name: t.shape for t in join_slices(list_logical_tensors(source.weights))}
    companion_reader: CheckpointReader | None = None
    for weight in source.weights:
        for tensor in () if weight.replica else weight.rule.tensors:
            for logical in (tensor.name, *tensor.aliases):
                part = parse_slice(logical)
                name = logical if part is None else part.stack
                if (shape := shapes.pop(name, None)) is None:  # a further slice
                    continue
                if name in parameters:
                    stored = parameters[name].dtype
                else:
                    companion_reader = companion_reader or CheckpointReader(source.companions)
                    stored = companion_reader.get_dtype(name)
                dtype = source.get_hf_dtype(name, stored)
                if target is not None:
                    plain = torch.bfloat16 if target == fp8.QUANTIZED else target
                    dtype = torch.float32 if weight.float32 else plain
                if target == fp8.QUANTIZED and fp8.is_block_quantized(name, shape):
                    yield TensorPlan(name, shape, fp8.QUANTIZED)
                    scales = get_scale_shape(shape)
                    yield TensorPlan(name + SCALE_SUFFIX, scales, torch.float32)
                else:
                    yield TensorPlan(name, shape, dtype)


def _stack_plans(tensors: Iterable[TensorPlan], stacks: Shapes) -> Iterator[TensorPlan]:
    """Yield tensors to write; each of the stacks where its first expert is."""
    remaining = dict(stacks)
    for tensor in tensors:
        part = locate_expert(tensor.name)
        if part is None or part.stack not in stacks:
            yield tensor
        elif (shape := remaining.pop(part.stack, None)) is not None:
            yield TensorPlan(part.stack, shape, tensor.dtype)


@dataclass(frozen=True, slots=True)
class HFUnit:
    """One safetensors file: tensors of a checkpoint, and those that only the companions have."""

    shard: ShardPlan
    names: tuple[str, ...]  # in the order in which they are read
    checkpoint: Path
    parameters: tuple[Parameter, ...]
    companions: Path
    stacks: Shapes  # of experts that the file has stacked
    memory_bytes: int

    @property
    def name(self) -> str:
        return self.shard.file

    @property
    def nbytes(self) -> int:
        return self.shard.nbytes

    def write(self, folder: Path, report_bytes: ReportBytes, shared: dict[str, Any]) -> None:
        """Write the file; see Unit."""
        if "reader" not in shared:
            shared["reader"] = DistReader(self.checkpoint)
        buffer = shared.setdefault("buffer", Buffer())
        tensors = MegatronTensors(shared["reader"], self.parameters, buffer)
        write_shard(folder, self.shard, self._read_tensors(tensors, report_bytes))

    def _read_tensors(
        self, tensors: MegatronTensors, report_bytes: ReportBytes
    ) -> Iterator[tuple[str, torch.Tensor]]:
        companion_reader: CheckpointReader | None = None

        def read(name: str) -> torch.Tensor:
            nonlocal companion_reader
            if name in self.stacks:
                experts = list_experts(name, self.stacks[name])
                [(_, stack)] = stack_experts(((n, read(n)) for n, _ in experts), self.stacks)
                return stack
            if name in tensors:
                return tensors.read(name)
            companion_reader = companion_reader or CheckpointReader(self.companions)
            return companion_reader.read_tensor(name)

        quantized: dict[str, torch.Tensor] = {}  # the latest weight and its scales, by name
        for name in self.names:
            if name not in quantized:
                base, dtype = name.removesuffix(SCALE_SUFFIX), self.shard.entries[name].dtype
                tensor = read(base)
                if base == name and dtype != fp8.QUANTIZED:
                    tensor = tensor.to(dtype)
                    yield name, tensor
                    report_bytes(tensor.nbytes)
                    del tensor  # freed before the next one is allocated
                    continue
                pair = fp8.quantize_blocks(tensor, base)
                del tensor
                quantized = dict(zip((base, base + SCALE_SUFFIX), pair, strict=True))
            yield name, quantized[name]
            report_bytes(quantized[name].nbytes)


def _build_unit(
    source: MegatronCheckpoint, shard: ShardPlan, all_tensors: Sequence[TensorPlan], stacks: Shapes
) -> HFUnit:
    tensors = [tensor for tensor in all_tensors if tensor.name in shard.entries]
    bases = {tensor.name.removesuffix(SCALE_SUFFIX) for tensor in tensors}
    stacked = {name: shape for name, shape in stacks.items() if name in bases}
    bases |= {name for item in stacked.items() for name, _ in list_experts(*item)}
    parameters = tuple(p for p in source.parameters if not bases.isdisjoint(p.names))
    dtypes = {name: parameter.dtype for parameter in parameters for name in parameter.names}
    cast_bytes = max(_compute_cast_bytes(tensor, dtypes) for tensor in tensors)
    slices = {parse_slice(t.name) for p in parameters for t in p.weight.rule.tensors}
    names = {part.stack for part in slices if part is not None} | stacked.keys()
    stack_bytes = max((t.nbytes for t in tensors if t.name in names), default=0)
    return HFUnit(
        shard=shard,
        names=tuple(tensor.name for tensor in tensors),
        checkpoint=source.path,
        parameters=parameters,
        companions=source.companions,
        stacks=stacked,
        memory_bytes=compute_read_bytes(parameters)
        + stack_bytes
        + 2 * cast_bytes
        + READ_ENTRY_BYTES * source.num_chunks,
    )


def _compute_cast_bytes(tensor: TensorPlan, dtypes: Mapping[str, torch.dtype]) -> int:
    """Return the memory of a tensor besides the buffer that it is read into.

    Args:
        dtypes: Dtypes in the checkpoint, by tensor.
    """
    if tensor.dtype == fp8.QUANTIZED:
        return tensor.nbytes + fp8.compute_buffer_bytes(tensor.dtype, tensor.shape)
    return 0 if dtypes.get(tensor.name) == tensor.dtype else 2 * tensor.nbytes


def _finish(
    folder: Path,
    results: list[Any],
    *,
    source: MegatronCheckpoint,
    shards: Sequence[ShardPlan],
    tensors: Sequence[TensorPlan],
    adapted: MegatronCheckpoint | None,
) -> None:
    """Write index, config and tokenizer; with `adapted`, its adapters."""
    write_index(folder, shards)
    changes = dict(source.config_changes)
    dtype = find_main_dtype((t.dtype, math.prod(t.shape)) for t in tensors)
    if dtype == fp8.QUANTIZED:
        dtype = torch.bfloat16
        changes["quantization_config"] = fp8.build_quantization_config(t.name for t in tensors)
    copy_companions(source.companions, folder, dtype, changes)
    if adapted is not None:
        assert adapted.lora is not None
        adapters = MegatronTensors(adapted.reader, adapted.parameters)
        rank, alpha, config = adapted.lora["rank"], adapted.lora["alpha"], read_config(folder)
        peft.write_adapters(folder / peft.FOLDER, adapters.read_all_factors, rank, alpha, config)
