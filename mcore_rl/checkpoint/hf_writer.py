"""Hugging Face checkpoints written: safetensors files planned ahead, their index, their company."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib

from mcore_rl.checkpoint.hf import INDEX_FILE
from mcore_rl.checkpoint.integrity import CRC32_KEY, spell_checksums
from mcore_rl.checkpoint.safetensors_file import (
    DTYPES,
    LENGTH_BYTES,
    WRITE_BYTES,
    Entry,
    bytes_of,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object

# What stands beside the weights and is carried along: config, tokenizer, chat templates, code.
_COMPANIONS = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
_ALIGNMENT = 8  # of the first tensor in a file
_SPELLED = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file that is to be written, and where each of its tensors will stand in it."""

    file: str
    entries: Mapping[str, Entry]

    @property
    def nbytes(self) -> int:
        """Of the tensors, without the header."""
        return sum(entry.nbytes for entry in self.entries.values())


def plan_shards(tensors: Sequence[TensorPlan], max_shard_bytes: int) -> tuple[ShardPlan, ...]:
    """The files of a checkpoint, filled in the order of the tensors, under their final names.

    A tensor that is larger than `max_shard_bytes` has a file of its own.
    """
    shards: list[list[TensorPlan]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        if shards[-1] and size_bytes + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(tensor)
        size_bytes += tensor.nbytes
    names = _file_names(len(shards))
    return tuple(_planned(name, shard) for name, shard in zip(names, shards, strict=True))


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _planned(file: str, tensors: Sequence[TensorPlan]) -> ShardPlan:
    """Larger dtypes first, so that each tensor stands at a multiple of its element size."""
    entries: dict[str, Entry] = {}
    offset = 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        entries[tensor.name] = Entry(tensor.dtype, tensor.shape, offset, tensor.nbytes)
        offset += tensor.nbytes
    if len(entries) < len(tensors):
        raise ValueError(f"{file}: a tensor is planned twice")
    start = len(_header(entries, dict.fromkeys(entries, 0), 0))
    moved = {name: replace(entry, offset=start + entry.offset) for name, entry in entries.items()}
    return ShardPlan(file, moved)


def _header(entries: Mapping[str, Entry], crc32s: Mapping[str, int], start: int) -> bytes:
    """Length and header of a file whose data begin at `start`. Checksums do not change its size."""
    ordered = {name: crc32s[name] for name in entries}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", CRC32_KEY: spell_checksums(ordered)}}
    for name, entry in entries.items():
        begin = entry.offset - start
        header[name] = {
            "dtype": _SPELLED[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, begin + entry.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def write_shard(
    folder: Path, shard: ShardPlan, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write one file from a stream of its tensors; raises as `writing_shard` does."""
    with writing_shard(folder, shard) as writer:
        for name, tensor in tensors:
            writer.write(name, tensor)


@contextmanager
def writing_shard(folder: Path, shard: ShardPlan) -> Iterator[ShardWriter]:
    """One file, whose tensors are written in any order; the same bytes in every order.

    The file appears under its name when it is complete.

    Raises:
        OSError: the file cannot be written (a full disk).
        ValueError: other tensors came than those planned.
    """
    with _file_aside(folder / shard.file) as fd:
        writer = ShardWriter(shard, fd)
        yield writer
        writer.finish()


class ShardWriter:
    """A file being written: see `writing_shard`."""

    def __init__(self, shard: ShardPlan, fd: int) -> None:
        self._shard, self._fd = shard, fd
        self._crc32s: dict[str, int] = {}
        self._start = min((entry.offset for entry in shard.entries.values()), default=0)
        if size := self._start + shard.nbytes:  # a full disk shows now, and writing is faster
            os.posix_fallocate(fd, 0, size)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        entry = self._shard.entries.get(name)
        if entry is None or name in self._crc32s:
            raise ValueError(f"{self._shard.file}: {name} is not planned, or came before")
        if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} was planned as {entry.dtype} "
                f"{entry.shape}"
            )
        memory = bytes_of(tensor.detach().cpu().contiguous())
        self._crc32s[name] = _write(self._fd, memory, entry.offset)

    def finish(self) -> None:
        """The header, once every tensor has been written."""
        entries = self._shard.entries
        if missing := entries.keys() - self._crc32s.keys():
            raise ValueError(f"{self._shard.file}: {min(missing)} is planned and did not come")
        _write(self._fd, memoryview(_header(entries, self._crc32s, self._start)), 0)


def _write(fd: int, memory: memoryview, offset: int) -> int:
    """Bytes to a place in a file; their CRC32."""
    crc32, done = 0, 0
    while done < len(memory):
        piece = memory[done : done + WRITE_BYTES]
        count = os.pwrite(fd, piece, offset + done)
        crc32 = isal_zlib.crc32(piece[:count], crc32)
        done += count
    return crc32


@contextmanager
def _file_aside(path: Path) -> Iterator[int]:
    """A file to write into; it becomes `path` at the end, on an error nothing.

    Raises:
        OSError: it cannot be written; names `path`.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("wb", buffering=0) as file:
            yield file.fileno()
        aside.rename(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        aside.unlink(missing_ok=True)


def write_index(folder: Path, shards: Sequence[ShardPlan]) -> None:
    """The index of a checkpoint in several files; one file needs none."""
    if len(shards) < 2:
        return
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": {name: shard.file for shard in shards for name in shard.entries},
    }
    _write_json(folder / INDEX_FILE, index)


def _write_json(path: Path, found: Mapping[str, Any]) -> None:
    with _file_aside(path) as fd:
        _write(fd, memoryview((json.dumps(found, indent=2) + "\n").encode()), 0)


def copy_companions(
    reference: Path,
    folder: Path,
    dtype: torch.dtype,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """What stands beside the weights of `reference`; config.json for weights of `dtype`.

    `changes` are fields of config.json that differ from the reference's. Its quantization_config is
    left out: weights in float8 need one in `changes`.

    Raises:
        OSError: a file cannot be copied.
    """
    for pattern in _COMPANIONS:
        for companion in reference.glob(pattern):
            if ".index." not in companion.name:
                target = folder / companion.relative_to(reference)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(companion, target)
    if (reference / "config.json").is_file():
        config = read_json_object(reference / "config.json")
        config.pop("quantization_config", None)
        for key in ("dtype", "torch_dtype"):  # transformers 5 and 4
            if key in config:
                config[key] = str(dtype).removeprefix("torch.")
        _write_json(folder / "config.json", config | dict(changes or {}))


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A folder beside `path` to write into; it becomes `path` at the end, on an error nothing.

    Raises:
        ConfigError: `path` exists.
    """
    if path.exists():
        raise ConfigError(f"output folder {path} already exists; name one that does not")
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # what a killed run left
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def room_for(path: Path, num_bytes: int) -> Iterator[None]:
    """Makes the folder around `path`, for this user alone; an empty one is gone again at the end.

    Raises:
        OSError: it cannot be made, or has less room than `num_bytes`.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        if shutil.disk_usage(path.parent).free < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        yield
    finally:
        with suppress(OSError):  # it holds something
            path.parent.rmdir()


def write_checkpoint(
    path: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    reference: str | Path,
    max_shard_bytes: int = 5 << 30,
    config_changes: Mapping[str, Any] | None = None,
) -> None:
    """Stream tensors into a new checkpoint folder, with config and tokenizer files of `reference`.

    At most one shard is in memory. The folder appears under its name when it is complete.
    `config_changes` are fields of config.json that differ from the reference's.

    Raises:
        ConfigError: `path` exists.
        OSError: it cannot be written.
    """
    with written_aside(Path(path)) as folder:
        shards: list[ShardPlan] = []
        largest = TensorPlan("", (), torch.float32)  # a small tensor may be kept in float32
        for number, held in enumerate(_collected(tensors, max_shard_bytes), start=1):
            plans = [TensorPlan(name, tuple(t.shape), t.dtype) for name, t in held]
            shards.append(_planned(f"shard-{number}", plans))
            write_shard(folder, shards[-1], held)
            held.clear()  # before the next shard is collected
            largest = max(largest, *plans, key=lambda plan: math.prod(plan.shape))
        names = _file_names(len(shards))
        for shard, name in zip(shards, names, strict=True):
            (folder / shard.file).rename(folder / name)
        write_index(folder, [replace(s, file=n) for s, n in zip(shards, names, strict=True)])
        copy_companions(Path(reference), folder, largest.dtype, config_changes)


def _collected(
    tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors of one file at a time, on the CPU."""
    shard: list[tuple[str, torch.Tensor]] = []
    size_bytes = 0
    for name, tensor in tensors:
        if shard and size_bytes + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size_bytes = [], 0
        shard.append((name, tensor.detach().cpu()))
        size_bytes += tensor.nbytes
    if shard:
        yield shard
