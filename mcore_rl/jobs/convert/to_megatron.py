"""mcore-rl convert hf-to-mcore: a Hugging Face folder becomes a distributed checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint import fp8
from mcore_rl.checkpoint.checkpoint_info import write_checkpoint_info
from mcore_rl.checkpoint.hf import CheckpointReader, short
from mcore_rl.checkpoint.hf_writer import copy_companions
from mcore_rl.checkpoint.integrity import require_finite
from mcore_rl.checkpoint.storage_location import chunks
from mcore_rl.checkpoint.torch_dist_writer import DistFile, Record, write_metadata
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_engine import resolve_layout, resolve_model_layout
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.convert.megatron_folder import COMPANIONS
from mcore_rl.jobs.convert.options import READ_ENTRY_BYTES, WRITTEN_ENTRY_BYTES, Resources
from mcore_rl.jobs.convert.plan import (
    WHOLE,
    Buffer,
    Parameter,
    fingerprint,
    main_dtype,
    named_dtype,
    num_shards,
    runs,
)
from mcore_rl.jobs.convert.run import Conversion, run
from mcore_rl.jobs.convert.workers import Wrote
from mcore_rl.models.base import model_sizes, padded_vocab_size
from mcore_rl.models.heads import model_config, model_weights
from mcore_rl.reshard.boxes import Box, rows
from mcore_rl.reshard.rules import Weight, logical_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DCP_IMPORT_BYTES = 48 << 20  # of torch.distributed.checkpoint, imported to write the metadata
_COMPARED_BYTES = 16 << 20  # of a tensor and its repeat, at a time
Dtypes = Mapping[str, torch.dtype]  # of the Hugging Face tensors, by name


def convert(
    model: Path, output: Path, layout: Layout, dtype: str | None, resources: Resources
) -> None:
    """Write the weights in `model` as a checkpoint that an engine of any layout loads.

    Raises:
        ConfigError, RunFailed: see plan and run.run.
    """
    run(plan(model, output, layout, dtype), resources)


def plan(model: Path, output: Path, layout: Layout, dtype: str | None) -> Conversion:
    """The conversion, after every check that can be made before weights are read.

    Raises:
        ConfigError: the folder is no checkpoint of a family, or the layout does not divide it.
    """
    resolve_layout("--layout", layout)
    reader = CheckpointReader(model)
    config = model_config(reader.config())
    resolve_model_layout("--layout", layout, model_sizes(config))
    padded = padded_vocab_size(config, layout.tp)
    weights = model_weights(config, padded)
    reader.check(logical_tensors(weights))
    shapes = reader.shapes()
    dtypes = {name: reader.dtype(name) for name in shapes}
    most = main_dtype((dtypes[name], math.prod(shape)) for name, shape in shapes.items())
    if dtype is None and most not in DTYPES.values():
        raise ConfigError(
            f"the weights of {model} are in {short(most)}, which the engine does not compute in; "
            f"allowed: --dtype with {' or '.join(DTYPES)}"
        )
    target = named_dtype("--dtype", DTYPES, dtype or short(most))
    check_repeats(reader, weights)
    from mcore_rl.engine.megatron.meta_model import meta_model  # imports Megatron

    found = meta_model(config, padded)
    parameters = [
        Parameter(w, found.parameters[w.local_name()], torch.float32 if w.float32 else target)
        for w in weights
        if not w.replica
    ]
    facts = {
        "layout": asdict(layout),
        "dtype": short(target),
        "vocab_size": config["vocab_size"],
        "optimizer": None,
        "lora": None,
        "hf_dtypes": {
            "most": short(most),
            "others": {n: short(dtype) for n, dtype in sorted(dtypes.items()) if dtype != most},
        },
    }
    options = {"--layout": asdict(layout), "--dtype": short(target)}
    return Conversion(
        output=output,
        fingerprint=fingerprint("hf-to-mcore", {"model": model}, **options),
        units=tuple(_units(reader, layout, parameters, found.objects)),
        finish=partial(_finish, model=model, facts=facts),
        notes=_rounded(parameters, dtypes),
        finish_bytes=_DCP_IMPORT_BYTES
        + WRITTEN_ENTRY_BYTES * sum(len(_chunks(p, layout)) for p in parameters),
        kept={"reader": reader},
    )


def check_repeats(reader: CheckpointReader, weights: Sequence[Weight]) -> None:
    """Raise ConfigError for a copy of a tensor that differs from it: it would be lost."""
    for tensor in (t for weight in weights if not weight.replica for t in weight.rule.tensors):
        at_once = max(1, _COMPARED_BYTES // (4 * math.prod(tensor.shape[1:])))
        for copy in tensor.copies:
            for start in range(0, tensor.shape[0], at_once):
                count = min(at_once, tensor.shape[0] - start)
                a, b = (reader.read(rows(t, start, count, 0)) for t in (tensor, copy))
                if a.dtype != b.dtype or not torch.equal(a, b):
                    raise ConfigError(
                        f"checkpoint {reader.path}: {copy.name} should repeat {tensor.name}, "
                        "and differs from it"
                    )


def _rounded(parameters: Sequence[Parameter], dtypes: Dtypes) -> tuple[str, ...]:
    """A line on tensors that are wider than what they become."""
    names = [
        tensor.name
        for parameter in parameters
        for tensor in parameter.weight.rule.tensors
        if torch.promote_types(dtypes[tensor.name], parameter.dtype) != parameter.dtype
    ]
    if not names:
        return ()
    return (f"{len(names)} tensors are rounded to a narrower dtype, {names[0]} the first",)


def _finish(folder: Path, results: list[Any], *, model: Path, facts: Mapping[str, Any]) -> None:
    write_metadata(folder, (Record(*values) for file in results for values in file))
    (folder / COMPANIONS).mkdir(exist_ok=True)
    copy_companions(model, folder / COMPANIONS, DTYPES[facts["dtype"]])
    write_checkpoint_info(folder, facts)


@dataclass(frozen=True, slots=True)
class DistUnit:
    """One .distcp file: some parameters, read from the Hugging Face folder `model`. No Megatron."""

    name: str
    model: Path
    layout: Layout
    parameters: tuple[Parameter, ...]
    objects: Mapping[str, bytes]
    memory_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parameters) + sum(map(len, self.objects.values()))

    def write(self, folder: Path, wrote: Wrote, kept: dict[str, Any]) -> list[Record]:
        if "reader" not in kept:
            kept["reader"] = CheckpointReader(self.model)
        whole, scratch = kept.setdefault("buffers", (Buffer(), Buffer()))
        with DistFile(folder / self.name, self.nbytes) as file:
            for parameter in self.parameters:
                _fill(parameter, kept["reader"], whole, scratch)
                _add_chunks(parameter, self.layout, whole, scratch, file)
                wrote(parameter.nbytes)
            for key, data in self.objects.items():
                file.add_object(key, data)
        return file.records


def _units(
    reader: CheckpointReader,
    layout: Layout,
    parameters: Sequence[Parameter],
    objects: Mapping[str, bytes],
) -> Iterator[DistUnit]:
    stored = {name: entry.dtype for name, _, entry in reader.stored()}
    for number, run_of in enumerate(runs(parameters)):
        largest = max(parameter.nbytes for parameter in run_of)
        scratch = max(_scratch_bytes(p, layout) for p in run_of)
        casts = max(_cast_bytes(p, stored) for p in run_of)
        yield DistUnit(
            name=f"__{number}_0.distcp",
            model=reader.path,
            layout=layout,
            parameters=run_of,
            objects={} if number else objects,
            memory_bytes=largest + scratch + casts + READ_ENTRY_BYTES * len(stored),
        )


def _chunks(parameter: Parameter, layout: Layout) -> tuple[Box, ...]:
    return chunks(parameter.weight, num_shards(parameter.weight, layout))


def _scratch_bytes(parameter: Parameter, layout: Layout) -> int:
    """Beside the parameter: a tensor whose rows are dealt out, or a chunk of some columns."""
    blocks = Counter(block.tensor for block in parameter.weight.rule.blocks(WHOLE))
    dealt = [math.prod(tensor.shape) for tensor, count in blocks.items() if count > 1]
    boxes = _chunks(parameter, layout)
    cut = [box.numel for box in boxes if box.sizes[1:] != parameter.shape[1:]]
    return max([0, *dealt, *cut]) * parameter.dtype.itemsize


def _cast_bytes(parameter: Parameter, stored: Dtypes) -> int:
    """What the reader takes for a tensor in another dtype: as it stands, and rows of blocks."""
    found = 0
    for tensor in parameter.weight.rule.tensors:
        dtype = stored[tensor.name]
        if dtype != parameter.dtype:
            nbytes = math.prod(tensor.shape) * dtype.itemsize
            found = max(found, nbytes + fp8.scratch_bytes(dtype, tensor.shape))
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
    parameter: Parameter, layout: Layout, whole: Buffer, scratch: Buffer, file: DistFile
) -> None:
    location, shape, dtype = parameter.location, parameter.shape, parameter.dtype
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    for box in _chunks(parameter, layout):
        if box.sizes[1:] == shape[1:]:
            chunk = whole.tensor(box.sizes, dtype, start=box.offsets[0] * row_bytes)
        else:
            chunk = scratch.tensor(box.sizes, dtype)
            chunk.copy_(whole.tensor(shape, dtype)[box.slices])
        place = location.box(box)
        file.add_tensor(location.key, location.shape, place.offsets, chunk.view(place.sizes))
