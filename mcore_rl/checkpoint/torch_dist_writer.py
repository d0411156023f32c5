"""Distributed checkpoints (Megatron's torch_dist) written item by item, without Megatron or ranks.

torch's own FileSystemWriter keeps every tensor of a file until the file is closed
(torch/distributed/checkpoint/filesystem.py, `tensor_dict`); here one tensor is in memory at a time.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_rl.checkpoint import torch_item
from mcore_rl.checkpoint.safetensors_file import WRITE_BYTES
from mcore_rl.checkpoint.stored import CONTENT_METADATA
from mcore_rl.checkpoint.torch_dist import COMMON_FILE
from mcore_rl.checkpoint.torch_dist_metadata import BACKEND, BACKEND_FILE, METADATA_FILE


@dataclass(frozen=True, slots=True)
class Record:
    """One item of a `.distcp` file: a chunk of a tensor, or an object, which has no dtype.

    `Record(**dataclasses.asdict(record))` is the record again, through JSON as well.
    """

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str | None  # "bfloat16"
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        for name in ("shape", "offsets", "sizes"):  # JSON, where a record may come from, has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))


class _File(io.FileIO):
    """Writes all that it is given, piece by piece."""

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        nbytes = len(left)
        while left:
            left = left[os.write(self.fileno(), left[:WRITE_BYTES]) :]
        return nbytes


class DistFile:
    """A new `.distcp` file, written aside; leaving the context without an error names it.

    `records` says what it holds. Space for `reserved_bytes` is taken at the beginning: a full disk
    shows then, and writing is half as fast again.
    """

    def __init__(self, path: str | Path, reserved_bytes: int = 0) -> None:
        self.path, self._reserved_bytes = Path(path), reserved_bytes
        self.records: list[Record] = []
        self._aside = self.path.with_name(f".{self.path.name}.partial")

    def __enter__(self) -> Self:
        self._file = _File(self._aside, "wb")
        if self._reserved_bytes:
            try:
                os.posix_fallocate(self._file.fileno(), 0, self._reserved_bytes)
            except OSError as error:
                self.__exit__(OSError)
                raise OSError(error.errno, error.strerror, str(self.path)) from None
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.truncate()
            if kind is None:
                self._aside.rename(self.path)
        finally:
            self._aside.unlink(missing_ok=True)

    def add_tensor(
        self, key: str, shape: Sequence[int], offsets: Sequence[int], tensor: torch.Tensor
    ) -> None:
        """Append the chunk at `offsets` of a tensor that is `shape` as a whole.

        Raises:
            OSError: it cannot be written, as on a full disk.
        """
        tensor = tensor.detach().cpu().contiguous()
        start = self._file.tell()
        if torch_item.is_framed(tensor.dtype, tensor.nbytes):
            for part in torch_item.item_of(tensor):
                self._file.write(part)
        else:
            self._save(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._record(key, start, tuple(shape), dtype, tuple(offsets), tuple(tensor.shape))

    def _save(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            # torch.save writes the whole storage. In this format it is the chunk and nothing else.
            tensor = tensor.clone()
        try:
            torch.save(tensor, self._file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # closing its archive, torch fails again
                raise error.__context__ from None
            raise

    def add_object(self, key: str, data: bytes) -> None:
        """Append an object, as the bytes that torch.save makes of it."""
        start = self._file.tell()
        self._file.write(data)
        self._record(key, start, (), None, (), ())

    def _record(
        self,
        key: str,
        start: int,
        shape: tuple[int, ...],
        dtype: str | None,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> None:
        length = self._file.tell() - start
        self.records.append(
            Record(key, shape, dtype, offsets, sizes, self.path.name, start, length)
        )


def write_metadata(folder: str | Path, records: Iterable[Record]) -> None:
    """Write `.metadata`, `common.pt` and `metadata.json`: with them the folder can be read.

    The bytes depend on the records alone, not on their order.
    """
    folder = Path(folder)
    common = io.BytesIO()
    torch.save({"content_metadata": CONTENT_METADATA}, common)
    _write(folder / COMMON_FILE, common.getvalue())
    _write(folder / BACKEND_FILE, json.dumps(BACKEND).encode())
    _write(folder / METADATA_FILE, pickle.dumps(_metadata(records), protocol=4))


def _metadata(records: Iterable[Record]) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    once: dict[str, str] = {}  # pickle writes equal strings again unless they are one object
    for record in sorted(records, key=lambda record: (record.key, record.offsets)):
        key = once.setdefault(record.key, record.key)
        file = once.setdefault(record.file, record.file)
        info = _StorageInfo(file, record.offset, record.length)
        if record.dtype is None:
            entries[key], index = BytesStorageMetadata(), MetadataIndex(key)
        else:
            entry = entries.setdefault(key, _tensor_entry(record))
            assert isinstance(entry, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(record.offsets), torch.Size(record.sizes))
            entry.chunks.append(chunk)
            index = MetadataIndex(key, chunk.offsets)
        if index in places:
            raise ValueError(f"two records of {key} at offsets {record.offsets}")
        places[index] = info
    return Metadata(entries, storage_data=places, version=CURRENT_DCP_VERSION)


def _tensor_entry(record: Record) -> TensorStorageMetadata:
    dtype = getattr(torch, str(record.dtype))
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(record.shape), [])


def _write(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("wb") as file:
        file.write(data)
    aside.rename(path)
