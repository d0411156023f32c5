"""Distributed checkpoints written and read without Megatron."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.checkpoint.torch_dist import DistFile, DistReader
from mcore_rl.checkpoint.torch_dist_metadata import DistItem, Record, covers_once, write_metadata
from mcore_rl.reshard.rules import Box

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8]
TENSOR = torch.arange(24.0).reshape(4, 6)


def get_full_box(tensor):
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def write(folder, *chunks, file="__0_0.distcp", objects=()):
    """Write a checkpoint of one file with chunks (key, shape, offsets, tensor)."""
    folder.mkdir(exist_ok=True)
    with DistFile(folder / file) as out:
        for chunk in chunks:
            out.add_tensor(*chunk)
        for key, data in objects:
            out.add_object(key, data)
    write_metadata(folder, out.records)
    return out.records


def is_same(a, b):
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4, 5)])
def test_a_tensor_comes_back_as_it_was(tmp_path, dtype, shape):
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 3).to(dtype)
    write(tmp_path, ("w", shape, (0,) * len(shape), tensor))
    reader = DistReader(tmp_path)
    assert (reader.tensors["w"].shape, reader.tensors["w"].dtype) == (shape, dtype)
    assert is_same(reader.read("w", get_full_box(tensor)), tensor)


@st.composite
def draw_partitions(draw):
    """Draw a shape of up to four dims, a partition into boxes, and a box inside."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(0, box.sizes[dim]))
        for start, size in ((0, first), (first, box.sizes[dim] - first)):
            if size:
                offsets, sizes = list(box.offsets), list(box.sizes)
                offsets[dim] += start
                sizes[dim] = size
                boxes.append(Box(tuple(offsets), tuple(sizes)))
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, starts, strict=True))
    return shape, boxes, Box(starts, sizes)


@given(case=draw_partitions(), dtype=st.sampled_from(DTYPES[:4]), num_files=st.integers(1, 3))
def test_any_box_of_any_partition_reads_back(tmp_path_factory, case, dtype, num_files):
    folder, (shape, boxes, box) = tmp_path_factory.mktemp("parts"), case
    tensor = (torch.arange(Box(box.offsets, shape).numel) % 97).reshape(shape).to(dtype)
    records = []
    for number in range(num_files):
        with DistFile(folder / f"__{number}_0.distcp") as file:
            for box in boxes[number::num_files]:
                file.add_tensor("w", shape, box.offsets, tensor[box.slices])
        records += file.records
    write_metadata(folder, records)
    read = DistReader(folder).read("w", box)
    assert is_same(read, tensor[box.slices])
    assert read.is_contiguous()


def test_layers_may_be_stacked_and_files_hold_many_tensors(tmp_path):
    layers = torch.randn(3, 4, 2)
    chunks = [("layers.w", (3, 4, 2), (i, 0, 0), layers[i : i + 1]) for i in range(3)]
    write(tmp_path, *chunks, ("norm", (5,), (0,), torch.ones(5)))
    reader = DistReader(tmp_path)
    assert is_same(reader.read("layers.w", Box((1, 0, 0), (1, 4, 2))), layers[1:2])
    assert is_same(reader.read("layers.w", Box((1, 2, 0), (2, 1, 2))), layers[1:3, 2:3])
    assert is_same(reader.read("norm", Box((0,), (5,))), torch.ones(5))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torchs_own_loader_reads_what_is_written(tmp_path):
    write(tmp_path, ("w", (4, 6), (0, 0), TENSOR[:3]), ("w", (4, 6), (3, 0), TENSOR[3:]))
    state = {"w": torch.zeros(4, 6)}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["w"], TENSOR)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_torchs_own_writer_writes_is_read(tmp_path):
    state = {"w": TENSOR, "half": TENSOR.bfloat16().t(), "nested": {"step": torch.tensor(3)}}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    reader = DistReader(tmp_path)
    assert set(reader.tensors) == {"w", "half", "nested.step"}
    assert is_same(reader.read("w", Box((0, 0), (4, 6))), TENSOR)
    half = reader.read("half", Box((0, 0), (6, 4)))
    assert is_same(half, TENSOR.bfloat16().t())
    assert half.is_contiguous()
    assert reader.read("nested.step", Box((), ())).item() == 3


def test_bytes_do_not_depend_on_time_order_or_the_way_of_the_records(tmp_path):
    rows = [("layer.weight", (4, 6), (i, 0), TENSOR[i : i + 1].clone()) for i in range(4)]
    objects = [("o/shard_0_1", b"bytes"), ("p/shard_0_1", b"more")]
    records = write(tmp_path / "a", *rows, objects=objects)
    write(tmp_path / "b", *rows, objects=objects)
    carried = [Record(*json.loads(json.dumps(record))) for record in reversed(records)]
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [".metadata", "__0_0.distcp", "common.distcp", "metadata.json"]
    first = {name: (tmp_path / "a" / name).read_bytes() for name in files}
    assert first == {name: (tmp_path / "b" / name).read_bytes() for name in files}
    write_metadata(tmp_path / "b", carried)
    assert (tmp_path / "b/.metadata").read_bytes() == first[".metadata"]


def test_a_view_is_written_without_the_rest_of_its_storage(tmp_path):
    large = torch.zeros(1 << 20)
    write(tmp_path, ("w", (4,), (0,), large[:4]), ("t", (6, 4), (0, 0), TENSOR.t()))
    assert (tmp_path / "__0_0.distcp").stat().st_size < 4000
    assert is_same(DistReader(tmp_path).read("t", Box((0, 0), (6, 4))), TENSOR.t())


def test_a_tensor_is_written_without_a_copy_and_released(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_, **__: pytest.fail("it was copied"))
    tensor = torch.ones(1000, requires_grad=True)
    gone = weakref.ref(tensor)
    with DistFile(tmp_path / "x.distcp") as file:
        file.add_tensor("w", (1000,), (0,), tensor)
        del tensor
        assert gone() is None


def test_a_file_has_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "__0_0.distcp"
    with DistFile(path) as file:
        file.add_tensor("w", (4, 6), (0, 0), TENSOR)
        assert not path.exists()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    path.unlink()
    with pytest.raises(OSError, match="disk"), DistFile(path) as file:
        file.add_tensor("w", (4, 6), (0, 0), TENSOR)
        raise OSError("disk is full")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_elements", [1000, 1_000_000])
def test_a_full_disk_raises_its_os_error(tmp_path, num_elements):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensor = torch.zeros(num_elements)
    with pytest.raises(OSError) as raised, DistFile(tmp_path / "__0_0.distcp") as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
        try:
            for number in range(200):
                file.add_tensor(f"w{number}", (num_elements,), (0,), tensor)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())


def test_reads_that_the_kernel_cuts_go_on(tmp_path, monkeypatch):
    """Shorten reads, as Linux does above 2 GiB."""
    tensor = torch.arange(100_000)
    write(tmp_path, ("w", (100_000,), (0,), tensor))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, start: preadv(fd, [views[0][:1000]], start))
    assert is_same(DistReader(tmp_path).read("w", Box((0,), (100_000,))), tensor)


def test_a_box_outside_of_the_tensor_is_a_bug(tmp_path):
    write(tmp_path, ("w", (4, 6), (0, 0), TENSOR))
    with pytest.raises(ValueError, match="not inside w"):
        DistReader(tmp_path).read("w", Box((3, 0), (2, 6)))


def test_two_records_of_one_place_are_a_bug(tmp_path):
    records = write(tmp_path, ("w", (4, 6), (0, 0), TENSOR))
    with pytest.raises(ValueError, match="two records of w"):
        write_metadata(tmp_path, records * 2)


def chunk_at(offsets, sizes):
    return DistItem("", 0, 0, tuple(offsets), tuple(sizes))


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_cover_once_agrees_with_counting(num_dims):
    """Try every set of up to three boxes of a small tensor."""
    shape = (3, 2, 1)[:num_dims]
    spans = [[(o, n) for o in range(s + 1) for n in range(s + 1)] for s in shape]
    boxes = [tuple(zip(*spans_of, strict=True)) for spans_of in itertools.product(*spans)]
    if num_dims == 3:
        boxes = boxes[::3]
    num_covers = 0
    for count in (1, 2, 3) if num_dims == 1 else (1, 2):
        for chosen in itertools.combinations(boxes, count):
            times = torch.zeros([s * 2 + 2 for s in shape], dtype=torch.int64)
            for offsets, sizes in chosen:
                times[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
            inside = times[tuple(slice(s) for s in shape)]
            truth = bool((inside == 1).all()) and int(times.sum()) == inside.numel()
            assert covers_once(shape, [chunk_at(*box) for box in chosen]) == truth, chosen
            num_covers += truth
    assert num_covers > 1


def test_boxes_around_a_middle_cover_and_a_shifted_one_does_not():
    pinwheel = [
        ((0, 0), (2, 1)),
        ((2, 0), (1, 2)),
        ((1, 2), (2, 1)),
        ((0, 1), (1, 2)),
        ((1, 1), (1, 1)),
    ]
    assert covers_once((3, 3), [chunk_at(*box) for box in pinwheel])
    pinwheel[-1] = ((0, 0), (1, 1))
    assert not covers_once((3, 3), [chunk_at(*box) for box in pinwheel])


def test_a_tensor_without_elements_is_known(tmp_path):
    write(tmp_path, ("none", (0, 4), (0, 0), torch.empty(0, 4)))
    assert DistReader(tmp_path).tensors["none"].shape == (0, 4)
