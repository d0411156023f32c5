"""Items of distributed checkpoints (Megatron's torch_dist), read by boxes and written one by one.

It needs neither Megatron nor ranks. torch's FileSystemWriter keeps every tensor of a file until the
file is closed (torch/distributed/checkpoint/filesystem.py, `tensor_dict`); here one tensor is in
memory at a time.

An item is what torch.save writes: a zip archive with the tensor's bytes in it. torch.save computes
its CRC32 far more slowly than ISA-L, and reading through zipfile and torch.load takes half a
millisecond, much for a small expert. The bytes around those of the tensor follow from dtype, shape
and CRC32 alone. So they are built once per shape, written as they are, and compared when an item is
read; an archive that differs is read by torch.

The format: APPNOTE.TXT of PKWARE, sections 4.3.7 and 4.3.12 (nothing compressed, no ZIP64), and
torch/serialization.py, `_save`: data.pkl, byteorder and version, data/0 at a multiple of 64 bytes.
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
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Self, cast

import numpy as np
import torch
from isal import isal_zlib

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
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ALIGNMENT = 64  # of the tensor's bytes
_MAX_BYTES = 1 << 31  # larger archives would need ZIP64
_DATE = 33  # 1 January 1980
_CRC_OFFSET, _CENTRAL_CRC_OFFSET = 14, 16  # in a local header, and in a central directory entry


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
                if read_item(item.file, chunk.offset, chunk.nbytes, out):
                    return
                tensor = _load_tensor_item(item)
            actual, expected = (tuple(tensor.shape), tensor.dtype), (chunk.sizes, out.dtype)
            if actual != expected:
                raise ValueError(f"it is {actual}, and {expected} in .metadata")
            out.copy_(tensor)
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


def _load_tensor_item(item: _FileSlice) -> torch.Tensor:
    """Load a tensor that torch.save wrote, and compare its checksums, which torch does not.

    Its bytes are read once, into the tensor's memory.
    """
    archive = _open_archive(item)
    data = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    if len(data) != 1:
        raise ValueError(f"it has the bytes of {len(data)} tensors")
    for entry in archive.infolist():
        if entry is not data[0]:
            archive.read(entry)  # compares the checksum
    tensor = _unpickle(archive, item)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"it is a {type(tensor).__name__}, not a tensor")
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    if isal_zlib.crc32(storage.numpy().data) != data[0].CRC:
        raise ValueError("its checksum differs")
    return tensor.detach()


def _load_object(item: _FileSlice) -> Any:
    archive = _open_archive(item)
    if (bad := archive.testzip()) is not None:
        raise ValueError(f"the checksum of {bad} differs")
    value = _unpickle(archive, item)
    check_nesting(value)
    return value


def _open_archive(item: _FileSlice) -> zipfile.ZipFile:
    """Open an archive; raise ValueError if an entry is compressed, and could grow when read."""
    archive = zipfile.ZipFile(cast(IO[bytes], item))
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
        raise ValueError("it is compressed, which torch.save does not do")
    return archive


def _unpickle(archive: zipfile.ZipFile, item: _FileSlice) -> Any:
    pickles = [e for e in archive.infolist() if e.filename.lower().endswith("data.pkl")]
    if len(pickles) != 1 or min(entry.header_offset for entry in archive.infolist()):
        raise ValueError("it is not a single archive of torch.save")
    check_pickle(archive.read(pickles[0]))
    item.seek(0)
    file = cast(IO[bytes], item)  # it has the methods that torch uses
    return torch.load(file, map_location="cpu", weights_only=True)


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
        if is_framed(tensor.dtype, tensor.nbytes):
            length = write_item(self._fd, self._end, tensor)
        else:
            length = self._save(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._record(length, key, tuple(shape), dtype, tuple(offsets), tuple(tensor.shape))

    def _save(self, tensor: torch.Tensor) -> int:
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            # torch.save writes the storage, which must contain the chunk and nothing else.
            tensor = tensor.clone()
        try:
            with open(self._fd, "wb", closefd=False) as file:
                file.seek(self._end)
                torch.save(tensor, file)
                return file.tell() - self._end
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch fails again when it closes the file
                raise error.__context__ from None
            raise

    def add_object(self, key: str, data: bytes) -> None:
        """Append an object, serialized by torch.save."""
        write_at(self._fd, self._end, data)
        self._record(len(data), key, (), None, (), ())

    def _record(self, length: int, *fields: Any) -> None:
        self.records.append(Record._make([*fields, self.path.name, self._end, length]))
        self._end += length


class _Pickler(pickle.Pickler):
    """Pickles a tensor as torch.save does, with a reference to data/0 for its storage."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            kind = getattr(torch, obj._pickle_storage_type())
            return ("storage", kind, "0", "cpu", obj._size())
        return None


def is_framed(dtype: torch.dtype, nbytes: int) -> bool:
    """Return whether a tensor is written by write_item and read by read_item, without torch."""
    return dtype in _DTYPES and 0 < nbytes < _MAX_BYTES and sys.byteorder == "little"


@lru_cache(maxsize=1024)
def _build_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes, int, int]:
    """Return the bytes before and after a tensor's, and the offsets of its CRC32 in each."""
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(torch.empty(shape, dtype=dtype))
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    before, behind = b"", b""
    small = {"data.pkl": pickled.getvalue(), "byteorder": b"little", "version": b"3\n"}
    for name, data in small.items():
        local, central = _build_zip_entry(name, isal_zlib.crc32(data), len(data), len(before))
        before, behind = before + local + data, behind + central
    extra = -(len(before) + len(_build_zip_entry("data/0", 0, nbytes, 0)[0])) % _ALIGNMENT
    extra += _ALIGNMENT if 0 < extra < 4 else 0  # an extra field has a header of 4 bytes
    local, central = _build_zip_entry("data/0", 0, nbytes, len(before), extra)
    crc_before, crc_behind = len(before) + _CRC_OFFSET, len(behind) + _CENTRAL_CRC_OFFSET
    before, behind = before + local, behind + central
    sizes = struct.pack("<4H2IH", 0, 0, 4, 4, len(behind), len(before) + nbytes, 0)
    return before, behind + b"PK\5\6" + sizes, crc_before, crc_behind


def _build_zip_entry(
    name: str, crc32: int, size: int, place: int, extra: int = 0
) -> tuple[bytes, bytes]:
    """Return the local header of a file in the archive, and its central directory entry."""
    path = f"archive/{name}".encode()
    common = struct.pack("<5H3IH", 0, 0, 0, 0, _DATE, crc32, size, size, len(path))
    padding = b"FB" + (extra - 4).to_bytes(2, "little") + b"Z" * (extra - 4) if extra else b""
    local = b"PK\3\4" + common + extra.to_bytes(2, "little") + path + padding
    central = b"PK\1\2\0\0" + common + struct.pack("<4H2I", 0, 0, 0, 0, 0, place) + path
    return local, central


def _insert_checksum(out: torch.Tensor, crc32: int) -> tuple[bytes, bytes]:
    before, behind, crc_before, crc_behind = _build_frame(out.dtype, tuple(out.shape))
    crc = crc32.to_bytes(4, "little")
    return (
        before[:crc_before] + crc + before[crc_before + 4 :],
        behind[:crc_behind] + crc + behind[crc_behind + 4 :],
    )


def write_item(file: int, offset: int, tensor: torch.Tensor) -> int:
    """Write a contiguous CPU tensor; return the length of the item."""
    start = offset + len(_build_frame(tensor.dtype, tuple(tensor.shape))[0])
    before, behind = _insert_checksum(tensor, files.write_at(file, start, files.view_bytes(tensor)))
    files.write_at(file, offset, before)
    files.write_at(file, start + tensor.nbytes, behind)
    return len(before) + tensor.nbytes + len(behind)


def read_item(file: int, offset: int, nbytes: int, out: torch.Tensor) -> bool:
    """Read an item into `out`, which is contiguous and has the item's dtype and shape.

    Returns:
        False if the item has another form than that of write_item; then `out` is unchanged.

    Raises:
        EOFError: The file is truncated.
        ValueError: The checksum differs.
    """
    if not is_framed(out.dtype, out.nbytes):
        return False
    before, behind, crc_before, _ = _build_frame(out.dtype, tuple(out.shape))
    if nbytes != len(before) + out.nbytes + len(behind):
        return False
    start = os.pread(file, len(before), offset)
    end = os.pread(file, len(behind), offset + nbytes - len(behind))
    crc32 = int.from_bytes(start[crc_before : crc_before + 4], "little")
    if (start, end) != _insert_checksum(out, crc32):
        return False
    if files.read_at(file, offset + len(before), files.view_bytes(out)) != crc32:
        raise ValueError("its checksum differs")
    return True
