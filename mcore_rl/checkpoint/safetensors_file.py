"""One safetensors file: its tensors as the library lists them, read by position.

Reading by position and not by the library's map of the file keeps what is read out of the memory
of the process: pages of a map count as its memory while the map exists.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mcore_rl.checkpoint import raw_file
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import parse_json_object
from mcore_rl.reshard.boxes import Box

CRC32_KEY = "mcore_rl.crc32"  # of a file's __metadata__: JSON of 8 hex digits by name
LENGTH_BYTES = 8  # of the length of the header, with which a file begins
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
_ROWS_BYTES = 16 << 20  # of whole rows in memory, of which a box needs some columns


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file. `offset` is that of its first byte, from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """The tensors of one file by name. Keeps no file open: any thread or process may read.

    Raises:
        ConfigError: the file cannot be read, is no safetensors file, or has other dtypes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entries: dict[str, Entry] = {}
        self.crc32s: dict[str, int] = {}  # of what mcore_rl wrote
        try:
            with safe_open(self.path, framework="numpy") as file, self.path.open("rb") as plain:
                self._identity = _identity(plain.fileno())
                offset = LENGTH_BYTES + int.from_bytes(plain.read(LENGTH_BYTES), "little")
                for name in file.offset_keys():  # the library refuses files with gaps
                    self.entries[name] = entry = self._entry(name, file.get_slice(name), offset)
                    offset += entry.nbytes
                metadata = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            quoted = "".join(c if c.isprintable() else " " for c in str(error)[:300])
            raise ConfigError(f"{self.path} cannot be read as safetensors: {quoted}") from error
        if CRC32_KEY in metadata:
            spelled = parse_json_object(metadata[CRC32_KEY].encode(), f"{self.path}: {CRC32_KEY}")
            if spelled.keys() != self.entries.keys():
                raise ConfigError(f"{self.path}: {CRC32_KEY} names other tensors than the header")
            for name, digits in spelled.items():
                if not isinstance(digits, str) or not re.fullmatch("[0-9a-f]{8}", digits):
                    raise ConfigError(
                        f"{self.path}: {CRC32_KEY} of tensor {name} is {digits!r}, not a CRC32"
                    )
                self.crc32s[name] = int(digits, 16)

    def _entry(self, name: str, found: Any, offset: int) -> Entry:
        if not name.isprintable():
            raise ConfigError(f"{self.path}: {name!r} is not the name of a tensor")
        dtype, shape = DTYPES.get(found.get_dtype()), tuple(found.get_shape())
        if dtype is None:
            raise ConfigError(
                f"{self.path}: tensor {name} has dtype {found.get_dtype()}, which is not "
                f"supported; allowed: {', '.join(DTYPES)}"
            )
        return Entry(dtype, shape, offset, math.prod(shape) * dtype.itemsize)

    def read_into(self, name: str, box: Box | None, out: torch.Tensor) -> None:
        """Fill `out` with a box of a tensor (None: all of it); it has the box's shape.

        A whole tensor is compared with its checksum. Whole rows go straight into the memory of an
        `out` in one piece; for columns, up to 16 MiB of rows are in memory besides.

        Raises:
            ConfigError: the tensor is damaged, or the file has changed since it was opened.
        """
        entry = self.entries[name]
        sizes = entry.shape if box is None else box.sizes
        if out.dtype != entry.dtype or tuple(out.shape) != sizes:
            raise ValueError(f"{name}: {entry.dtype} {sizes} do not fit {out.dtype} {out.shape}")
        if not entry.nbytes:
            return
        try:
            with self.path.open("rb", buffering=0) as file:
                if _identity(file.fileno()) != self._identity:
                    raise ConfigError(f"{self.path} has changed since its header was read")
                if box is None or sizes == entry.shape:
                    self._read_whole(file.fileno(), name, entry, out)
                else:
                    _read_box(file.fileno(), entry.offset, entry.shape, box, out)
        except EOFError as error:
            raise ConfigError(f"{self.path} cannot be read: {error}") from error
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from error

    def _read_whole(self, fd: int, name: str, entry: Entry, out: torch.Tensor) -> None:
        tensor = out if out.is_contiguous() else torch.empty(entry.shape, dtype=entry.dtype)
        expected = self.crc32s.get(name)
        memory = raw_file.bytes_of(tensor)
        crc32 = raw_file.read(fd, entry.offset, memory, summed=expected is not None)
        if expected is not None and crc32 != expected:
            raise ConfigError(
                f"tensor {name} of {self.path} is damaged: its checksum is {crc32:08x} instead of "
                f"{expected:08x}"
            )
        if tensor is not out:
            out.copy_(tensor)


def _read_box(fd: int, offset: int, shape: tuple[int, ...], box: Box, out: torch.Tensor) -> None:
    """A box of the tensor of `shape` whose first byte is at `offset`."""
    row_bytes = out.element_size() * math.prod(shape[1:])
    offset += box.offsets[0] * row_bytes
    if box.sizes[1:] == shape[1:] and out.is_contiguous():
        raw_file.read(fd, offset, raw_file.bytes_of(out), summed=False)
    elif len(shape) > 2:
        inner = Box(box.offsets[1:], box.sizes[1:])
        for index in range(box.sizes[0]):
            _read_box(fd, offset + index * row_bytes, shape[1:], inner, out[index])
    else:
        at_once = max(1, _ROWS_BYTES // row_bytes)
        buffer = torch.empty((min(at_once, box.sizes[0]), *shape[1:]), dtype=out.dtype)
        for target in out.split(at_once):
            rows = buffer[: len(target)]
            raw_file.read(fd, offset, raw_file.bytes_of(rows), summed=False)
            target.copy_(rows[(slice(None), *box.slices[1:])])
            offset += len(target) * row_bytes


def _identity(fd: int) -> tuple[int, ...]:
    """What differs between a file and another one, or a later one, under the same name."""
    stat = os.fstat(fd)
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
