"""Checksums of boxes: those of the reference, and they see every change of values or places."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl import _csrc
from mcore_rl.reshard.ops import BoxChecksum, cast, compute_checksums

DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.int64, torch.int64),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]
PRIMES = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], np.uint64)
# Around the sizes where groups of words, vectors and tiles begin and end.
WIDTHS = [1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 2047, 2048, 4095, 4096, 4100, 8193]


def reference_checksum(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Compute what BoxChecksum does; see csrc/reshard/checksum.h."""
    items = cast(tensor, dtype) if tensor.dtype != dtype else tensor
    words = items.contiguous().view(-1).view(torch.int16).numpy().view(np.uint16)
    index = np.arange(len(words), dtype=np.uint64)
    weights = (index // 4 + 1) * np.uint64(0x9E3779B97F4A7C15)
    weights = (weights ^ weights >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    weights = (weights ^ weights >> np.uint64(32)) | np.uint64(1)
    parts = weights * PRIMES[index % 4] * words
    return int(parts.sum(dtype=np.uint64).view(np.int64))


def random_bits(items: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.frombuffer(bytearray(rng.bytes(items * dtype.itemsize)), dtype=dtype)


def compute(*tensors: torch.Tensor) -> list[int]:
    return compute_checksums((tensor, tensor.dtype) for tensor in tensors).tolist()


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@given(data=st.data())
def test_boxes_of_any_size_gap_and_offset_have_the_checksums_of_the_reference(
    dtypes: tuple[torch.dtype, torch.dtype], data: st.DataObject
) -> None:
    boxes = []
    for seed in range(data.draw(st.integers(0, 5))):
        columns = data.draw(st.sampled_from(WIDTHS))
        rows = data.draw(st.integers(0, max(1, 20_000 // columns)))
        stride = columns + data.draw(st.sampled_from([0, 0, 1, 4, 8]))
        offset = data.draw(st.integers(0, 9))
        memory = random_bits(rows * stride + offset + 1, dtypes[0], seed)
        boxes.append((memory.as_strided((rows, columns), (stride, 1), offset), dtypes[1]))
    expected = [reference_checksum(*box) for box in boxes]
    checksum = BoxChecksum(boxes)
    for num_threads in (1, data.draw(st.integers(2, 8)), None):  # each run begins at zero
        assert checksum.run(num_threads).tolist() == expected


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.permute(2, 0, 1),
        lambda x: x[:, 1:3, ::2],
        lambda x: x[1:, 3:40, :8],
        lambda x: x[3:, :, 1],
        lambda x: x[1, :, 2].expand(3, 50),
        lambda x: x[0, 0, 0],
        lambda x: x[:, :0],
        lambda x: x[2:3, :, :1],
    ],
)
def test_views_of_any_dims_and_strides_have_the_checksum_of_their_values(
    dtypes: tuple[torch.dtype, torch.dtype], view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = view(random_bits(7 * 50 * 61, dtypes[0]).view(7, 50, 61))
    [checksum] = compute_checksums([(tensor, dtypes[1])]).tolist()
    assert checksum == reference_checksum(tensor, dtypes[1])


def test_thousands_of_boxes_of_all_dtypes_have_a_checksum_each_in_their_order() -> None:
    rng = np.random.default_rng(0)
    boxes = []
    for number, size in enumerate([*rng.integers(0, 300, 3000).tolist(), 3_000_001]):
        source, dtype = DTYPES[number % len(DTYPES)]
        boxes.append((random_bits(size + 1, source, number)[1:], dtype))
    expected = [reference_checksum(*box) for box in boxes]
    checksum = BoxChecksum(boxes)
    assert checksum.run(1).tolist() == checksum.run(5).tolist() == expected
    assert compute_checksums([]).tolist() == []


def test_a_checksum_is_that_of_the_values_at_the_time_of_the_run() -> None:
    tensor = torch.ones(5)
    checksum = BoxChecksum([(tensor, torch.float32)])
    before = checksum.run().tolist()
    tensor[3] = 2.0
    assert checksum.run().tolist() == compute(tensor) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [4, 7])
def test_every_bit_that_flips_changes_the_checksum(dtype: torch.dtype, columns: int) -> None:
    memory = random_bits(3 * 9, dtype)
    box = memory.view(3, 9)[:, 1 : 1 + columns]
    inside = torch.zeros(3, 9, dtype=torch.bool)
    inside[:, 1 : 1 + columns] = True
    checksum, octets = BoxChecksum([(box, dtype)]), memory.view(torch.uint8)
    seen = {before := checksum.run().item()}
    for place in range(len(octets)):
        for bit in range(8):
            octets[place] ^= 1 << bit
            is_inside = bool(inside.view(-1)[place // dtype.itemsize])
            assert (checksum.run().item() != before) == is_inside
            seen.add(checksum.run().item())
            octets[place] ^= 1 << bit
    assert len(seen) == 1 + 3 * columns * dtype.itemsize * 8  # and no two changes look alike


def exchange_items(a: int, b: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def exchange(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed[[a, b]] = tensor[[b, a]]
        return changed

    return exchange


CHANGES = {
    "shifted": lambda x: x.roll(1),
    "shifted by a group": lambda x: x.roll(4),
    "shifted by a tile": lambda x: x.roll(4096),
    "reversed": lambda x: x.flip(0),
    "halves exchanged": lambda x: x.roll(len(x) // 2),
    "transposed": lambda x: x.view(128, -1).t().reshape(-1),
    "pairs exchanged": lambda x: x.view(-1, 2).flip(1).reshape(-1),
    "groups exchanged": lambda x: x.view(-1, 2, 4).flip(1).reshape(-1),
    "negated": lambda x: -x,
    "a row twice": lambda x: torch.cat([x[:64], x[:64], x[128:]]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("regular", [True, False])
def test_values_that_are_moved_or_negated_change_the_checksum(
    dtype: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor], regular: bool
) -> None:
    tensor = torch.arange(1, 16385).remainder(251) if regular else random_bits(16384, torch.int16)
    tensor = tensor.to(dtype)
    before, after = compute(tensor, change(tensor))
    assert before != after


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_two_items_exchanged_change_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 41).to(dtype)
    changed = [exchange_items(a, b)(tensor) for a, b in itertools.combinations(range(40), 2)]
    checksums = compute(tensor, *changed)
    assert len(set(checksums)) == len(checksums)


@pytest.mark.parametrize(
    ("tensor", "dtype", "message"),
    [
        (torch.zeros(2, dtype=torch.uint8), torch.uint8, r"box 1: checksum of torch\.uint8 as"),
        (torch.zeros(2), torch.float16, r"torch\.float32 as torch\.float16; allowed: the same"),
        (torch.zeros(2, dtype=torch.int32), torch.float32, r"torch\.int32 as torch\.float32"),
        (torch.zeros(2, device="meta"), torch.float32, "tensors on cpu, meta; allowed: all on cpu"),
    ],
)
def test_boxes_without_a_checksum_are_refused(
    tensor: torch.Tensor, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BoxChecksum([(torch.zeros(1), torch.float32), (tensor, dtype)])


@pytest.mark.parametrize("kind", [5, 6, 7])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: 0}, "source=0; allowed: the address of memory"),
        ({0: 65}, "source=65; allowed: a multiple of the item's size"),
        ({1: 4100}, "target=4100; allowed: a multiple"),
        ({4: 33}, "source_stride=33; allowed: a multiple"),
        ({6: -1}, "first_item=-1; allowed: 0 to"),
    ],
)
def test_entries_that_cannot_be_are_refused(
    kind: int, changes: dict[int, int], message: str
) -> None:
    entry = (64, 4096, 2, 8, 32, 0, 0, 0)
    changed = tuple(changes.get(n, value) for n, value in enumerate(entry))
    words = np.array([entry, changed], dtype=np.int64)
    with pytest.raises(ValueError, match=f"box 1: {message}"):
        _csrc.Table(kind, words.ctypes.data, 2)


@pytest.mark.skipif(_csrc.has_cuda, reason="built with CUDA")
def test_a_build_without_cuda_refuses_checksums_on_a_gpu() -> None:
    words = np.array([64, 4096, 2, 8, 32, 0, 0, 0], dtype=np.int64)
    with pytest.raises(RuntimeError, match="built without CUDA"):
        _csrc.Table(5, words.ctypes.data, 1).run_cuda(0, 0, 8)
