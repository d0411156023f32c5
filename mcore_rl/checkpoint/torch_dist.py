"""Items of distributed checkpoints (Megatron's torch_dist), read by boxes and written one by one.

It needs neither Megatron nor ranks. torch's FileSystemWriter keeps every tensor of a file until the
file is closed (torch/distributed/checkpoint/filesystem.py, `tensor_dict`); here one tensor is in
memory at a time.

An item is what torch.save writes: a zip archive with the tensor's bytes in it. torch.load compares
no checksums, so it only says how the tensor lies in these bytes; zipfile reads and verifies them.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, cast

import numpy as np
import torch

from mcore_rl.checkpoint import files
from mcore_rl.checkpoint.files import open_atomic, write_at
from mcore_rl.checkpoint.pickle_limits import check_nesting, check_pickle
from mcore_rl.checkpoint.torch_dist_metadata import (
    COMMON_KEY,
    LEGACY_COMMON_FILE,
    DistItem,
    DistTensor,
    Record,
    read_metadata,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.regular_file import open_regular_fd
from mcore_rl.reshard.rules import Box

# Exceptions of zipfile and torch.load for damaged bytes.
_DAMAGE = (
    AssertionError, AttributeError, EOFError, LookupError, OSError, OverflowError, RuntimeError,
    TypeError, ValueError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile,
)  # fmt: skip
_ORDER = sys.byteorder.encode()
_READ_BYTES = 1 << 20  # bytes per read: zipfile copies them while they are in the cache


class DistReader:
    """The tensors and objects of a checkpoint folder, by its metadata.

    Raises:
        ConfigError: The folder is no such checkpoint, is damaged or incomplete.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        tensors, objects = read_metadata(self.path)
        self._common = objects.pop(COMMON_KEY, None)
        self.tensors: Mapping[str, DistTensor] = tensors
        self.objects: Mapping[str, DistItem] = objects
        self._bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # starts and ends of chunks

    def read(self, key: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a box into `out` or a new tensor.

        Every item that overlaps the box is read completely and verified. The result and one item
        are in memory, or the result alone if items are contiguous in it.

        Raises:
            ConfigError: An item is damaged, or has another shape or dtype than in the metadata.
        """
        tensor = self.tensors[key]
        low = np.array(box.offsets, dtype=np.int64)
        high = low + np.array(box.sizes, dtype=np.int64)
        if (high > tensor.shape).any():
            raise ValueError(f"{box} is not inside {key}, which has shape {tensor.shape}")
        if out is None:
            out = torch.empty(box.sizes, dtype=tensor.dtype)
        if key not in self._bounds:  # a tensor of stacked experts can have thousands of chunks
            starts = np.array([chunk.offsets for chunk in tensor.chunks], dtype=np.int64)
            sizes = np.array([chunk.sizes for chunk in tensor.chunks], dtype=np.int64)
            self._bounds[key] = starts, starts + sizes
        starts, ends = self._bounds[key]
        for index in np.flatnonzero(((starts < high) & (ends > low)).all(axis=1)):
            first, last = np.maximum(starts[index], low), np.minimum(ends[index], high)
            part = out[_build_slices(first - low, last - low)]
            chunk = tensor.chunks[index]
            if tuple(part.shape) == chunk.sizes and part.is_contiguous():
                self._read_chunk(key, chunk, part)
            else:
                item = torch.empty(chunk.sizes, dtype=tensor.dtype)
                self._read_chunk(key, chunk, item)
                part.copy_(item[_build_slices(first - starts[index], last - starts[index])])
                del item  # before the next one is read
        return out

    def load_object(self, key: str) -> Any:
        """Load an object with weights_only, which runs no code of the file.

        Raises:
            ConfigError: It is damaged, or needs other classes than plain data.
        """
        return self._load_object(key, self.objects[key])

    def load_common(self) -> dict[str, Any]:
        """Load the common state as `load_object` does: what is neither tensors nor objects.

        Megatron-core 0.19 stores it as an object, older ones in common.pt.

        Raises:
            ConfigError: As `load_object`; or the checkpoint has none, or it is no dict.
        """
        path = self.path / LEGACY_COMMON_FILE
        if path.exists():
            location = DistItem(path.name, 0, path.stat().st_size)
            contents = self._load_object("the common state", location)
        elif self._common is not None:
            path = self.path / self._common.file
            contents = self._load_object(COMMON_KEY, self._common)
            contents = contents[0] if isinstance(contents, list) and contents else None
        else:
            raise ConfigError(
                f"{self.path} has neither {COMMON_KEY} nor {path.name}; allowed: what Megatron "
                "writes"
            )
        if not isinstance(contents, dict):
            raise ConfigError(f"{path}: the common state is no dict; allowed: what Megatron writes")
        return contents

    def _load_object(self, key: str, location: DistItem) -> Any:
        try:
            with _FileSlice(self.path / location.file, location.offset, location.nbytes) as item:
                return _load_object(item)
        except _DAMAGE as error:
            raise self._build_error(location.file, key, error) from error

    def _read_chunk(self, key: str, chunk: DistItem, out: torch.Tensor) -> None:
        """Read a chunk into `out`, which is contiguous."""
        try:
            with _FileSlice(self.path / chunk.file, chunk.offset, chunk.nbytes) as item:
                _load_tensor(item, out)
        except _DAMAGE as error:
            raise self._build_error(chunk.file, key, error) from error

    def _build_error(self, file: str, key: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.path / file}: {key} is damaged or not safe to load: {_summarize_error(error)}"
        )


class _FileSlice(io.RawIOBase):
    """A slice of a file as a file. torch reads by `readinto`, directly into a tensor's memory."""

    file = -1

    def __init__(self, path: Path, offset: int, nbytes: int) -> None:
        self.file = open_regular_fd(path)
        self._offset, self._nbytes, self._position = offset, nbytes, 0

    def close(self) -> None:
        if not self.closed and self.file >= 0:
            os.close(self.file)
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._nbytes)[whence]
        if self._position < 0:
            raise OSError("a position before the item")
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self._nbytes - self._position, 0)]
        files.read_at(self.file, self._offset + self._position, view, with_crc32=False)
        self._position += len(view)
        return len(view)


def _load_tensor(item: _FileSlice, out: torch.Tensor) -> None:
    """Load a tensor that torch.save wrote into `out`, which is contiguous.

    Raises:
        ValueError: It has another shape or dtype than `out`, or bytes of more than one tensor.
        zipfile.BadZipFile: A checksum differs.
    """
    archive = _open_archive(item)
    data = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    if len(data) != 1:
        raise ValueError(f"it has the bytes of {len(data)} tensors")
    attributes = [(e.filename, archive.read(e)) for e in archive.infolist() if e is not data[0]]
    if any(name.endswith("/byteorder") and content != _ORDER for name, content in attributes):
        raise ValueError(f"its bytes are not in {sys.byteorder} endian order")
    tensor = _unpickle(archive, item, "meta")
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"it is a {type(tensor).__name__}, not a tensor")
    actual, expected = (tuple(tensor.shape), tensor.dtype), (tuple(out.shape), out.dtype)
    if actual != expected:
        raise ValueError(f"it is {actual}, and {expected} in .metadata")
    nbytes, target = tensor.untyped_storage().nbytes(), out
    if nbytes != data[0].file_size:
        raise ValueError(f"it has {data[0].file_size} bytes instead of {nbytes}")
    if nbytes != out.nbytes or not tensor.is_contiguous():  # a view of a storage
        target = torch.empty(nbytes, dtype=torch.uint8)
    memory, done = files.view_bytes(target), 0
    # It compares the checksum when it reads the last bytes.
    with cast(io.BufferedIOBase, archive.open(data[0])) as file:
        while done < nbytes:
            done += file.readinto(memory[done : done + _READ_BYTES])
    if target is not out:
        view = out.new_empty(0).set_(
            target.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        out.copy_(view)


def _load_object(item: _FileSlice) -> Any:
    archive = _open_archive(item)
    if (bad := archive.testzip()) is not None:
        raise ValueError(f"the checksum of {bad} differs")
    value = _unpickle(archive, item, "cpu")
    check_nesting(value)
    return value


def _open_archive(item: _FileSlice) -> zipfile.ZipFile:
    """Open an archive; raise ValueError if an entry is compressed, and could grow when read."""
    archive = zipfile.ZipFile(cast(IO[bytes], item))
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError("it is compressed, which torch.save does not do")
    return archive


def _unpickle(archive: zipfile.ZipFile, item: _FileSlice, device: str) -> Any:
    pickles = [e for e in archive.infolist() if e.filename.lower().endswith("data.pkl")]
    if len(pickles) != 1 or min(entry.header_offset for entry in archive.infolist()):
        raise ValueError("it is not a single archive of torch.save")
    check_pickle(archive.read(pickles[0]))
    item.seek(0)
    file = cast(IO[bytes], item)  # it has the methods that torch uses
    return torch.load(file, map_location=device, weights_only=True)


def _build_slices(starts: np.ndarray, ends: np.ndarray) -> tuple[slice, ...]:
    return tuple(map(slice, starts.tolist(), ends.tolist()))


def _summarize_error(error: Exception) -> str:
    """Return one line of an error, without torch's advice to load unsafely or zipfile's bytes."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, pickle.UnpicklingError):
        if name := re.search(r"GLOBAL (\S+)", text):
            return f"it names {name[1]}, which is not allowed"
        text = text.rpartition("WeightsUnpickler error: ")[2].strip()
    return text.splitlines()[0][:200]


class DistFile:
    """A new `.distcp` file, published when the context exits without an error.

    Attributes:
        records: Its items.

    Args:
        reserved_bytes: Bytes to allocate first, see files.open_atomic.
    """

    def __init__(self, path: str | Path, reserved_bytes: int = 0) -> None:
        self.path = Path(path)
        self.records: list[Record] = []
        self._partial_path, self._end = open_atomic(self.path, reserved_bytes), 0

    def __enter__(self) -> Self:
        self._fd = self._partial_path.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            os.ftruncate(self._fd, self._end)
        self._partial_path.__exit__(kind, *error)

    def add_tensor(
        self, key: str, shape: Sequence[int], offsets: Sequence[int], tensor: torch.Tensor
    ) -> None:
        """Append the chunk at `offsets` of a tensor of `shape`.

        Raises:
            OSError: It cannot be written, as on a full disk.
        """
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            # torch.save writes the storage, which must contain the chunk and nothing else.
            tensor = tensor.clone()
        dtype = str(tensor.dtype).removeprefix("torch.")
        try:
            with open(self._fd, "wb", closefd=False) as file:
                file.seek(self._end)
                torch.save(tensor, file)
                length = file.tell() - self._end
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch fails again when it closes the file
                raise error.__context__ from None
            raise
        self._record(length, key, tuple(shape), dtype, tuple(offsets), tuple(tensor.shape))

    def add_object(self, key: str, data: bytes) -> None:
        """Append an object, serialized by torch.save."""
        write_at(self._fd, self._end, data)
        self._record(len(data), key, (), None, (), ())

    def _record(self, length: int, *fields: Any) -> None:
        self.records.append(Record._make([*fields, self.path.name, self._end, length]))
        self._end += length
