"""mcore-rl convert hf-to-mcore: write a Hugging Face folder as a distributed checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint import fp8, mxfp4
from mcore_rl.checkpoint.files import require_finite, write_checkpoint_info
from mcore_rl.checkpoint.hf import CheckpointReader, format_dtype
from mcore_rl.checkpoint.hf_writer import copy_companions, copy_frozen_tensors
from mcore_rl.checkpoint.storage_location import compute_chunks
from mcore_rl.checkpoint.torch_dist import DistFile
from mcore_rl.checkpoint.torch_dist_metadata import Record, write_metadata
from mcore_rl.config.checks import check_model_exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_engine import validate_layout, validate_model_layout
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.convert.megatron_checkpoint import COMPANIONS
from mcore_rl.jobs.convert.plan import (
    READ_ENTRY_BYTES,
    UNSHARDED,
    WRITTEN_ENTRY_BYTES,
    Buffer,
    Parameter,
    Resources,
    compute_fingerprint,
    count_shards,
    find_main_dtype,
    parse_dtype,
    parse_resources,
    split_into_files,
    uses_bridge,
)
from mcore_rl.jobs.convert.run import Conversion, ReportBytes, run
from mcore_rl.models.base import get_model_sizes, pad_vocab_size
from mcore_rl.models.heads import get_model_config, map_model_weights
from mcore_rl.reshard.rules import Box, Weight, list_logical_tensors, slice_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DCP_IMPORT_BYTES = 48 << 20  # of torch.distributed.checkpoint, imported to write the metadata
_COMPARED_BYTES = 16 << 20  # of a tensor and its alias, at a time
Dtypes = Mapping[str, torch.dtype]  # of the Hugging Face tensors, by name


def convert_folder(*, model: Path, output: Path, layout: Layout, **options: Any) -> None:
    """Run the command with its options.

    Raises:
        ConfigError, RunFailed: See plan_conversion and run.run.
    """
    check_model_exists("--model", model)
    resources, dtype = parse_resources(**options), options["dtype"]
    if uses_bridge({"layout": layout != Layout(), **options}):
        from mcore_rl.engine.megatron.conversion import import_with_bridge

        import_with_bridge(model, output)
    else:
        convert(model, output, layout, dtype, resources)


def convert(
    model: Path, output: Path, layout: Layout, dtype: str | None, resources: Resources
) -> None:
    """Write the weights in `model` as a checkpoint that an engine of any layout loads.

    Raises:
        ConfigError, RunFailed: See plan_conversion and run.run.
    """
    run(plan_conversion(model, output, layout, dtype), resources)


def plan_conversion(model: Path, output: Path, layout: Layout, dtype: str | None) -> Conversion:
    """Plan a conversion, after every check that can be made before weights are read.

    Raises:
        ConfigError: The folder is no checkpoint of a family, or the layout does not divide it.
    """
    validate_layout("--layout", layout)
    reader = CheckpointReader(model)
    config = get_model_config(reader.read_config())
    validate_model_layout("--layout", layout, get_model_sizes(config))
    padded = pad_vocab_size(config, layout.tp)
    weights = map_model_weights(config, padded)
    reader.check(list_logical_tensors(weights))
    frozen = set(reader.frozen)
    shapes = {name: shape for name, shape in reader.get_shapes().items() if name not in frozen}
    dtypes = {name: reader.get_dtype(name) for name in shapes}
    main_dtype = find_main_dtype((dtypes[name], math.prod(shape)) for name, shape in shapes.items())
    if dtype is None and main_dtype not in DTYPES.values():
        raise ConfigError(
            f"the weights of {model} are in {format_dtype(main_dtype)}, which the engine does not "
            f"compute in; allowed: --dtype with {' or '.join(DTYPES)}"
        )
    target = parse_dtype(dtype or format_dtype(main_dtype), DTYPES)
    check_aliases(reader, weights)
    from mcore_rl.engine.megatron.conversion import build_meta_model  # imports Megatron

    megatron_model = build_meta_model(config, padded)
    locations = megatron_model.parameters
    parameters = [
        Parameter(w, locations[w.get_local_name()], torch.float32 if w.float32 else target)
        for w in weights
        if not w.replica
    ]
    facts = {
        "layout": asdict(layout),
        "dtype": format_dtype(target),
        "vocab_size": config["vocab_size"],
        "optimizer": None,
        "lora": None,
        "expert_stacks": reader.stacks,
        "hf_dtypes": {
            "most": format_dtype(main_dtype),
            "others": {
                n: format_dtype(dtype) for n, dtype in sorted(dtypes.items()) if dtype != main_dtype
            },
        },
    }
    options = {"--layout": asdict(layout), "--dtype": format_dtype(target)}
    return Conversion(
        output=output,
        fingerprint=compute_fingerprint("hf-to-mcore", {"model": model}, **options),
        units=tuple(_plan_units(reader, layout, parameters, megatron_model.objects)),
        finish=partial(_finish, model=model, facts=facts),
        notes=_describe_rounding(parameters, reader),
        finish_bytes=_DCP_IMPORT_BYTES
        + WRITTEN_ENTRY_BYTES * sum(len(_list_chunks(p, layout)) for p in parameters),
        shared={"reader": reader},
    )


def check_aliases(reader: CheckpointReader, weights: Sequence[Weight]) -> None:
    """Raise ConfigError if an alias of a tensor differs from it: its values would be lost."""
    for tensor in (t for weight in weights if not weight.replica for t in weight.rule.tensors):
        num_rows = max(1, _COMPARED_BYTES // (4 * math.prod(tensor.shape[1:])))
        for alias in tensor.alias_tensors:
            for start in range(0, tensor.shape[0], num_rows):
                count = min(num_rows, tensor.shape[0] - start)
                a, b = (reader.read(slice_rows(t, start, count, 0)) for t in (tensor, alias))
                if a.dtype != b.dtype or not torch.equal(a, b):
                    raise ConfigError(
                        f"checkpoint {reader.path}: {alias.name} should repeat {tensor.name}, "
                        "and differs from it"
                    )


def _describe_rounding(
    parameters: Sequence[Parameter], reader: CheckpointReader
) -> tuple[str, ...]:
    """Return a line on the tensors that are rounded to a narrower dtype, if any."""
    names = [
        tensor.name
        for parameter in parameters
        for tensor in parameter.weight.rule.tensors
        if torch.promote_types(reader.get_dtype(tensor.name), parameter.dtype) != parameter.dtype
    ]
    if not names:
        return ()
    return (f"{len(names)} tensors are rounded to a narrower dtype, {names[0]} the first",)


def _finish(folder: Path, results: list[Any], *, model: Path, facts: Mapping[str, Any]) -> None:
    """Write the index, config and tokenizer, and facts on the checkpoint."""
    write_metadata(folder, (Record(*values) for file in results for values in file))
    (folder / COMPANIONS).mkdir(exist_ok=True)
    copy_companions(model, folder / COMPANIONS, DTYPES[facts["dtype"]])
    copy_frozen_tensors(model, folder / COMPANIONS)
    write_checkpoint_info(folder, facts)


@dataclass(frozen=True, slots=True)
class DistUnit:
    """One .distcp file, with parameters of the Hugging Face folder `model`. Needs no Megatron."""

    name: str
    model: Path
    layout: Layout
    parameters: tuple[Parameter, ...]
    objects: Mapping[str, bytes]
    memory_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parameters) + sum(map(len, self.objects.values()))

    def write(
        self, folder: Path, report_bytes: ReportBytes, shared: dict[str, Any]
    ) -> list[Record]:
        """Write the file; see Unit."""
        if "reader" not in shared:
            shared["reader"] = CheckpointReader(self.model)
        buffer, scratch = shared.setdefault("buffers", (Buffer(), Buffer()))
        with DistFile(folder / self.name, self.nbytes) as file:
            for parameter in self.parameters:
                _read_parameter(parameter, shared["reader"], buffer, scratch)
                _write_chunks(parameter, self.layout, buffer, scratch, file)
                report_bytes(parameter.nbytes)
            for key, data in self.objects.items():
                file.add_object(key, data)
        return file.records


def _plan_units(
    reader: CheckpointReader,
    layout: Layout,
    parameters: Sequence[Parameter],
    objects: Mapping[str, bytes],
) -> Iterator[DistUnit]:
    num_entries = sum(1 for _ in reader.list_stored())
    for number, file_parameters in enumerate(split_into_files(parameters)):
        largest = max(parameter.nbytes for parameter in file_parameters)
        scratch = max(_compute_scratch_bytes(p, layout) for p in file_parameters)
        casts = max(_compute_cast_bytes(p, reader) for p in file_parameters)
        yield DistUnit(
            name=f"__{number}_0.distcp",
            model=reader.path,
            layout=layout,
            parameters=file_parameters,
            objects={} if number else objects,
            memory_bytes=largest + scratch + casts + READ_ENTRY_BYTES * num_entries,
        )


def _list_chunks(parameter: Parameter, layout: Layout) -> tuple[Box, ...]:
    return compute_chunks(parameter.weight, count_shards(parameter.weight, layout))


def _compute_scratch_bytes(parameter: Parameter, layout: Layout) -> int:
    """Return the memory besides the parameter: a tensor in several blocks, or a column chunk."""
    blocks = Counter(block.tensor for block in parameter.weight.rule.get_blocks(UNSHARDED))
    tensors = [math.prod(tensor.shape) for tensor, count in blocks.items() if count > 1]
    boxes = _list_chunks(parameter, layout)
    columns = [box.numel for box in boxes if box.sizes[1:] != parameter.shape[1:]]
    return max([0, *tensors, *columns]) * parameter.dtype.itemsize


def _compute_cast_bytes(parameter: Parameter, reader: CheckpointReader) -> int:
    """Return the reader's memory for a tensor in another dtype: as stored, and rows of blocks."""
    most = 0
    for tensor in parameter.weight.rule.tensors:
        dtype, numel = reader.get_stored_dtype(tensor.name), math.prod(tensor.shape)
        if dtype == torch.uint8:
            most = max(most, mxfp4.compute_buffer_bytes(numel))
        elif dtype != parameter.dtype:
            buffers = fp8.compute_buffer_bytes(dtype, tensor.shape)
            most = max(most, numel * dtype.itemsize + buffers)
    return most


def _read_parameter(
    parameter: Parameter, reader: CheckpointReader, buffer: Buffer, scratch: Buffer
) -> None:
    """Read a parameter into `buffer`; vocabulary padding is zero.

    Tensors are read in full, so that their checksums can be verified.
    """
    target = buffer.view(parameter.shape, parameter.dtype)
    rule = parameter.weight.rule
    if sum(math.prod(tensor.shape) for tensor in rule.tensors) < target.numel():
        target.zero_()
    for tensor in rule.tensors:
        blocks = [block for block in rule.get_blocks(UNSHARDED) if block.tensor == tensor]
        is_one_block = len(blocks) == 1
        if is_one_block:
            values = target[blocks[0].local_slices]
        else:
            values = scratch.view(tensor.shape, parameter.dtype)
        reader.read_into(slice_rows(tensor, 0, tensor.shape[0], 0), values)
        if not reader.has_checksum(tensor.name):
            require_finite(tensor.name, values)
        for block in () if is_one_block else blocks:
            target[block.local_slices] = values[block.box.slices]


def _write_chunks(
    parameter: Parameter, layout: Layout, buffer: Buffer, scratch: Buffer, file: DistFile
) -> None:
    """Write a parameter from `buffer` in the chunks of the layout."""
    location, shape, dtype = parameter.location, parameter.shape, parameter.dtype
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    for box in _list_chunks(parameter, layout):
        if box.sizes[1:] == shape[1:]:
            chunk = buffer.view(box.sizes, dtype, start=box.offsets[0] * row_bytes)
        else:
            chunk = scratch.view(box.sizes, dtype)
            chunk.copy_(buffer.view(shape, dtype)[box.slices])
        [stored] = location.locate(box)
        file.add_tensor(stored.key, stored.shape, stored.box.offsets, chunk.view(stored.box.sizes))
