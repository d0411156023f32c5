"""Writing Hugging Face checkpoints: safetensors files planned ahead, index, companion files."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch

from mcore_rl.checkpoint.files import open_atomic, view_bytes, write_at
from mcore_rl.checkpoint.hf import (
    CRC32_KEY,
    DTYPES,
    INDEX_FILE,
    LENGTH_BYTES,
    CheckpointReader,
    Entry,
    read_frozen_tensors,
    read_stacks,
)
from mcore_rl.checkpoint.stacks import stack_experts
from mcore_rl.config.atomic_file import create_folder, get_partial_path
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.models.base import get_frozen_prefixes, is_transposed

# Files that are copied with the weights: config, tokenizer, chat templates, code.
_COMPANIONS = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
_T = TypeVar("_T")
_ALIGNMENT = 8  # of the first tensor in a file
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A file to write, with the offset of each of its tensors."""

    file: str
    entries: Mapping[str, Entry]
    start: int  # of the first tensor, after the header

    @property
    def nbytes(self) -> int:
        """Size of the tensors, without the header."""
        return sum(entry.nbytes for entry in self.entries.values())


def plan_shards(tensors: Sequence[TensorPlan], max_shard_bytes: int) -> tuple[ShardPlan, ...]:
    """Assign tensors, in their order, to files of at most `max_shard_bytes`, with final names.

    A tensor larger than `max_shard_bytes` gets a separate file.
    """
    shards = list(group_by_size(tensors, max_shard_bytes)) or [[]]
    names = _list_file_names(len(shards))
    return tuple(_plan_shard(name, shard) for name, shard in zip(names, shards, strict=True))


def group_by_size(
    items: Iterable[_T], max_bytes: int, nbytes: Callable[[_T], int] = attrgetter("nbytes")
) -> Iterator[list[_T]]:
    """Yield consecutive items in groups of at most `max_bytes`, but of at least one item."""
    group: list[_T] = []
    size_bytes = 0
    for item in items:
        if group and size_bytes + nbytes(item) > max_bytes:
            yield group
            group, size_bytes = [], 0
        group.append(item)
        size_bytes += nbytes(item)
    if group:
        yield group


def _list_file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _plan_shard(file: str, tensors: Sequence[TensorPlan]) -> ShardPlan:
    """Plan a file. Larger dtypes come first, so that each tensor is aligned to its element size."""
    entries: dict[str, Entry] = {}
    offset = 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        entries[tensor.name] = Entry(tensor.dtype, tensor.shape, offset, tensor.nbytes)
        offset += tensor.nbytes
    if len(entries) < len(tensors):
        raise ValueError(f"{file}: a tensor is planned twice")
    start = len(_build_header(entries, dict.fromkeys(entries, 0), 0))
    moved = {name: replace(entry, offset=start + entry.offset) for name, entry in entries.items()}
    return ShardPlan(file, moved, start)


def _build_header(entries: Mapping[str, Entry], crc32s: Mapping[str, int], start: int) -> bytes:
    """Return length and header of a file. Their size does not depend on the checksums."""
    checksums = json.dumps({name: f"{crc32s[name]:08x}" for name in entries})
    header: dict[str, Any] = {"__metadata__": {"format": "pt", CRC32_KEY: checksums}}
    for name, entry in entries.items():
        begin = entry.offset - start
        header[name] = {
            "dtype": _DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, begin + entry.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def write_shard(
    folder: Path, shard: ShardPlan, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a file from a stream of its tensors. Its bytes do not depend on their order.

    The file gets its name when it is complete.

    Raises:
        OSError: The file cannot be written, as on a full disk.
        ValueError: The stream has other tensors than the plan.
    """
    crc32s: dict[str, int] = {}
    with open_atomic(folder / shard.file, shard.start + shard.nbytes) as fd:
        for name, tensor in tensors:
            entry = shard.entries.get(name)
            if entry is None or name in crc32s:
                raise ValueError(f"{shard.file}: {name} is not planned, or came before")
            if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
                raise ValueError(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)} was planned as {entry.dtype} "
                    f"{entry.shape}"
                )
            crc32s[name] = write_at(
                fd, entry.offset, view_bytes(tensor.detach().cpu().contiguous())
            )
            del tensor  # before the iterator creates the next one
        if missing := shard.entries.keys() - crc32s.keys():
            raise ValueError(f"{shard.file}: {min(missing)} is planned and did not come")
        write_at(fd, 0, _build_header(shard.entries, crc32s, shard.start))


def write_index(folder: Path, shards: Sequence[ShardPlan]) -> None:
    """Write the index of a checkpoint with several files; one file needs none."""
    if len(shards) < 2:
        return
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": {name: shard.file for shard in shards for name in shard.entries},
    }
    _write_json(folder / INDEX_FILE, index)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with open_atomic(path) as fd:
        write_at(fd, 0, (json.dumps(content, indent=2) + "\n").encode())


def copy_companions(
    reference: Path,
    folder: Path,
    dtype: torch.dtype,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Copy the files beside the weights of `reference`, config.json for weights of `dtype`.

    Args:
        changes: Fields of config.json to set. quantization_config is not copied: weights in float8
            need it here.

    Raises:
        OSError: A file cannot be copied.
    """
    for pattern in _COMPANIONS:
        for companion in reference.glob(pattern):
            if ".index." not in companion.name:
                target = folder / companion.relative_to(reference)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(companion, target)
    if (reference / "config.json").is_file():
        config = read_json_object(reference / "config.json")
        for fields in (config, config.get("text_config") or {}):
            fields.pop("quantization_config", None)
        parts = ("text",) if get_frozen_prefixes(config) else ("text", "vision")
        for fields in (config, *(config.get(f"{part}_config") for part in parts)):
            for key in ("dtype", "torch_dtype"):  # transformers 5 and 4
                if fields and key in fields:
                    fields[key] = str(dtype).removeprefix("torch.")
        text_config = config.get("text_config") or {}
        for name, value in (changes or {}).items():
            is_nested = name in text_config and name not in config
            (text_config if is_nested else config)[name] = value
        _write_json(folder / "config.json", config)


def plan_frozen_tensors(reference: Path) -> list[TensorPlan]:
    """Return the frozen tensors of a checkpoint folder (Family.frozen_prefixes), as they are there.

    Raises:
        ConfigError: The folder has no weights.
    """
    config = reference / "config.json"
    if not config.is_file() or not get_frozen_prefixes(read_json_object(config)):
        return []
    reader = CheckpointReader(reference)
    return [TensorPlan(n, reader.get_shape(n), reader.get_dtype(n)) for n in reader.frozen]


def copy_frozen_tensors(reference: Path, folder: Path) -> None:
    """Write the frozen tensors of `reference`, if it has any, as a checkpoint of one file."""
    if plans := plan_frozen_tensors(reference):
        [shard] = plan_shards(plans, sum(plan.nbytes for plan in plans))
        write_shard(folder, shard, read_frozen_tensors(reference))


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Create a temporary folder that is renamed to `path` at the end, or removed on an error.

    Raises:
        ConfigError: `path` exists.
    """
    if path.exists():
        raise ConfigError(f"output folder {path} already exists; name one that does not")
    partial_path = get_partial_path(path)
    create_folder(partial_path)
    try:
        yield partial_path
        partial_path.rename(path)
    finally:
        shutil.rmtree(partial_path, ignore_errors=True)


@contextmanager
def reserve_folder(path: Path, num_bytes: int) -> Iterator[None]:
    """Create the parent folder of `path`, for this user alone; remove it at the end if empty.

    Raises:
        OSError: It cannot be created, or has less free space than `num_bytes`.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        if shutil.disk_usage(path.parent).free < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        yield
    finally:
        with suppress(OSError):  # not empty
            path.parent.rmdir()


def _order_dims(
    tensors: Iterable[tuple[str, torch.Tensor]], reference: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors on the host, with their dimensions in the order of files of `reference`."""
    file = reference / "config.json"
    config = read_json_object(file) if file.is_file() else {}
    for name, tensor in tensors:
        host = tensor.detach().cpu()
        yield name, host.transpose(-1, -2) if is_transposed(config, name) else host


def write_checkpoint(
    path: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    reference: str | Path,
    max_shard_bytes: int = 5 << 30,
    config_changes: Mapping[str, Any] | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Stream tensors into a new checkpoint folder, with config and tokenizer files of `reference`.

    Frozen tensors (Family.frozen_prefixes) are those of `reference`, and the experts that it stacks
    are stacked. In memory at a time: one shard, and the stacks that are not complete. The folder
    gets its name when it is complete.

    Args:
        tensors: As CheckpointReader has them: some are transposed in the files.
        config_changes: Fields of config.json to set.
        write_more: Writes further files into the folder, before it gets its name.

    Raises:
        ConfigError: `path` exists.
        OSError: It cannot be written.
    """
    with atomic_dir(Path(path)) as folder:
        shards: list[ShardPlan] = []
        largest = TensorPlan("", (), torch.float32)  # small tensors may be float32
        stacked = stack_experts(_order_dims(tensors, Path(reference)), read_stacks(reference))
        on_cpu = chain(stacked, read_frozen_tensors(reference))
        for shard in group_by_size(on_cpu, max_shard_bytes, lambda item: item[1].nbytes):
            plans = [TensorPlan(name, tuple(t.shape), t.dtype) for name, t in shard]
            shards.append(_plan_shard(f"shard-{len(shards)}", plans))
            write_shard(folder, shards[-1], shard)
            shard.clear()  # before the next shard is collected
            largest = max(largest, *plans, key=lambda plan: math.prod(plan.shape))
        for number, name in enumerate(_list_file_names(len(shards))):
            (folder / shards[number].file).rename(folder / name)
            shards[number] = replace(shards[number], file=name)
        write_index(folder, shards)
        copy_companions(Path(reference), folder, largest.dtype, config_changes)
        if write_more is not None:
            write_more(folder)
