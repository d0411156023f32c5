"""The CUDA kernels of csrc do what its C++ does, bit for bit where that is promised."""

import itertools

import numpy as np
import pytest
import torch

from mcore_rl import _csrc
from mcore_rl.reshard.ops import (
    BoxChecksum,
    BoxCopy,
    BoxQuantize,
    Quantized,
    allocate_quantized,
    compute_checksums,
    copy_boxes,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

KINDS = [
    (torch.uint8, torch.uint8),
    (torch.bfloat16, torch.bfloat16),
    (torch.int64, torch.int64),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]
# Odd sizes, sizes around vectors and tiles, thin and wide rows.
SHAPES = [(1, 1), (3, 5), (1000, 1), (7, 16), (5, 4096), (4, 8193), (33, 130), (2, 100_003), (1, 0)]
Views = list[torch.Tensor]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


def random_bits(items: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.frombuffer(bytearray(rng.bytes(items * dtype.itemsize)), dtype=dtype)


def views_of(memory: torch.Tensor, offset: int, gap: int) -> Views:
    """Return views of every shape, one behind the other."""
    views = []
    for rows, columns in SHAPES:
        stride = columns + gap
        views.append(memory.as_strided((rows, columns), (stride, 1), offset))
        offset += rows * stride
    return views


def test_it_was_built_with_cuda() -> None:
    assert _csrc.has_cuda, "a GPU is here, and csrc was built without nvcc"


@pytest.mark.parametrize("dtypes", KINDS, ids=str)
@pytest.mark.parametrize(("offset", "gap"), [(0, 0), (0, 16), (1, 0), (2, 3), (8, 8)])
def test_boxes_are_those_of_the_cpu_and_nothing_else_is_written(
    dtypes: tuple[torch.dtype, torch.dtype], offset: int, gap: int
) -> None:
    items = sum(rows * (columns + gap) for rows, columns in SHAPES) + 64
    source, target = (random_bits(items, dtype, seed) for seed, dtype in enumerate(dtypes))
    on_gpu = source.cuda(), target.cuda()
    copy_boxes(zip(*(views_of(m, offset, gap) for m in on_gpu), strict=True))
    copy_boxes(zip(views_of(source, offset, gap), views_of(target, offset, gap), strict=True))
    assert torch.equal(bits(on_gpu[1]), bits(target))


@pytest.mark.parametrize("dtypes", KINDS, ids=str)
def test_source_and_target_need_not_be_aligned_alike(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    source, target = (random_bits(100_000, dtype, 3) for dtype in dtypes)
    for start in range(17):
        results = []
        for device in ("cpu", "cuda"):
            read, written = source.to(device), target.to(device, copy=True)
            box = read.as_strided((77, 1024 + start), (1100, 1), start)
            copy_boxes([(box, written.as_strided(box.shape, (1103 + start, 1), 2 * start + 1))])
            results.append(bits(written))
        assert torch.equal(*results)


@pytest.mark.parametrize("dtypes", KINDS, ids=str)
@pytest.mark.parametrize("apart", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("more_stride", [0, 16, 8, 1])
def test_heads_and_tails_of_misaligned_rows_arrive(
    dtypes: tuple[torch.dtype, torch.dtype], apart: int, more_stride: int
) -> None:
    """Source and target are aligned alike, to fewer items, or otherwise in each row."""
    widths = (129, 600, 4097, 8192, 20_001)
    source, target = (random_bits(17 * 3 * 4 * 8192, dtype, 4) for dtype in dtypes)
    on_gpu = source.cuda(), target.cuda()
    for read, written in ((source, target), on_gpu):
        boxes, offset = [], 0
        for past, columns in itertools.product(range(16), widths[: 5 if apart == 0 else 3]):
            stride = -(-columns // 16) * 16
            views = [
                memory.as_strided((2, columns), (step, 1), offset + start)
                for memory, step, start in (
                    (read, stride, past),
                    (written, stride + more_stride, past + apart),
                )
            ]
            boxes.append((views[0], views[1]))
            offset += 2 * (stride + 16) + 64
        copy_boxes(boxes)
    assert torch.equal(bits(on_gpu[1]), bits(target))


def test_thousands_of_boxes_and_one_large_one_twice() -> None:
    rng = np.random.default_rng(0)
    sizes = [int(n) for n in rng.integers(1, 9000, 20_000)] + [300_000_007]
    starts = np.cumsum([0, *sizes]).tolist()
    source = torch.randint(0, 256, (starts[-1],), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    ends = [starts[-1] - start for start in starts]
    copy = BoxCopy(
        (source[a : a + n], target[b - n : b])
        for a, b, n in zip(starts[:-1], ends[:-1], sizes, strict=True)
    )
    for _ in range(2):
        copy.run()
        pieces = [source[a : a + n] for a, n in zip(starts[:-1], sizes, strict=True)]
        assert torch.equal(target, torch.cat(pieces[::-1]))
        source.bitwise_not_()


def test_offsets_beyond_32_bits() -> None:
    size = (1 << 32) + 4099
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    target = torch.ones_like(source)
    source[-5:] = torch.arange(7, 12, dtype=torch.uint8, device="cuda")
    copy_boxes([(source, target)])
    assert torch.equal(target, source)
    columns = source[: 3 << 30].view(3, 1 << 30)[:, 5 : (1 << 29) + 6]
    target.fill_(1)
    copy_boxes([(columns, target[: 3 << 30].view(3, 1 << 30)[:, 6 : (1 << 29) + 7])])
    assert int(target.sum()) == size - columns.numel() + int(columns.sum())


def test_it_runs_in_the_current_stream() -> None:
    stream = torch.cuda.Stream()
    source, target = torch.zeros(1 << 24, device="cuda"), torch.zeros(1 << 24, device="cuda")
    copy = BoxCopy([(source, target)])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        source.fill_(3.0)
        copy.run()
        copied = target.clone()
    stream.synchronize()
    assert (copied == 3.0).all()


def test_it_can_be_captured_and_replayed() -> None:
    source, target = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    copy = BoxCopy([(source, target)])
    copy.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy.run()
    source.fill_(5.0)
    graph.replay()
    assert (target == 5.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 1000), (1024, 2048)])
@pytest.mark.parametrize("gap", [0, 1, 8, 16])
def test_quantisation_is_that_of_the_cpu(
    dtype: torch.dtype, shape: tuple[int, int], gap: int
) -> None:
    generator = torch.Generator().manual_seed(gap)
    padded = torch.randn(shape[0], shape[1] + gap, generator=generator)
    padded *= torch.exp2(12 * torch.randn(padded.shape, generator=generator))
    padded.view(-1)[-5:] = torch.tensor([0.0, -0.0, 1e-44, -1e-40, 448.0])[-padded.numel() :]
    source = padded.to(dtype)[:, gap:]
    values = torch.zeros(padded.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = allocate_quantized(source).scales
    on_gpu = Quantized(values.cuda()[:, gap:], scales.cuda())
    into = Quantized(values[:, gap:], scales)
    moved = padded.to(dtype).cuda()[:, gap:]
    for pair in ((source, into), (moved, on_gpu)):
        BoxQuantize([pair]).run()
    assert torch.equal(bits(on_gpu.scales), bits(into.scales))
    assert torch.equal(bits(on_gpu.values), bits(into.values))


def test_a_block_with_an_infinity_is_marked() -> None:
    weight = torch.ones(256, 256, device="cuda")
    weight[200, 10] = torch.inf
    quantize = BoxQuantize([(weight, into := allocate_quantized(weight))])
    quantize.run()
    assert into.scales.isnan().tolist() == [[False, False], [True, False]]
    with pytest.raises(ValueError, match="weight 0 has NaN, infinity"):
        quantize.check()


CHECKSUMS = [*((d, d) for d in (torch.bfloat16, torch.float32, torch.int64)), *KINDS[-2:]]


@pytest.mark.parametrize("dtypes", CHECKSUMS, ids=str)
@pytest.mark.parametrize(("offset", "gap"), [(0, 0), (0, 16), (1, 0), (2, 3), (4, 4), (8, 8)])
def test_checksums_are_those_of_the_cpu(
    dtypes: tuple[torch.dtype, torch.dtype], offset: int, gap: int
) -> None:
    items = sum(rows * (columns + gap) for rows, columns in SHAPES) + 64
    memory = random_bits(items, dtypes[0], 5)
    checksums = []
    for source in (memory, memory.cuda()):
        views = views_of(source, offset, gap)
        views += [views[5].t(), views[6].view(33, 13, 10)[:, 1::2, ::3] if not gap else views[6]]
        checksum = BoxChecksum((view, dtypes[1]) for view in views)
        checksums += [checksum.run().tolist(), checksum.run().tolist()]  # each begins at zero
    assert checksums == checksums[:1] * 4


def test_checksums_of_thousands_of_boxes_and_one_large_one() -> None:
    rng = np.random.default_rng(0)
    sizes = [int(n) for n in rng.integers(0, 9000, 20_000)] + [150_000_003]
    starts = np.cumsum([0, *sizes]).tolist()
    source = torch.randint(-(1 << 15), 1 << 15, (starts[-1],), dtype=torch.int16)
    checksums = [
        compute_checksums(
            (memory[a : a + n], memory.dtype) for a, n in zip(starts[:-1], sizes, strict=True)
        ).cpu()
        for memory in (source, source.cuda())
    ]
    assert torch.equal(*checksums)


def test_every_bit_that_flips_changes_the_checksum() -> None:
    source = random_bits(64, torch.bfloat16, 1).cuda()
    box = source.view(4, 16)[:, 1:14]
    checksum = BoxChecksum([(box, box.dtype)])
    before, seen = checksum.run().item(), set()
    for bit in range(16):
        for row, column in np.ndindex(4, 13):
            flipped = 1 << bit if bit < 15 else -(1 << 15)
            box.view(torch.int16)[row, column] ^= flipped
            seen.add(checksum.run().item())
            box.view(torch.int16)[row, column] ^= flipped
    assert before not in seen
    assert len(seen) == 16 * 4 * 13
    assert checksum.run().item() == before


def test_checksums_are_computed_in_the_current_stream() -> None:
    stream, source = torch.cuda.Stream(), torch.zeros(1 << 24, device="cuda")
    expected = compute_checksums([(torch.full((1 << 24,), 3.0), torch.float32)])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        source.fill_(3.0)
        checksums = compute_checksums([(source, torch.float32)])
        assert not stream.query()  # the host has not waited
        source.zero_()
    stream.synchronize()
    assert checksums.cpu().tolist() == expected.tolist()
