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
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from mcore_rl.checkpoint import torch_item
from mcore_rl.checkpoint.raw_file import file_aside, write
from mcore_rl.checkpoint.storage_location import CONTENT_METADATA
from mcore_rl.checkpoint.torch_dist import COMMON_FILE
from mcore_rl.checkpoint.torch_dist_metadata import BACKEND, BACKEND_FILE, METADATA_FILE


class Record(NamedTuple):
    """One item of a `.distcp` file: a chunk of a tensor, or an object, which has no dtype.

    `Record(*json.loads(json.dumps(record)))` serves as well.
    """

    key: str
    shape: Sequence[int]  # of the whole tensor
    dtype: str | None  # "bfloat16"
    offsets: Sequence[int]
    sizes: Sequence[int]
    file: str
    offset: int
    length: int


class DistFile:
    """A new `.distcp` file, written aside; leaving the context without an error names it.

    `records` says what it contains; `reserved_bytes`: see raw_file.file_aside.
    """

    def __init__(self, path: str | Path, reserved_bytes: int = 0) -> None:
        self.path = Path(path)
        self.records: list[Record] = []
        self._aside, self._end = file_aside(self.path, reserved_bytes), 0

    def __enter__(self) -> Self:
        self._fd = self._aside.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            os.ftruncate(self._fd, self._end)
        self._aside.__exit__(kind, *error)

    def add_tensor(
        self, key: str, shape: Sequence[int], offsets: Sequence[int], tensor: torch.Tensor
    ) -> None:
        """Append the chunk at `offsets` of a tensor that is `shape` as a whole.

        Raises:
            OSError: it cannot be written, as on a full disk.
        """
        tensor = tensor.detach().cpu().contiguous()
        if torch_item.is_framed(tensor.dtype, tensor.nbytes):
            length = torch_item.write_item(self._fd, self._end, tensor)
        else:
            length = self._save(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._record(length, key, tuple(shape), dtype, tuple(offsets), tuple(tensor.shape))

    def _save(self, tensor: torch.Tensor) -> int:
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            # torch.save writes the whole storage. In this format it is the chunk and nothing else.
            tensor = tensor.clone()
        try:
            with open(self._fd, "wb", closefd=False) as file:
                file.seek(self._end)
                torch.save(tensor, file)
                return file.tell() - self._end
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # closing its archive, torch fails again
                raise error.__context__ from None
            raise

    def add_object(self, key: str, data: bytes) -> None:
        """Append an object, as the bytes that torch.save makes of it."""
        write(self._fd, self._end, data)
        self._record(len(data), key, (), None, (), ())

    def _record(self, length: int, *fields: Any) -> None:
        self.records.append(Record._make([*fields, self.path.name, self._end, length]))
        self._end += length


def write_metadata(folder: str | Path, records: Iterable[Record]) -> None:
    """Write `.metadata`, `common.pt` and `metadata.json`: with them the folder can be read.

    The bytes depend on the records alone, not on their order.
    """
    common = io.BytesIO()
    torch.save({"content_metadata": CONTENT_METADATA}, common)
    for name, data in (
        (COMMON_FILE, common.getvalue()),
        (BACKEND_FILE, json.dumps(BACKEND).encode()),
        (METADATA_FILE, pickle.dumps(_metadata(records), protocol=4)),
    ):
        with file_aside(Path(folder) / name) as fd:
            write(fd, 0, data)


def _metadata(records: Iterable[Record]) -> Any:
    # They import torch's compiler: not for a process that writes tensors alone.
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    once: dict[str, str] = {}  # pickle writes equal strings again unless they are one object
    for record in sorted(records, key=lambda record: (record.key, tuple(record.offsets))):
        key = once.setdefault(record.key, record.key)
        file = once.setdefault(record.file, record.file)
        if record.dtype is None:
            entries[key], index = BytesStorageMetadata(), MetadataIndex(key)
        else:
            properties = TensorProperties(getattr(torch, record.dtype))
            new = TensorStorageMetadata(properties, torch.Size(record.shape), [])
            entry: Any = entries.setdefault(key, new)
            chunk = ChunkStorageMetadata(torch.Size(record.offsets), torch.Size(record.sizes))
            entry.chunks.append(chunk)
            index = MetadataIndex(key, chunk.offsets)
        if index in places:
            raise ValueError(f"two records of {key} at offsets {record.offsets}")
        places[index] = _StorageInfo(file, record.offset, record.length)
    return Metadata(entries, storage_data=places, version=CURRENT_DCP_VERSION)
