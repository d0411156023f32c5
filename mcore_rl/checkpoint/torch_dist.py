"""Distributed checkpoints (Megatron's torch_dist) read by boxes, without Megatron or ranks."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from isal import isal_zlib

from mcore_rl.checkpoint import raw_file, torch_item
from mcore_rl.checkpoint.torch_dist_metadata import DistItem, DistTensor, read_metadata
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.boxes import Box

COMMON_FILE = "common.pt"
# What zipfile and torch.load end with on damaged bytes.
_DAMAGE = (
    AssertionError, AttributeError, EOFError, LookupError, OSError, OverflowError, RuntimeError,
    TypeError, ValueError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile,
)  # fmt: skip


class DistReader:
    """The tensors of a checkpoint folder; shapes and places come from its metadata alone.

    Raises:
        ConfigError: the folder is no such checkpoint, is damaged or incomplete.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        tensors, objects = read_metadata(self.path)
        self.tensors: Mapping[str, DistTensor] = tensors
        self.objects: Mapping[str, DistItem] = objects
        self._bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # starts and ends of chunks

    def read(self, key: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """The elements of a box, in `out` or as a new tensor of the box's sizes.

        Every item that the box meets is read and checked whole. In memory are the result and one
        item, or the result alone where items are adjacent rows of it.

        Raises:
            ConfigError: an item is damaged, or is not of the shape and dtype in the metadata.
        """
        tensor = self.tensors[key]
        low = np.array(box.offsets, dtype=np.int64)
        high = low + np.array(box.sizes, dtype=np.int64)
        if (high > tensor.shape).any():
            raise ValueError(f"{box} is not inside {key}, which has shape {tensor.shape}")
        if out is None:
            out = torch.empty(box.sizes, dtype=tensor.dtype)
        if key not in self._bounds:  # a tensor of stacked experts has thousands of chunks
            starts = np.array([chunk.offsets for chunk in tensor.chunks], dtype=np.int64)
            sizes = np.array([chunk.sizes for chunk in tensor.chunks], dtype=np.int64)
            self._bounds[key] = starts, starts + sizes
        starts, ends = self._bounds[key]
        for index in np.flatnonzero(((starts < high) & (ends > low)).all(axis=1)):
            first, last = np.maximum(starts[index], low), np.minimum(ends[index], high)
            part = out[_slices(first - low, last - low)]
            chunk = tensor.chunks[index]
            if tuple(part.shape) == chunk.sizes and part.is_contiguous():
                self._read_chunk(key, chunk, part)
            else:
                item = torch.empty(chunk.sizes, dtype=tensor.dtype)
                self._read_chunk(key, chunk, item)
                part.copy_(item[_slices(first - starts[index], last - starts[index])])
                del item  # before the next one is read
        return out

    def load_object(self, key: str) -> Any:
        """Load an object with torch's unpickler of plain data, which runs no code of the file.

        Raises:
            ConfigError: it is damaged, or names what plain data does not have.
        """
        place = self.objects[key]
        try:
            with _Part(self.path / place.file, place.offset, place.nbytes) as item:
                return _load_object(item)
        except _DAMAGE as error:
            raise self._damaged(place.file, key, error) from error

    def load_common(self) -> Any:
        """Load common.pt in the same way; None without it, as newer Megatron-core writes folders.

        Raises:
            ConfigError: as `load_object` does.
        """
        path = self.path / COMMON_FILE
        if not path.exists():
            return None
        try:
            with _Part(path, 0, path.stat().st_size) as item:
                return _load_object(item)
        except _DAMAGE as error:
            raise ConfigError(f"{path} is damaged or not safe to load: {_line(error)}") from error

    def _read_chunk(self, key: str, chunk: DistItem, out: torch.Tensor) -> None:
        """Fill `out`, contiguous, with a whole chunk."""
        try:
            with _Part(self.path / chunk.file, chunk.offset, chunk.nbytes) as item:
                if torch_item.read_item(item.file, chunk.offset, chunk.nbytes, out):
                    return
                tensor = _loaded_tensor(item)
            found = tuple(tensor.shape), tensor.dtype
            if found != (chunk.sizes, out.dtype):
                raise ValueError(f"it is {found}, and {(chunk.sizes, out.dtype)} in .metadata")
            out.copy_(tensor)
        except _DAMAGE as error:
            raise self._damaged(chunk.file, key, error) from error

    def _damaged(self, file: str, key: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.path / file}: {key} is damaged or not safe to load: {_line(error)}"
        )


class _Part(io.RawIOBase):
    """A part of a file as a file.

    torch reads a tensor's bytes through `readinto` straight into the tensor's memory.
    """

    file = -1

    def __init__(self, path: Path, offset: int, nbytes: int) -> None:
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._offset, self._nbytes, self._at = offset, nbytes, 0

    def close(self) -> None:
        if not self.closed and self.file >= 0:
            os.close(self.file)
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._nbytes)[whence]
        if self._at < 0:
            raise OSError("a place before the item")
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self._nbytes - self._at, 0)]
        raw_file.read(self.file, self._offset + self._at, view, summed=False)
        self._at += len(view)
        return len(view)


def _loaded_tensor(item: _Part) -> torch.Tensor:
    """The tensor that torch.save wrote, with its checksums compared, which torch does not do.

    Its bytes are read once, into its memory, and summed there.
    """
    archive = _archive(item)
    data = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    if len(data) != 1:
        raise ValueError(f"it has the bytes of {len(data)} tensors")
    for entry in archive.infolist():
        if entry is not data[0]:
            archive.read(entry)  # compares the checksum
    tensor = _unpickled(item)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"it is a {type(tensor).__name__}, not a tensor")
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    if isal_zlib.crc32(storage.numpy().data) != data[0].CRC:
        raise ValueError("its checksum differs")
    return tensor.detach()


def _load_object(item: _Part) -> Any:
    if (bad := _archive(item).testzip()) is not None:
        raise ValueError(f"the checksum of {bad} differs")
    return _unpickled(item)


def _archive(item: _Part) -> zipfile.ZipFile:
    """An archive whose entries are not compressed: none can grow when it is read."""
    archive = zipfile.ZipFile(cast(IO[bytes], item))
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
        raise ValueError("it is compressed, which torch.save does not do")
    return archive


def _unpickled(item: _Part) -> Any:
    item.seek(0)
    file = cast(IO[bytes], item)  # all of it that torch uses
    return torch.load(file, map_location="cpu", weights_only=True)


def _slices(starts: np.ndarray, ends: np.ndarray) -> tuple[slice, ...]:
    return tuple(map(slice, starts.tolist(), ends.tolist()))


def _line(error: Exception) -> str:
    """One line of an error. torch goes on with advice to load unsafely, zipfile with raw bytes."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, pickle.UnpicklingError):
        if name := re.search(r"GLOBAL (\S+)", text):
            return f"it names {name[1]}, which is not allowed"
        text = text.rpartition("WeightsUnpickler error: ")[2].strip()
    return text.splitlines()[0][:200]
