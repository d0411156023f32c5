"""One tensor as torch.save writes it, framed here: a zip archive with the tensor's bytes in it.

Writing through torch.save sums the bytes up far more slowly than ISA-L, and reading through zipfile
and torch.load costs half a millisecond, which is much for a small expert. The bytes around
bytes follows from dtype, shape and checksum alone. So it is made once for each shape, written as it
is, and compared as it is when it is read; an archive that differs is read by torch.

The format: APPNOTE.TXT of PKWARE, sections 4.3.7 and 4.3.12 (nothing compressed, no ZIP64), and
torch/serialization.py, `_save`: data.pkl, byteorder and version, data/0 at a multiple of 64 bytes.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
from functools import lru_cache
from typing import Any

import torch
from isal import isal_zlib

from mcore_rl.checkpoint import raw_file

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ALIGNMENT = 64  # of the tensor's bytes
_MAX_BYTES = 1 << 31  # beyond, the archive would need other fields
_DATE = 33  # 1 January 1980
_CRC_AT, _CENTRAL_CRC_AT = 14, 16  # in a header, and in the directory's line


class _Pickler(pickle.Pickler):
    """As torch.save pickles a tensor: its storage is a reference to data/0."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            kind = getattr(torch, obj._pickle_storage_type())
            return ("storage", kind, "0", "cpu", obj._size())
        return None


def is_framed(dtype: torch.dtype, nbytes: int) -> bool:
    """Whether such a tensor is written and looked for in this form."""
    return dtype in _DTYPES and 0 < nbytes < _MAX_BYTES and sys.byteorder == "little"


@lru_cache(maxsize=1024)
def _frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes, int, int]:
    """The bytes before and after those of a tensor, and where in each its checksum goes."""
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(torch.empty(shape, dtype=dtype))
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    before, behind = b"", b""
    small = {"data.pkl": pickled.getvalue(), "byteorder": b"little", "version": b"3\n"}
    for name, data in small.items():
        local, central = _entry(name, isal_zlib.crc32(data), len(data), len(before))
        before, behind = before + local + data, behind + central
    extra = -(len(before) + len(_entry("data/0", 0, nbytes, 0)[0])) % _ALIGNMENT
    extra += _ALIGNMENT if 0 < extra < 4 else 0  # an extra field has a header of 4 bytes
    local, central = _entry("data/0", 0, nbytes, len(before), extra)
    crc_before, crc_behind = len(before) + _CRC_AT, len(behind) + _CENTRAL_CRC_AT
    before, behind = before + local, behind + central
    sizes = struct.pack("<4H2IH", 0, 0, 4, 4, len(behind), len(before) + nbytes, 0)
    return before, behind + b"PK\5\6" + sizes, crc_before, crc_behind


def _entry(name: str, crc32: int, size: int, place: int, extra: int = 0) -> tuple[bytes, bytes]:
    """The header of a file in the archive, and its line in the directory at the end."""
    path = f"archive/{name}".encode()
    common = struct.pack("<5H3IH", 0, 0, 0, 0, _DATE, crc32, size, size, len(path))
    padding = b"FB" + (extra - 4).to_bytes(2, "little") + b"Z" * (extra - 4) if extra else b""
    local = b"PK\3\4" + common + extra.to_bytes(2, "little") + path + padding
    central = b"PK\1\2\0\0" + common + struct.pack("<4H2I", 0, 0, 0, 0, 0, place) + path
    return local, central


def _framed(out: torch.Tensor, crc32: int) -> tuple[bytes, bytes]:
    before, behind, crc_before, crc_behind = _frame(out.dtype, tuple(out.shape))
    crc = crc32.to_bytes(4, "little")
    return (
        before[:crc_before] + crc + before[crc_before + 4 :],
        behind[:crc_behind] + crc + behind[crc_behind + 4 :],
    )


def write_item(file: int, offset: int, tensor: torch.Tensor) -> int:
    """Write a contiguous tensor on the CPU from its own memory; the length of the item."""
    start = offset + len(_frame(tensor.dtype, tuple(tensor.shape))[0])
    before, behind = _framed(tensor, raw_file.write(file, start, raw_file.bytes_of(tensor)))
    raw_file.write(file, offset, before)
    raw_file.write(file, start + tensor.nbytes, behind)
    return len(before) + tensor.nbytes + len(behind)


def read_item(file: int, offset: int, nbytes: int, out: torch.Tensor) -> bool:
    """Fill the memory of `out`, contiguous and of the item's dtype and shape; False: another form.

    Raises:
        EOFError: the file is truncated.
        ValueError: the checksum differs.
    """
    if not is_framed(out.dtype, out.nbytes):
        return False
    before, behind, crc_before, _ = _frame(out.dtype, tuple(out.shape))
    if nbytes != len(before) + out.nbytes + len(behind):
        return False
    found = os.pread(file, len(before), offset)
    end = os.pread(file, len(behind), offset + nbytes - len(behind))
    crc32 = int.from_bytes(found[crc_before : crc_before + 4], "little")
    if (found, end) != _framed(out, crc32):
        return False
    if raw_file.read(file, offset + len(before), raw_file.bytes_of(out)) != crc32:
        raise ValueError("its checksum differs")
    return True
