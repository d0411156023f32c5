"""mcore-rl convert inspect: print the contents of a checkpoint folder, of either format."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mcore_rl.checkpoint.files import INFO_FILE, read_checkpoint_info
from mcore_rl.checkpoint.hf import CheckpointReader, format_dtype
from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.config.checks import check_model_exists
from mcore_rl.jobs.convert.megatron_checkpoint import find_checkpoint, is_megatron_checkpoint
from mcore_rl.jobs.convert.plan import format_bytes
from mcore_rl.models.base import read_config

_Contents = tuple[dict[str, Any], list[dict[str, Any]]]  # facts of the format, and tensors


def inspect_folder(path: Path, *, is_json: bool) -> None:
    """Print the contents of a checkpoint folder.

    Raises:
        ConfigError: It is no checkpoint, or is damaged.
    """
    check_model_exists("DIR", path)
    if is_megatron_checkpoint(path):
        kind, path = "Megatron", find_checkpoint(path)
        facts, tensors = _read_megatron(path)
    else:
        kind, (facts, tensors) = "Hugging Face", _read_hugging_face(path)
    sizes = {
        "num_tensors": len(tensors),
        "num_elements": sum(math.prod(tensor["shape"]) for tensor in tensors),
        "num_bytes": sum(tensor["num_bytes"] for tensor in tensors),
    }
    if is_json:
        contents = {"kind": kind, "path": str(path), **sizes, "facts": facts, "tensors": tensors}
        print(json.dumps(contents, indent=1))
        return
    table = Table(title=f"{kind}: {path}", title_justify="left")
    for heading in ("tensor", "shape", "dtype", "size", "chunks", "file"):
        table.add_column(heading, overflow="fold")
    for tensor in tensors:
        table.add_row(
            tensor["name"],
            " x ".join(map(str, tensor["shape"])),
            tensor["dtype"],
            format_bytes(tensor["num_bytes"]),
            str(tensor["num_chunks"]),
            tensor["files"][0] if len(tensor["files"]) == 1 else f"{len(tensor['files'])} files",
        )
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for name, value in facts.items():
        console.print(f"{name}: {json.dumps(value)}", markup=False, highlight=False)
    size = format_bytes(sizes["num_bytes"])
    console.print(f"{len(tensors)} tensors, {sizes['num_elements']:,} elements, {size}")


def _read_hugging_face(path: Path) -> _Contents:
    reader, config = CheckpointReader(path), read_config(path)
    tensors = [
        _describe_tensor(name, entry.shape, entry.dtype, [file.name])
        for name, file, entry in reader.list_stored()
    ]
    facts = {
        "architectures": config.get("architectures"),
        "quantization": reader.quantization,
    }
    return facts, tensors


def _read_megatron(path: Path) -> _Contents:
    reader = DistReader(path)
    tensors = [
        _describe_tensor(name, tensor.shape, tensor.dtype, [chunk.file for chunk in tensor.chunks])
        for name, tensor in reader.tensors.items()
    ]
    info = read_checkpoint_info(path) if (path / INFO_FILE).exists() else {}
    facts = {
        "optimizer": any(name.startswith(("optimizer.", "chained_")) for name in reader.tensors),
        "num_objects": len(reader.objects),
        **{name: value for name, value in info.items() if name != "optimizer"},
    }
    return facts, tensors


def _describe_tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, files: list[str]
) -> dict[str, Any]:
    """Return the entry of a tensor; `files` has the file of each of its chunks."""
    return {
        "name": name,
        "shape": shape,
        "dtype": format_dtype(dtype),
        "num_bytes": math.prod(shape) * dtype.itemsize,
        "files": sorted(set(files)),
        "num_chunks": len(files),
    }
