"""Copies, casts, float8 quantisation and checksums of many boxes at once, on the CPU or a GPU.

All boxes of a bucket, of any size, are processed in one launch per pair of dtypes: csrc/reshard/
splits their bytes into equal tiles. Tests compare each operation, bit for bit, with a reference in
plain torch (`reference_*`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_rl import _csrc
from mcore_rl.reshard.float8 import get_scale_shape

_CASTS = {(torch.float32, torch.bfloat16): 1, (torch.bfloat16, torch.float32): 2}
_QUANTIZATIONS = {torch.float32: 3, torch.bfloat16: 4}  # the Kind of csrc/reshard/box.h
_CHECKSUM = 5
_CAST_CHECKSUMS = {(torch.float32, torch.bfloat16): 6, (torch.bfloat16, torch.float32): 7}

Pair = tuple[torch.Tensor, torch.Tensor]  # source, target
Row = tuple[int, ...]  # a Box of csrc/reshard/box.h
Words = NDArray[np.int64]


class Quantized(NamedTuple):
    """A weight [rows, columns] in float8 (DeepSeek-V3's format)."""

    values: torch.Tensor  # [rows, columns] float8_e4m3fn
    scales: torch.Tensor  # [ceil(rows / 128), ceil(columns / 128)] float32


class BoxCopy:
    """Copies of boxes, prepared once and run any number of times.

    It keeps references to the tensors and reads their values when it runs. Dtypes are equal, or
    float32 and bfloat16: values are rounded to the nearest bfloat16, ties to even, and a NaN
    becomes 0x7fc0.

    Args:
        pairs: (source, target) views of equal shape and any strides, all on one device; long
            contiguous rows are fast.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit; among the pairs of equal dtypes, a target
            overlaps a source or a target.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._tensors = list(pairs)
        device = _get_common_device(tensor for pair in self._tensors for tensor in pair)
        self._tables = [
            _Table(kind, rows, device) for kind, rows in _build_rows(self._tensors).items()
        ]

    def run(self, num_threads: int | None = None) -> None:
        """Copy, on the CPU by up to `num_threads`, on a GPU in the current stream."""
        for table in self._tables:
            table.run(num_threads)


class BoxLayout:
    """Copies of boxes of tensors whose addresses may change between runs.

    The layout is the same for every version of the weights, and computing it takes as long as
    copying boxes of a few hundred kilobytes. No tensor is kept alive.

    Args:
        pairs: Pairs as BoxCopy takes them.
        tensors: Bases of the views in `pairs`. They neither overlap nor interleave; a tensor may
            occur twice.

    Raises:
        ValueError: As BoxCopy.
    """

    def __init__(self, pairs: Iterable[Pair], tensors: Sequence[torch.Tensor]) -> None:
        self._layouts = [_get_layout(tensor) for tensor in tensors]
        self._device = _get_common_device(tensors)
        self._starts = [tensor.data_ptr() for tensor in tensors]  # that the tables are for
        starts = np.array(self._starts, np.int64)
        by_start = np.argsort(starts)
        # By kind: boxes with offsets in place of addresses, and the tensors that these are in.
        self._relative: list[tuple[int, Words, Words]] = []
        self._tables: list[_Table] = []
        for kind, rows in _build_rows(list(pairs)).items():
            words = np.array(rows, np.int64).reshape(-1, 8)
            owners = by_start[np.searchsorted(starts[by_start], words[:, :2], side="right") - 1]
            self._tables.append(_Table(kind, words, self._device))
            words[:, :2] -= starts[owners]
            self._relative.append((kind, words, owners))

    def run(self, tensors: Sequence[torch.Tensor], num_threads: int | None = None) -> None:
        """Copy between these tensors, as BoxCopy.run.

        Raises:
            ValueError: A tensor has another shape, stride, dtype or device than at first.
        """
        for number, (tensor, layout) in enumerate(zip(tensors, self._layouts, strict=True)):
            if _get_layout(tensor) != layout:
                raise ValueError(
                    f"tensor {number} is {_get_layout(tensor)}; allowed: {layout}, as it was at "
                    "first"
                )
        starts = [tensor.data_ptr() for tensor in tensors]
        if starts != self._starts:
            self._starts, self._tables = starts, self._build_tables(np.array(starts, np.int64))
        for table in self._tables:
            table.run(num_threads)

    def _build_tables(self, starts: Words) -> list[_Table]:
        """Build the tables of launches for tensors at these addresses."""
        tables = []
        for kind, relative, owners in self._relative:
            words = relative.copy()
            words[:, :2] += starts[owners]
            tables.append(_Table(kind, words, self._device))
        return tables


class BoxQuantize:
    """Quantisation of weights to float8 with a scale per block of 128 x 128, in place of a copy.

    Bit-equal to checkpoint/fp8.py's quantize_blocks. A source must consist of complete blocks of
    its weight. The scale of a block with a NaN, an infinity or a magnitude too large for bfloat16
    is NaN: see `check`.

    Args:
        pairs: (source [rows, columns] in float32 or bfloat16, target), all on one device.

    Raises:
        ValueError: As BoxCopy.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, Quantized]]) -> None:
        self._pairs = list(pairs)
        rows: dict[int, list[Row]] = {}
        for number, (source, into) in enumerate(self._pairs):
            kind, row = _build_quantization_row(number, source, into)
            rows.setdefault(kind, []).append(row)
        device = _get_common_device(t for source, into in self._pairs for t in (source, *into))
        self._tables = [_Table(kind, boxes, device) for kind, boxes in rows.items()]

    def run(self, num_threads: int | None = None) -> None:
        """Quantise, on the CPU by up to `num_threads`, on a GPU in the current stream."""
        for table in self._tables:
            table.run(num_threads)

    def check(self) -> None:
        """Wait, and raise ValueError if a weight has values that float8 blocks cannot represent."""
        for number, (_, into) in enumerate(self._pairs):
            if not into.scales.isfinite().all():
                raise ValueError(
                    f"weight {number} has NaN, infinity or values too large for bfloat16"
                )


class BoxChecksum:
    """64-bit checksums of boxes, of the values in row-major order, the same on every device.

    A checksum depends on the bits and the index of every item in the box, not on strides; see
    csrc/reshard/checksum.h. A change of one item of 2 or 4 bytes always changes it, any other
    change with a probability of about 1 - 2**-48.

    Args:
        boxes: (tensor, dtype) on one device, of any strides. The checksum is that of the tensor
            cast to the dtype: the same, or float32 and bfloat16, as in BoxCopy.

    Raises:
        ValueError: Dtypes or devices do not fit.
    """

    def __init__(self, boxes: Iterable[tuple[torch.Tensor, torch.dtype]]) -> None:
        self._boxes = list(boxes)
        device = _get_common_device(tensor for tensor, _ in self._boxes)
        self._values = torch.empty(len(self._boxes), dtype=torch.int64, device=device)
        rows: dict[int, list[Row]] = {}
        for number, (tensor, dtype) in enumerate(self._boxes):
            kind = _get_checksum_kind(number, tensor, dtype)
            value = self._values.data_ptr() + number * self._values.itemsize
            rows.setdefault(kind, []).extend(_list_checksum_rows(kind, tensor, value))
        self._tables = [_Table(kind, boxes, device, waits=False) for kind, boxes in rows.items()]

    def run(self, num_threads: int | None = None) -> torch.Tensor:
        """Compute the checksums; on a GPU in the current stream, which must be that of creation.

        Returns:
            [boxes] int64 on the device, overwritten by the next run.
        """
        self._values.zero_()
        for table in self._tables:
            table.run(num_threads)
        return self._values


def compute_checksums(boxes: Iterable[tuple[torch.Tensor, torch.dtype]]) -> torch.Tensor:
    """Compute the checksum of each box; see BoxChecksum. It does not wait for a GPU.

    A box of float8 codes has the checksum of its codes as 16-bit integers.
    """
    return BoxChecksum(
        (tensor.view(torch.uint8).to(torch.int16), torch.int16)
        if tensor.dtype == dtype == torch.float8_e4m3fn
        else (tensor, dtype)
        for tensor, dtype in boxes
    ).run()


def copy_boxes(pairs: Iterable[Pair], num_threads: int | None = None) -> None:
    """Copy each source into its target; see BoxCopy."""
    BoxCopy(pairs).run(num_threads)


def narrow_box(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a box of a tensor as a view. Dims that are not narrowed cost nothing.

    Raises:
        RuntimeError: It is not inside the tensor.
    """
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


def cast(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a tensor as float32 or bfloat16; see BoxCopy."""
    target = torch.empty(source.shape, dtype=dtype, device=source.device)
    copy_boxes([(source, target)])
    return target


def quantize_boxes(
    pairs: Iterable[tuple[torch.Tensor, Quantized]], num_threads: int | None = None
) -> None:
    """Quantise each source into its target and check the result; see BoxQuantize."""
    quantize = BoxQuantize(pairs)
    quantize.run(num_threads)
    quantize.check()


def allocate_quantized(source: torch.Tensor) -> Quantized:
    """Allocate a weight [rows, columns] in float8."""
    blocks = get_scale_shape(tuple(source.shape))
    return Quantized(
        torch.empty(source.shape, dtype=torch.float8_e4m3fn, device=source.device),
        torch.empty(blocks, dtype=torch.float32, device=source.device),
    )


class _Table:
    """The boxes of a launch; for a GPU, also in its memory."""

    def __init__(
        self, kind: int, rows: Sequence[Row] | Words, device: torch.device, waits: bool = True
    ) -> None:
        """Create the table; `waits`: until any stream may use it, not only the current one."""
        words = np.asarray(rows, dtype=np.int64).reshape(-1, 8)
        self._table = _csrc.Table(kind, words.ctypes.data, len(words))
        self._device = device
        if device.type == "cuda":
            host = torch.frombuffer(bytearray(self._table.words()), dtype=torch.int64)
            host = host if waits else host.pin_memory()
            self._words = host.to(device, non_blocking=not waits)

    def run(self, num_threads: int | None) -> None:
        if self._device.type == "cpu":
            self._table.run(torch.get_num_threads() if num_threads is None else num_threads)
            return
        stream = torch.cuda.current_stream(self._device)
        self._words.record_stream(stream)
        self._table.run_cuda(self._device.index, stream.cuda_stream, self._words.data_ptr())


def _build_rows(pairs: Sequence[Pair]) -> dict[int, list[Row]]:
    """Return the boxes for csrc, by kind."""
    rows: dict[int, list[Row]] = {}
    for number, (source, target) in enumerate(pairs):
        if source.shape != target.shape:
            raise ValueError(
                f"box {number}: the source is {tuple(source.shape)}, "
                f"the target {tuple(target.shape)}; allowed: equal shapes"
            )
        rows.setdefault(_get_copy_kind(number, source, target), []).extend(
            _list_rows(source, target)
        )
    return rows


def _get_layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _get_copy_kind(number: int, source: torch.Tensor, target: torch.Tensor) -> int:
    """Return the Kind of csrc/reshard/box.h that copies between these dtypes."""
    if source.dtype == target.dtype:
        return 0
    kind = _CASTS.get((source.dtype, target.dtype))
    if kind is None:
        raise ValueError(
            f"box {number}: from {source.dtype} to {target.dtype}; "
            "allowed: equal dtypes, or float32 and bfloat16"
        )
    return kind


def _get_common_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
    if len(devices) > 1 or any(device.type not in ("cpu", "cuda") for device in devices):
        raise ValueError(
            f"tensors on {', '.join(sorted(map(str, devices)))}; allowed: all on cpu or one GPU"
        )
    return devices.pop()


def _list_rows(source: torch.Tensor, target: torch.Tensor) -> Iterator[Row]:
    """Yield the two-dimensional boxes that a box consists of."""
    if not source.numel():
        return
    unit = (source.element_size(), target.element_size())
    item = 1 if source.dtype != target.dtype else unit[0]  # copies count bytes, casts items
    start = (source.data_ptr(), target.data_ptr())
    if source.is_contiguous() and target.is_contiguous():  # most boxes
        yield (*start, 1, source.numel() * item, 0, 0, 0, 0)
        return
    sizes, from_strides, to_strides = _collapse_dims(source, target)
    for index in itertools.product(*(range(size) for size in sizes[:-2])):
        addresses = (
            address + size * sum(i * step for i, step in zip(index, strides, strict=False))
            for address, size, strides in zip(start, unit, (from_strides, to_strides), strict=True)
        )
        row_strides = from_strides[-2] * unit[0], to_strides[-2] * unit[1]
        yield (*addresses, sizes[-2], sizes[-1] * item, *row_strides, 0, 0)


def _collapse_dims(source: torch.Tensor, target: torch.Tensor) -> tuple[list[int], ...]:
    """Merge adjacent dims that are contiguous in both tensors.

    Returns:
        Sizes, source strides and target strides of at least two dims; the last has stride 1.
    """
    dims: list[tuple[int, int, int]] = []
    for size, step, to in zip(source.shape, source.stride(), target.stride(), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (step * size, to * size):
            dims[-1] = (dims[-1][0] * size, step, to)
        else:
            dims.append((size, step, to))
    if not dims or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))
    if len(dims) == 1:
        dims.insert(0, (1, 0, 0))
    return tuple(map(list, zip(*dims, strict=True)))


def _get_checksum_kind(number: int, tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the Kind of csrc/reshard/box.h for the checksum of a tensor cast to a dtype."""
    kind = _CAST_CHECKSUMS.get((tensor.dtype, dtype))
    if kind is None and (tensor.dtype != dtype or dtype.itemsize % 2):
        raise ValueError(
            f"box {number}: checksum of {tensor.dtype} as {dtype}; "
            "allowed: the same dtype, of at least 2 bytes, or float32 and bfloat16"
        )
    return _CHECKSUM if kind is None else kind


def _list_checksum_rows(kind: int, tensor: torch.Tensor, value: int) -> Iterator[Row]:
    """Yield the boxes of `_list_rows`, with first item and address of the result."""
    item_bytes = 2 if kind == _CHECKSUM else tensor.element_size()
    first_item = 0
    for start, _, rows, row_bytes, stride, _, _, _ in _list_rows(tensor, tensor):
        items = row_bytes // item_bytes
        yield start, value, rows, items, stride, 0, first_item, 0
        first_item += rows * items


def _build_quantization_row(number: int, source: torch.Tensor, into: Quantized) -> tuple[int, Row]:
    """Return the Kind and the Box of csrc/reshard/box.h that quantise a weight."""
    kind = _QUANTIZATIONS.get(source.dtype)
    fits = (
        source.dim() == 2
        and into.values.shape == source.shape
        and tuple(into.scales.shape) == get_scale_shape(tuple(source.shape))
        and into.values.dtype is torch.float8_e4m3fn
        and into.scales.dtype is torch.float32
    )
    if kind is None or not fits:
        raise ValueError(
            f"weight {number}: {_describe(source)} into {_describe(into.values)} with scales "
            f"{_describe(into.scales)}; allowed: [rows, columns] float32 or bfloat16 into the same "
            "in float8_e4m3fn, with a float32 scale for each block of 128 x 128"
        )
    rows, columns = source.shape
    for tensor in (source, *into):
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(f"weight {number}: {_describe(tensor)} has gaps between columns")
    strides = source.stride(0) * source.element_size(), into.values.stride(0)
    scales = into.scales.data_ptr(), into.scales.stride(0) * 4
    return kind, (source.data_ptr(), into.values.data_ptr(), rows, columns, *strides, *scales)


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
