"""Copies, casts and quantisation of boxes: what torch does, bit for bit, and nothing beyond.

Long because: every operation is held against its reference, and every fault of a table is refused.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcore_rl import _csrc
from mcore_rl.checkpoint.fp8 import quantize_blocks
from mcore_rl.reshard.float8 import BLOCK
from mcore_rl.reshard.ops import (
    BoxCopy,
    BoxLayout,
    BoxQuantize,
    Pair,
    Quantized,
    allocate_quantized,
    cast,
    copy_boxes,
    narrow_box,
    quantize_boxes,
)

TILE_BYTES = 8192
LARGEST = 448.0  # of float8 e4m3
SMALLEST = 2.0**-110  # blocks without a larger magnitude have scale 1
# Around the sizes where rows, tiles and vectors begin and end.
EDGES = sorted({max(1, size + d) for size in (1, 16, 64, 4096, 8192, 24576) for d in (-1, 0, 1, 3)})
lengths = st.one_of(st.integers(1, 40), st.sampled_from(EDGES))
threads = st.integers(1, 4)
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64]
CASTS = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]


def reference_copy(pairs: Iterable[Pair]) -> None:
    """Copy as BoxCopy does. Torch's own NaN in bfloat16 depends on the CPU's instructions."""
    for source, target in pairs:
        target.copy_(source)
        if source.dtype != target.dtype and target.dtype is torch.bfloat16:
            target.masked_fill_(source.isnan(), torch.nan)


def reference_quantize(pairs: Iterable[tuple[torch.Tensor, Quantized]]) -> None:
    """Quantise as BoxQuantize does."""
    for source, into in pairs:
        for row, column in itertools.product(*(range(0, n, BLOCK) for n in source.shape)):
            block_slices = slice(row, row + BLOCK), slice(column, column + BLOCK)
            block = source[block_slices].float()
            largest = block.abs().amax().bfloat16().float()
            scale = torch.where(largest < SMALLEST, 1.0, largest / LARGEST)
            scale = torch.where(largest.isfinite(), scale, torch.nan)
            into.values[block_slices] = (block / scale).to(torch.float8_e4m3fn)
            into.scales[row // BLOCK, column // BLOCK] = scale


class Arena:
    """Memory that views are cut from, one behind the other, with odd offsets and gaps."""

    def __init__(self, data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
        self.data, self.end, self.places = data, 0, []
        self.dtype, self.seed = dtype, seed

    def place(self, rows: int, columns: int) -> None:
        gap = self.data.draw(st.sampled_from([0, 0, 1, 3, 8]))
        offset = self.end + self.data.draw(st.sampled_from([0, 0, 1, 2, 8, 16]))
        stride = columns + gap
        self.places.append((offset, rows, columns, stride))
        self.end = offset + (rows - 1) * stride + columns

    def memory(self) -> torch.Tensor:
        """[items], of random bits."""
        rng = np.random.default_rng(self.seed)
        items = rng.bytes((self.end + 64) * self.dtype.itemsize)
        return torch.frombuffer(bytearray(items), dtype=self.dtype)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        return [memory.as_strided((r, c), (s, 1), o) for o, r, c, s in self.places]


def draw_shapes(data: st.DataObject) -> list[tuple[int, int]]:
    shapes = []
    for _ in range(data.draw(st.integers(0, 6))):
        columns = data.draw(lengths)
        shapes.append((data.draw(st.integers(1, max(1, 40000 // columns))), columns))
    return shapes


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtypes", [*((d, d) for d in DTYPES), *CASTS], ids=str)
@settings(max_examples=60)
@given(data=st.data())
def test_boxes_arrive_and_nothing_else_is_written(
    dtypes: tuple[torch.dtype, torch.dtype], data: st.DataObject
) -> None:
    source, target = (Arena(data, dtype, seed) for seed, dtype in enumerate(dtypes))
    for shape in draw_shapes(data):
        source.place(*shape)
        target.place(*shape)
    given, target_memory, expected_memory = source.memory(), target.memory(), target.memory()
    sources = data.draw(st.permutations(range(len(source.places))))
    views = source.views(given)

    def pairs(memory: torch.Tensor) -> list[Pair]:
        pairs_in_order = list(zip(views, target.views(memory), strict=True))
        return [pairs_in_order[n] for n in sources]

    copy_boxes(pairs(target_memory), data.draw(threads))
    reference_copy(pairs(expected_memory))
    assert torch.equal(bits(target_memory), bits(expected_memory))


def test_thousands_of_boxes_of_every_size_in_one_launch() -> None:
    rng = np.random.default_rng(0)
    sizes = [int(n) for n in rng.integers(1, 5000, 5000)] + [3_000_001]
    order = rng.permutation(len(sizes))
    starts = np.cumsum([0, *sizes])
    places = np.zeros(len(sizes), dtype=np.int64)
    places[order] = np.cumsum([0, *(sizes[n] for n in order)])[:-1]
    source = torch.from_numpy(rng.integers(0, 256, starts[-1], dtype=np.uint8))
    target = torch.zeros_like(source)
    copy = BoxCopy(
        (source[a : a + n], target[b : b + n])
        for a, b, n in zip(starts[:-1], places, sizes, strict=True)
    )
    copy.run(4)
    pieces = [source[starts[n] : starts[n] + sizes[n]] for n in order]
    assert torch.equal(target, torch.cat(pieces))
    source.zero_()
    copy.run(3)  # what is there when it runs
    assert not target.any()


# The loops of the GPU, lane by lane on the CPU


def find_address(memory: NDArray[np.uint8], past: int) -> int:
    """Return the first address in the memory that is `past` bytes after a multiple of 64."""
    return int(memory.ctypes.data) + (past - memory.ctypes.data) % 64


@pytest.mark.parametrize("dtypes", [*((d, d) for d in DTYPES), *CASTS], ids=str)
@settings(max_examples=60)
@given(data=st.data())
def test_the_loops_of_a_gpu_write_what_those_of_the_cpu_write(
    dtypes: tuple[torch.dtype, torch.dtype], data: st.DataObject
) -> None:
    source, target = (Arena(data, dtype, seed) for seed, dtype in enumerate(dtypes))
    for shape in draw_shapes(data):
        source.place(*shape)
        target.place(*shape)
    given, target_memory, expected_memory = source.memory(), target.memory(), target.memory()
    views = list(zip(source.views(given), target.views(target_memory), strict=True))
    kind = 1 + CASTS.index(dtypes) if dtypes in CASTS else 0
    item = dtypes[0].itemsize if kind == 0 else 1
    boxes = []
    for from_, to in views:
        strides = (view.stride(0) * view.itemsize for view in (from_, to))
        row = from_.shape[1] * item
        boxes.append((from_.data_ptr(), to.data_ptr(), len(from_), row, *strides, 0, 0))
    moves = table(kind, *boxes).simulate_cuda()
    reference_copy(zip(source.views(given), target.views(expected_memory), strict=True))
    assert torch.equal(bits(target_memory), bits(expected_memory))
    moved = sum(number << power for power, number in enumerate(moves))
    assert moved == sum(s.numel() * item for s, _ in views)


@pytest.mark.parametrize("strides", [(320, 368), (317, 333), (301, 309), (302, 301)], ids=str)
@pytest.mark.parametrize("row_bytes", [1, 15, 128, 129, 150, 300])
def test_rows_at_every_address_arrive(strides: tuple[int, int], row_bytes: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, 2000, dtype=np.uint8)
    for past_source, past_target in itertools.product(range(16), repeat=2):
        target, expected = np.zeros(2000, np.uint8), np.zeros(2000, np.uint8)
        source_address, to = find_address(source, past_source), find_address(target, past_target)
        table(0, (source_address, to, 3, row_bytes, *strides, 0, 0)).simulate_cuda()
        for row in range(3):
            first = source_address - source.ctypes.data + row * strides[0]
            last = to - target.ctypes.data + row * strides[1]
            expected[last : last + row_bytes] = source[first : first + row_bytes]
        assert (target == expected).all(), (past_source, past_target)


# Where source and target begin behind a multiple of 64, then rows, items of a row and both strides,
# in bytes but for items; the moves of 1, 2, 4, 8 and 16 items.
MOVES = {
    "aligned": (0, (0, 0, 64, 4096, 4112, 4096), (0, 0, 0, 0, 64 * 256)),
    # 9 bytes to the next multiple of 16, 255 times 16, and 8. A tile ends in the second row, after
    # 8192 bytes in all: its ends are 9 and 6, and 2 are left for the next tile.
    "an odd row": (0, (7, 7, 1, 4097, 0, 0), (17, 0, 0, 0, 255)),
    "an odd end": (0, (0, 0, 1, 4097, 0, 0), (1, 0, 0, 0, 256)),
    "odd rows": (0, (7, 7, 2, 4097, 4112, 4128), (17 + 17, 0, 0, 0, 2 * 255)),
    "apart by 8": (0, (3, 11, 1, 4096, 0, 0), (8, 0, 0, 511, 0)),
    "apart by 4": (0, (3, 7, 1, 4096, 0, 0), (4, 0, 1023, 0, 0)),
    "apart by 2": (0, (3, 5, 1, 4096, 0, 0), (2, 2047, 0, 0, 0)),
    "apart by 1": (0, (3, 4, 1, 4096, 0, 0), (4096, 0, 0, 0, 0)),
    "rows apart by 0 and 8": (0, (0, 0, 2, 4096, 4096, 4104), (0, 0, 0, 512, 256)),
    "short rows": (0, (1, 1, 100, 128, 144, 144), (12800, 0, 0, 0, 0)),
    "float32 to bfloat16": (1, (4, 2, 1, 4097, 0, 0), (3 + 2, 0, 1023, 0, 0)),
    "bfloat16 to float32": (2, (6, 12, 1, 4096, 0, 0), (1 + 3, 0, 1023, 0, 0)),
    "a cast apart by 2": (1, (8, 2, 1, 4096, 0, 0), (4096, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("case", MOVES)
def test_a_row_that_is_not_aligned_is_moved_in_wide_steps_but_for_its_ends(case: str) -> None:
    kind, (past_source, past_target, rows, *rest), expected = MOVES[case]
    memories = np.zeros((2, 300_000), dtype=np.uint8)
    source, target = map(find_address, memories, (past_source, past_target))
    moves = table(kind, (source, target, rows, *rest, 0, 0)).simulate_cuda()
    assert moves == expected


def test_only_copies_and_casts_have_loops_that_run_on_the_cpu() -> None:
    scaled = (*FINE[:6], 1 << 21, 4)
    for kind in (3, 5):
        with pytest.raises(ValueError, match=f"kind={kind}; allowed: 0 to 2, copies and casts"):
            table(kind, scaled).simulate_cuda()


@settings(max_examples=60)
@given(data=st.data())
def test_boxes_that_are_laid_out_once_arrive_wherever_their_tensors_stand(data):
    """Copy two sources into one bucket; then move the bucket, a source, or nothing."""
    bucket, first, second = (Arena(data, torch.float32, seed) for seed in range(3))
    owners = []
    for rows, columns in draw_shapes(data):
        owners.append(data.draw(st.integers(0, 1)))
        (first, second)[owners[-1]].place(rows, columns)
        bucket.place(rows, columns)

    def pairs(target: torch.Tensor, *sources: torch.Tensor) -> list[Pair]:
        views = [iter(a.views(m)) for a, m in zip((first, second), sources, strict=True)]
        return [(next(views[o]), t) for o, t in zip(owners, bucket.views(target), strict=True)]

    tensors = [bucket.memory(), first.memory(), second.memory()]
    layout = BoxLayout(pairs(*tensors), tensors)
    references = []  # so that nothing takes the place of what was there
    for moved in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)):
        references += tensors
        if moved < 3:
            tensors[moved] = torch.rand_like(tensors[moved])
        expected = tensors[0].clone()
        reference_copy(pairs(expected, *tensors[1:]))
        layout.run(tensors, data.draw(threads))
        assert torch.equal(bits(tensors[0]), bits(expected))


def test_a_layout_keeps_no_tensor_and_refuses_others_than_it_was_made_for():
    source, target = torch.arange(6.0), torch.zeros(6)
    layout = BoxLayout([(source[2:5], target[:3])], [source, target])
    gone = weakref.ref(target.untyped_storage())
    del target
    assert gone() is None
    for other in (torch.zeros(7), torch.zeros(12)[::2], torch.zeros(6, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"tensor 1 is .* allowed: .*, as it was at first"):
            layout.run([source, other])


def test_a_box_of_a_tensor_is_its_slice_and_is_inside():
    tensor = torch.arange(24).view(2, 3, 4)
    assert torch.equal(narrow_box(tensor, (1, 0, 2), (1, 3, 2)), tensor[1:2, :, 2:4])
    assert narrow_box(tensor, (0, 0, 0), (2, 3, 4)) is tensor
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        narrow_box(tensor, (0, 2, 0), (2, 2, 4))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.permute(2, 0, 1),
        lambda x: x[:, 1:3, ::2],
        lambda x: x[1, :, 2],
        lambda x: x[0, 0, 0],
        lambda x: x[:, :0],
        lambda x: x[2:3, :, :1],
    ],
)
def test_views_of_any_dims_and_strides(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    source = torch.arange(4 * 5 * 6, dtype=torch.float32).view(4, 5, 6)
    for like in (source, source.transpose(0, 2).contiguous().transpose(0, 2)):
        target, expected = torch.zeros_like(like), torch.zeros_like(like)
        copy_boxes([(view(source), view(target))])
        view(expected).copy_(view(source))
        assert torch.equal(target, expected)


def test_one_row_may_be_read_many_times() -> None:
    row, target = torch.arange(7.0), torch.zeros(3, 7)
    copy_boxes([(row.expand(3, 7), target)])
    assert torch.equal(target, row.expand(3, 7))


def test_float32_rounds_to_the_nearest_bfloat16_and_ties_to_even() -> None:
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    every = torch.from_numpy((high[:, None] | low).view(np.float32))
    rounded = torch.empty_like(every, dtype=torch.bfloat16)
    copy_boxes([(every, rounded)])
    expected = every.to(torch.bfloat16)
    is_nan = every.isnan()
    assert torch.equal(bits(rounded[~is_nan]), bits(expected[~is_nan]))
    assert is_nan.any()
    assert (rounded[is_nan].view(torch.int16) == 0x7FC0).all()


def test_every_bfloat16_becomes_the_same_float32() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    expected = every.view(torch.int16).to(torch.int32) << 16
    assert torch.equal(cast(every, torch.float32).view(torch.int32), expected)


# Quantisation


def weight_of(rows: int, columns: int, spread: float, seed: int) -> torch.Tensor:
    """Random values over many orders of magnitude, with zeros and tiny blocks among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    values *= torch.exp2(spread * torch.randn(rows, columns, generator=generator))
    values[:, columns // 2 : columns // 2 + 3] = 0.0
    if seed % 3 == 0:
        values[:128, :128] *= 2.0**-120
    return values.clamp(-1e38, 1e38)


def empty_strided(rows: int, columns: int, gap: int) -> Quantized:
    values = torch.zeros(rows, columns + gap, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.zeros(math.ceil(rows / 128), math.ceil(columns / 128) + gap)
    return Quantized(values[:, :columns], scales[:, : math.ceil(columns / 128)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40)
@given(data=st.data())
def test_quantisation_is_that_of_a_float8_checkpoint(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    pairs, expected = [], []
    for seed in range(data.draw(st.integers(0, 3))):
        rows, columns = (data.draw(st.sampled_from([1, 7, 127, 128, 129, 300])) for _ in range(2))
        spread = data.draw(st.sampled_from([0.0, 2.0, 10.0, 40.0]))
        gap = data.draw(st.sampled_from([0, 1, 8]))
        weight = weight_of(rows, columns + gap, spread, seed).to(dtype)[:, :columns]
        pairs.append((weight, empty_strided(rows, columns, gap)))
        expected.append(quantize_blocks(weight))
    quantize_boxes(pairs, data.draw(threads))
    plain = [(weight, allocate_quantized(weight)) for weight, _ in pairs]
    reference_quantize(plain)
    for (_, quantized), (_, reference), (values, scales) in zip(
        pairs, plain, expected, strict=True
    ):
        for result in (quantized, reference):
            assert torch.equal(bits(result.values), bits(values))
            assert torch.equal(result.scales, scales)


def test_every_magnitude_becomes_the_float8_that_torch_makes_of_it() -> None:
    # Scale 1: the largest is 448. All float16 below it hit every tie of e4m3 and its neighbours.
    every = torch.arange(0x5F01, dtype=torch.int16).view(torch.float16).float()
    every = torch.cat([every, -every, every.nextafter(torch.tensor(torch.inf))]).clamp(-448, 448)
    source = torch.nn.functional.pad(every, (0, -len(every) % 127)).view(-1, 127)
    source = torch.nn.functional.pad(source, (1, 0), value=448.0)
    into = allocate_quantized(source)
    quantize_boxes([(source, into)])
    assert (into.scales == 1.0).all()
    assert torch.equal(bits(into.values), bits(source.to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf, 3.4e38])
def test_what_float8_cannot_hold_is_an_error_and_marks_its_block_only(bad: float) -> None:
    weight = torch.ones(130, 260)
    weight[129, 5] = bad
    pairs = [
        (torch.ones(4, 4), allocate_quantized(torch.ones(4, 4))),
        (weight, allocate_quantized(weight)),
    ]
    with pytest.raises(ValueError, match="weight 1 has NaN, infinity or values too large"):
        quantize_boxes(pairs)
    values, scales = pairs[1][1]
    assert scales.isnan().tolist() == [[False] * 3, [True, False, False]]
    assert values.float().isnan().sum() == 2 * 128
    plain = [(weight, allocate_quantized(weight))]
    reference_quantize(plain)
    assert torch.equal(bits(values), bits(plain[0][1].values))


# What is refused


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), r"box 1: the source is \(2, 3\), the target"),
        (
            torch.zeros(2),
            torch.zeros(2, dtype=torch.float16),
            "from torch.float32 to torch.float16",
        ),
        (torch.zeros(2), torch.zeros(2, device="meta"), "tensors on cpu, meta"),
    ],
)
def test_pairs_that_do_not_fit(source: torch.Tensor, target: torch.Tensor, message: str) -> None:
    fine = torch.zeros(1), torch.zeros(1)
    with pytest.raises(ValueError, match=message):
        BoxCopy([fine, (source, target)])


def test_weights_that_do_not_fit_their_place() -> None:
    weight = torch.zeros(130, 4)
    values, scales = allocate_quantized(weight)
    half = weight.half()
    for bad in [
        (half, Quantized(values, scales)),
        (weight[0], Quantized(values, scales)),
        (weight, Quantized(values[:4], scales)),
        (weight, Quantized(values, scales[:1])),
        (weight, Quantized(values, scales.double())),
        (weight, Quantized(values.float(), scales)),
    ]:
        with pytest.raises(ValueError, match=r"allowed: \[rows, columns\] float32 or bfloat16"):
            BoxQuantize([bad])
    with pytest.raises(ValueError, match="gaps between columns"):
        BoxQuantize([(torch.zeros(4, 130).t(), Quantized(values, scales))])


def test_threads_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="num_threads=0; allowed: at least 1"):
        copy_boxes([(torch.zeros(1), torch.zeros(1))], num_threads=0)


def table(kind: int, *boxes: tuple[int, ...]) -> _csrc.Table:
    words = np.array(boxes, dtype=np.int64).reshape(-1, 8)
    return _csrc.Table(kind, words.ctypes.data, len(words))


HUGE = 1 << 60
FINE = (64, 4096, 2, 8, 32, 32, 0, 0)  # addresses are not read before it runs


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (0, {0: 0}, "source=0; allowed: the address of memory"),
        (0, {1: 0}, "target=0; allowed: the address of memory"),
        (0, {0: -8}, "source=-8"),
        (0, {0: HUGE}, "source="),
        (0, {2: -1}, "rows=-1; allowed: 0"),
        (0, {3: -1}, "items=-1; allowed: 0"),
        (0, {2: 1 << 40, 3: 1 << 40}, "items="),
        (0, {4: -16}, "source_stride=-16"),
        (0, {4: HUGE}, "source_stride="),
        (0, {5: 7}, "target_stride=7; allowed: at least the bytes of a row"),
        (0, {5: HUGE}, "target_stride="),
        (1, {0: 66}, "source=66; allowed: a multiple of the item's size"),
        (1, {1: 4097}, "target=4097; allowed: a multiple"),
        (1, {4: 18}, "source_stride=18; allowed: a multiple"),
        (2, {5: 34}, "target_stride=34; allowed: a multiple"),
        (3, {}, "scales=0; allowed: the address of memory"),
        (3, {6: 8194}, "scales=8194; allowed: a multiple"),
        (3, {2: 300, 3: 300, 4: 1200, 5: 300, 6: 1 << 20, 7: 8}, "scales_stride=8; allowed: at"),
        (8, {}, "kind=8; allowed: 0 to 7"),
        (-1, {}, "kind=-1; allowed: 0 to 7"),
    ],
)
def test_entries_that_cannot_be(kind: int, changes: dict[int, int], message: str) -> None:
    box = tuple(changes.get(n, value) for n, value in enumerate(FINE))
    with pytest.raises(ValueError, match=message):
        table(kind, (*FINE[:6], 1 << 21, 4), box)


def test_tables_that_cannot_be() -> None:
    words = np.array(FINE, dtype=np.int64)
    for address, count in [(0, 1), (words.ctypes.data + 1, 1), (words.ctypes.data, -1)]:
        with pytest.raises(ValueError, match=r"(num_)?boxes="):
            _csrc.Table(0, address, count)
    with pytest.raises(TypeError):
        _csrc.Table(0, -1, 1)


def test_sizes_beyond_32_bits_are_counted_whole() -> None:
    wide = (64, 1 << 50, 3, 5 << 32, 5 << 32, 6 << 32, 0, 0)
    tall = (1 << 45, 1 << 51, 3 << 32, 5, 5, 6, 0, 0)
    tiles = sum(-(-15 * (1 << 32) // TILE_BYTES) for _ in range(2))
    assert table(0, wide, tall).num_tiles == tiles
    assert table(0).num_tiles == 0


def test_boxes_of_nothing_stand_between_others() -> None:
    source, target = np.arange(60, dtype=np.uint8), np.zeros(60, dtype=np.uint8)
    source_address, to = source.ctypes.data, target.ctypes.data
    nothing = [(0, 0, 0, 7, 0, 0, 0, 0), (source_address, to, 7, 0, 0, 0, 0, 0)] * 3
    boxes = [(source_address + n, to + n, 1, 20, 0, 0, 0, 0) for n in (40, 0, 20)]
    table(0, *nothing, boxes[0], *nothing, boxes[1], *nothing, boxes[2], *nothing).run(1)
    assert (source == target).all()


def test_a_stride_that_leads_nowhere_does_not_count() -> None:
    odd = table(0, (64, 4096, 1, 16, 3, -5, 0, 0))
    assert np.frombuffer(odd.words(), dtype=np.int64)[4:6].tolist() == [0, 0]


def test_a_table_on_a_gpu_needs_its_copy_there() -> None:
    with pytest.raises(ValueError, match="on_device=0; allowed: the address of the table's words"):
        table(0, FINE).run_cuda(0, 0, 0)


gaps = st.sampled_from([0, 1, 2, 25, 50])
regions = st.tuples(
    st.integers(1, 120), st.integers(0, 4), st.integers(0, 12), gaps
)  # address, rows, items, gap


def touched(address: int, rows: int, items: int, stride: int) -> set[int]:
    return {address + r * stride + c for r in range(rows) for c in range(items)}


@settings(max_examples=400)
@given(
    boxes=st.lists(st.tuples(regions, st.integers(1, 120), gaps), max_size=4),
    apart=st.integers(0, 130),
    same_stride=st.one_of(st.none(), st.integers(12, 20)),
)
def test_targets_that_touch_anything_are_refused(
    boxes: list[tuple[tuple[int, int, int, int], int, int]], apart: int, same_stride: int | None
) -> None:
    rows, read, written, overlap = [], set(), set(), False
    for (source, num_rows, items, gap), target, target_gap in boxes:
        strides = same_stride or items + gap, same_stride or items + target_gap
        target += apart
        rows.append((source, target, num_rows, items, *strides, 0, 0))
        into = touched(target, num_rows, items, strides[1])
        overlap |= bool(into & written)
        written |= into
        read |= touched(source, num_rows, items, strides[0])
    if overlap or read & written:
        with pytest.raises(ValueError, match=r"box \d overlaps the (source|target) of box \d"):
            table(0, *rows)
    else:
        table(0, *rows)


def test_scales_are_targets_too() -> None:
    weight = torch.zeros(256, 128)
    values, _ = allocate_quantized(weight)
    inside = weight[:1].view(-1)[:2].view(2, 1)
    with pytest.raises(ValueError, match="the source of box 0 overlaps the target of box 0"):
        BoxQuantize([(weight, Quantized(values, inside))])


@pytest.mark.skipif(_csrc.has_cuda, reason="built with CUDA")
def test_a_build_without_cuda_refuses_to_run_on_a_gpu() -> None:
    for kind in (0, 3):
        box = table(kind, (*FINE[:6], 1 << 21, 4))
        with pytest.raises(RuntimeError, match="built without CUDA: install again where nvcc is"):
            box.run_cuda(0, 0, 8)
