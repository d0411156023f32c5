"""mcore-rl convert inspect: what is in a checkpoint folder, of either kind."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.stamp import STAMP_FILE, read_stamp
from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.jobs.convert.megatron_folder import checkpoint_in, is_megatron
from mcore_rl.jobs.convert.options import format_bytes
from mcore_rl.jobs.convert.plan import short
from mcore_rl.models.base import read_config


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One stored tensor. `chunks` are the pieces that it is stored in."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    files: list[str]
    num_chunks: int = 1


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """What a folder holds; `facts` are those that only one of the kinds has."""

    kind: str  # "Hugging Face" or "Megatron"
    path: str
    num_tensors: int
    num_elements: int
    num_bytes: int
    facts: dict[str, Any]
    tensors: list[TensorFacts] = field(default_factory=list)


def inspect(path: Path, *, as_json: bool) -> None:
    """Print what is in a folder.

    Raises:
        ConfigError: it is no checkpoint, or is damaged.
    """
    found = facts_of(path)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
    else:
        _print(found, Console(width=None if sys.stdout.isatty() else 200))


def facts_of(path: Path) -> FolderFacts:
    return _megatron(checkpoint_in(path)) if is_megatron(path) else _hugging_face(path)


def _hugging_face(path: Path) -> FolderFacts:
    reader, config = CheckpointReader(path), read_config(path)
    tensors = [
        TensorFacts(name, entry.shape, short(entry.dtype), entry.nbytes, [file.name])
        for name, file, entry in reader.stored()
    ]
    facts = {
        "architectures": config.get("architectures"),
        "quantization": "fp8, blocks of 128 x 128" if reader.is_quantized else None,
    }
    return _summed("Hugging Face", path, tensors, facts)


def _megatron(path: Path) -> FolderFacts:
    reader = DistReader(path)
    tensors = [
        TensorFacts(
            name,
            tensor.shape,
            short(tensor.dtype),
            math.prod(tensor.shape) * tensor.dtype.itemsize,
            sorted({chunk.file for chunk in tensor.chunks}),
            len(tensor.chunks),
        )
        for name, tensor in reader.tensors.items()
    ]
    stamp = read_stamp(path) if (path / STAMP_FILE).exists() else {}
    facts = {
        "optimizer": any(t.name.startswith(("optimizer.", "chained_")) for t in tensors),
        "num_objects": len(reader.objects),
        **{name: value for name, value in stamp.items() if name != "optimizer"},
    }
    return _summed("Megatron", path, tensors, facts)


def _summed(
    kind: str, path: Path, tensors: list[TensorFacts], facts: dict[str, Any]
) -> FolderFacts:
    elements = sum(math.prod(tensor.shape) for tensor in tensors)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    return FolderFacts(kind, str(path), len(tensors), elements, num_bytes, facts, tensors)


def _print(found: FolderFacts, console: Console) -> None:
    table = Table(title=f"{found.kind}: {found.path}", title_justify="left")
    for heading in ("tensor", "shape", "dtype", "size", "chunks", "file"):
        table.add_column(heading, overflow="fold")
    for tensor in found.tensors:
        table.add_row(
            tensor.name,
            " x ".join(map(str, tensor.shape)),
            tensor.dtype,
            format_bytes(tensor.num_bytes),
            str(tensor.num_chunks),
            tensor.files[0] if len(tensor.files) == 1 else f"{len(tensor.files)} files",
        )
    console.print(table)
    for name, value in found.facts.items():
        console.print(f"{name}: {json.dumps(value)}", markup=False, highlight=False)
    size = format_bytes(found.num_bytes)
    console.print(f"{found.num_tensors} tensors, {found.num_elements:,} elements, {size}")
