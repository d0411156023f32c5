"""Distributed checkpoints (Megatron's torch_dist) read by boxes, without Megatron or ranks."""

from __future__ import annotations

import errno
import io
import operator
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from isal import isal_zlib

from mcore_rl.checkpoint import torch_item
from mcore_rl.checkpoint.torch_dist_metadata import (
    DistChunk,
    DistObject,
    DistTensor,
    read_metadata,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.boxes import Box

COMMON_FILE = "common.pt"
# What zipfile and torch.load end with on damaged bytes.
_DAMAGE = (
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
)


class DistReader:
    """The tensors of a checkpoint folder; shapes and places come from its metadata alone.

    Raises:
        ConfigError: the folder is no such checkpoint, is damaged or incomplete.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        tensors, objects = read_metadata(self.path)
        self.tensors: Mapping[str, DistTensor] = tensors
        self.objects: Mapping[str, DistObject] = objects
        self._bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # starts and ends of chunks

    def read(self, key: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """The elements of a box, in `out` or as a new tensor of the box's sizes.

        Every item that the box meets is read and checked whole. In memory are the result and one
        item, or the result alone where items are adjacent rows of it.

        Raises:
            ConfigError: an item is damaged, or is not of the shape and dtype in the metadata.
        """
        tensor = self.tensors[key]
        if any(
            o + n > size for o, n, size in zip(box.offsets, box.sizes, tensor.shape, strict=True)
        ):
            raise ValueError(f"{box} is not inside {key}, which has shape {tensor.shape}")
        if out is None:
            out = torch.empty(box.sizes, dtype=tensor.dtype)
        for chunk in self._meeting(key, box):
            shared = _intersection(box, chunk)
            part = out[_within(shared, box.offsets)]
            if shared.sizes == chunk.sizes and part.is_contiguous():
                self._chunk_into(key, chunk, part)
            else:
                item = torch.empty(chunk.sizes, dtype=tensor.dtype)
                self._chunk_into(key, chunk, item)
                part.copy_(item[_within(shared, chunk.offsets)])
                del item  # before the next one is read
        return out

    def _meeting(self, key: str, box: Box) -> list[DistChunk]:
        """The chunks that share elements with a box. A tensor of stacked experts has thousands."""
        chunks = self.tensors[key].chunks
        if key not in self._bounds:
            starts = np.array([chunk.offsets for chunk in chunks])
            self._bounds[key] = starts, starts + np.array([chunk.sizes for chunk in chunks])
        starts, ends = self._bounds[key]
        low = np.array(box.offsets)
        met = ((starts < low + box.sizes) & (ends > low)).all(axis=1)
        return [chunks[index] for index in np.flatnonzero(met)]

    def check_object(self, key: str) -> None:
        """Raise ConfigError unless an object is whole and can be loaded without running its code.

        torch loads objects with weights_only=False (default_planner.py, `load_bytes`).
        """
        place = self.objects[key]
        try:
            with _opened(self.path / place.file, place.offset, place.nbytes) as item:
                _check_loadable(item)
        except _DAMAGE as error:
            raise self._damaged(place.file, key, error) from error

    def check_common(self) -> None:
        """The same for common.pt, which newer versions of Megatron-core do without."""
        path = self.path / COMMON_FILE
        if not path.exists():
            return
        try:
            with _opened(path, 0, path.stat().st_size) as item:
                _check_loadable(item)
        except _DAMAGE as error:
            raise ConfigError(f"{path} is damaged or not safe to load: {_line(error)}") from error

    def _chunk_into(self, key: str, chunk: DistChunk, out: torch.Tensor) -> None:
        """Fill `out`, contiguous, with a whole chunk."""
        try:
            with _opened(self.path / chunk.file, chunk.offset, chunk.nbytes) as item:
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


class _Item(io.RawIOBase):
    """A part of a file as a file. Reads fill what they are given, however large.

    torch reads a tensor's bytes through `readinto` straight into the tensor's memory.
    """

    def __init__(self, file: int, offset: int, nbytes: int) -> None:
        self.file, self._offset, self._nbytes, self._at = file, offset, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(self._nbytes - self._at, 0)]
        done = 0
        while done < len(view):  # the kernel reads 2 GiB at most
            count = os.preadv(self.file, [view[done:]], self._offset + self._at)
            if count == 0:
                raise EOFError("the file is cut short")
            done += count
            self._at += count
        return done


@contextmanager
def _opened(path: Path, offset: int, nbytes: int) -> Iterator[_Item]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _Item(file, offset, nbytes)
    finally:
        os.close(file)


def _loaded_tensor(item: _Item) -> torch.Tensor:
    """The tensor that torch.save wrote, with its checksums compared, which torch does not do.

    Its bytes are read once, into its memory, and summed there.
    """
    archive = zipfile.ZipFile(item)
    data = [entry for entry in _stored(archive) if "/data/" in entry.filename]
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


def _check_loadable(item: _Item) -> None:
    archive = zipfile.ZipFile(item)
    _stored(archive)
    if (bad := archive.testzip()) is not None:
        raise ValueError(f"the checksum of {bad} differs")
    _unpickled(item)


def _unpickled(item: _Item) -> Any:
    item.seek(0)
    file = cast(IO[bytes], item)  # all of it that torch uses
    return torch.load(file, map_location="cpu", weights_only=True)


def _stored(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The entries of an archive, none of which is compressed: none can grow when it is read."""
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed, which torch.save does not do")
    return entries


def _intersection(box: Box, chunk: DistChunk) -> Box:
    """The part of a box, of the whole tensor, that a chunk holds; there is one."""
    starts = tuple(map(max, box.offsets, chunk.offsets))
    ends = map(min, _ends(box), _ends(chunk))
    return Box(starts, tuple(map(operator.sub, ends, starts)))


def _ends(box: Box | DistChunk) -> Iterator[int]:
    return map(operator.add, box.offsets, box.sizes)


def _within(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Where a box stands in a tensor that starts at `origin`."""
    return Box(tuple(map(operator.sub, box.offsets, origin)), box.sizes).slices


def _line(error: Exception) -> str:
    """One line of an error. torch goes on with advice to load unsafely, zipfile with raw bytes."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, pickle.UnpicklingError):
        if name := re.search(r"GLOBAL (\S+)", text):
            return f"it names {name[1]}, which is not allowed"
        text = text.rpartition("WeightsUnpickler error: ")[2].strip()
    return text.splitlines()[0][:200]
