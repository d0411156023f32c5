"""Tensors framed here are those of torch.save, to torch, to zipfile, and to our own reader."""

from __future__ import annotations

import io
import os
import tempfile
import zipfile

import pytest
import torch

from mcore_rl.checkpoint import torch_dist

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(), (1,), (3,), (5, 7), (1, 2, 3, 4), (129, 33), (600, 1000)]


def build_item(tensor):
    with tempfile.TemporaryFile() as file:
        assert torch_dist.write_item(file.fileno(), 0, tensor) == os.fstat(file.fileno()).st_size
        return file.read()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_item_is_what_torch_save_writes(shape, dtype):
    tensor = torch.randn(shape).to(dtype)
    written = zipfile.ZipFile(io.BytesIO(build_item(tensor)))
    saved = io.BytesIO()
    torch.save(tensor, saved)
    expected = zipfile.ZipFile(saved)
    assert written.testzip() is None
    for name in written.namelist():
        assert written.read(name) == expected.read(name), name
    loaded = torch.load(io.BytesIO(build_item(tensor)), weights_only=True)
    assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
    assert torch.equal(loaded, tensor)


def test_a_part_of_a_storage_is_written_alone():
    storage = torch.randn(1000, 10)
    item = build_item(storage[20:30])
    assert len(item) < 1500
    assert torch.equal(torch.load(io.BytesIO(item), weights_only=True), storage[20:30])


@pytest.fixture
def item(tmp_path):
    """(descriptor, offset, length, tensor) of an item in the middle of a file."""
    tensor = torch.randn(40, 30)
    data = build_item(tensor)
    path = tmp_path / "file"
    path.write_bytes(b"before" + data + b"behind")
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor, 6, len(data), tensor
    os.close(descriptor)


def test_an_item_is_read_into_memory_that_is_there(item):
    descriptor, offset, nbytes, tensor = item
    out = torch.zeros(40, 30)
    assert torch_dist.read_item(descriptor, offset, nbytes, out)
    assert torch.equal(out, tensor)


def test_every_changed_bit_is_seen(item):
    """Check that the frame differs, which the general reader handles, or the checksum."""
    descriptor, offset, nbytes, _ = item
    seen = {"frame": 0, "data": 0}
    for place in [*range(400), *range(400, nbytes, 97), *range(nbytes - 300, nbytes)]:
        [byte] = os.pread(descriptor, 1, offset + place)
        os.pwrite(descriptor, bytes([byte ^ 1 << place % 8]), offset + place)
        try:
            assert not torch_dist.read_item(descriptor, offset, nbytes, torch.zeros(40, 30)), place
            seen["frame"] += 1
        except ValueError:
            seen["data"] += 1
        os.pwrite(descriptor, bytes([byte]), offset + place)
    assert min(seen.values()) > 30
    assert torch_dist.read_item(descriptor, offset, nbytes, torch.zeros(40, 30))


@pytest.mark.parametrize(
    "other", [torch.zeros(30, 40), torch.zeros(40, 30).half(), torch.zeros(40, 30).int()]
)
def test_an_item_of_another_shape_or_dtype_is_left_to_the_general_reader(item, other):
    descriptor, offset, nbytes, _ = item
    assert not torch_dist.read_item(descriptor, offset, nbytes, other)


def test_what_torch_saved_is_left_to_the_general_reader(tmp_path):
    torch.save(torch.zeros(3, 4), tmp_path / "file")
    with open(tmp_path / "file", "rb") as file:
        size = os.fstat(file.fileno()).st_size
        assert not torch_dist.read_item(file.fileno(), 0, size, torch.zeros(3, 4))


def test_large_and_odd_tensors_are_not_framed():
    assert not torch_dist.is_framed(torch.float32, 1 << 31)
    assert not torch_dist.is_framed(torch.int64, 8)
    assert not torch_dist.is_framed(torch.float32, 0)
