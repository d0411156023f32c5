"""One safetensors file: its header, validated, and its tensors, read by position.

Reading by position and not by a map of the file keeps what is read out of the memory of the
process: pages of a map count as its memory for as long as the map stands.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from isal import isal_zlib
from safetensors import SafetensorError, safe_open

from mcore_rl.checkpoint.integrity import CRC32_KEY, parse_checksums
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import parse_json_object
from mcore_rl.reshard.boxes import Box

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
# Written at a time, while the processor's cache holds it. For larger pieces the kernel takes large
# blocks of memory, which a virtual machine's host may first have to give back: 5 times slower.
WRITE_BYTES = 1 << 18
_PIECE_BYTES = 1 << 20  # read, then summed up while the processor's cache still holds it
_ROWS_BYTES = 16 << 20  # of whole rows in memory, of which a box needs some columns


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file. `offset` is that of its first byte, from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """The tensors of one file by name. Holds nothing open: any thread or process may read.

    Raises:
        ConfigError: the file cannot be read, is no safetensors file, or holds what the safetensors
            library allows and no model has (a name twice, dtypes that torch lacks).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with safe_open(self.path, framework="numpy"):  # the library's checks, all of them
                pass
            with self.path.open("rb") as file:
                self._identity = _identity(file.fileno())
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
                header = file.read(length)
        except (SafetensorError, OSError) as error:
            reason = _one_line(str(error))  # the library's, which quotes the file
            raise ConfigError(f"{self.path} cannot be read as safetensors: {reason}") from error
        found = parse_json_object(header, f"{self.path}: its header", self._unique)
        metadata = found.pop("__metadata__", None) or {}
        start = LENGTH_BYTES + length
        self.entries: Mapping[str, Entry] = {
            name: self._entry(name, info, start) for name, info in found.items()
        }
        self.crc32s: Mapping[str, int] = {}  # of what mcore_rl wrote
        if CRC32_KEY in metadata:
            self.crc32s = parse_checksums(metadata[CRC32_KEY], str(self.path))
            if self.crc32s.keys() != self.entries.keys():
                raise ConfigError(f"{self.path}: {CRC32_KEY} names other tensors than the header")

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, value in pairs:
            if name in fields:
                raise ConfigError(f"{self.path}: its header has {name!r} twice")
            fields[name] = value
        return fields

    def _entry(self, name: str, info: Any, start: int) -> Entry:
        if not name.isprintable():
            raise ConfigError(f"{self.path}: {name!r} is not the name of a tensor")
        if not isinstance(info, dict):  # the library takes a list of the fields, too
            raise ConfigError(f"{self.path}: its header has no fields for tensor {name}")
        if info["dtype"] not in DTYPES:
            raise ConfigError(
                f"{self.path}: tensor {name} has dtype {info['dtype']}, which is not supported; "
                f"allowed: {', '.join(DTYPES)}"
            )
        begin, end = info["data_offsets"]
        return Entry(DTYPES[info["dtype"]], tuple(info["shape"]), start + begin, end - begin)

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
                if sizes == entry.shape:
                    self._read_whole(file.fileno(), name, entry, out)
                else:
                    assert box is not None
                    self._read_box(file.fileno(), entry.offset, entry.shape, box, out)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from error

    def _read_whole(self, fd: int, name: str, entry: Entry, out: torch.Tensor) -> None:
        tensor = out if out.is_contiguous() else torch.empty(entry.shape, dtype=entry.dtype)
        expected = self.crc32s.get(name)
        crc32 = self._fill(fd, entry.offset, tensor, summed=expected is not None)
        if expected is not None and crc32 != expected:
            raise ConfigError(
                f"tensor {name} of {self.path} is damaged: its checksum is {crc32:08x} instead of "
                f"{expected:08x}"
            )
        if tensor is not out:
            out.copy_(tensor)

    def _read_box(
        self, fd: int, offset: int, shape: tuple[int, ...], box: Box, out: torch.Tensor
    ) -> None:
        """A box of the tensor of `shape` whose first byte stands at `offset`."""
        row_bytes = out.element_size() * math.prod(shape[1:])
        offset += box.offsets[0] * row_bytes
        if box.sizes[1:] == shape[1:] and out.is_contiguous():
            self._fill(fd, offset, out)
        elif len(shape) > 2:
            inner = Box(box.offsets[1:], box.sizes[1:])
            for index in range(box.sizes[0]):
                self._read_box(fd, offset + index * row_bytes, shape[1:], inner, out[index])
        else:
            at_once = max(1, _ROWS_BYTES // row_bytes)
            buffer = torch.empty((min(at_once, box.sizes[0]), *shape[1:]), dtype=out.dtype)
            for target in out.split(at_once):
                rows = buffer[: len(target)]
                self._fill(fd, offset, rows)
                target.copy_(rows[(slice(None), *box.slices[1:])])
                offset += len(target) * row_bytes

    def _fill(self, fd: int, offset: int, tensor: torch.Tensor, *, summed: bool = False) -> int:
        """Bytes from `offset` on into the memory of a tensor; their CRC32 if `summed`, else 0."""
        memory, crc32, done = bytes_of(tensor), 0, 0
        while done < len(memory):
            piece = memory[done : done + _PIECE_BYTES]
            count = os.preadv(fd, [piece], offset + done)
            if not count:
                raise ConfigError(f"{self.path} ends before the tensors that its header names do")
            if summed:
                crc32 = isal_zlib.crc32(piece[:count], crc32)
            done += count
        return crc32


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    memory: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(memory)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text[:300])


def _identity(fd: int) -> tuple[int, ...]:
    """What differs between a file and another one, or a later one, under the same name."""
    stat = os.fstat(fd)
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
