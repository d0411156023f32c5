"""A safetensors file is read by position: any box, any dtype, and nothing that is damaged."""

from __future__ import annotations

import gc
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mcore_rl.checkpoint import files, hf
from mcore_rl.checkpoint.hf import DTYPES, Entry, SafetensorsFile
from mcore_rl.checkpoint.hf_writer import TensorPlan, plan_shards, write_shard
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.rules import Box

SHAPES = {"scalar": (), "vector": (7,), "matrix": (9, 5), "cube": (4, 3, 6)}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "a.safetensors"
    save_file(tensors() | {"empty": torch.empty(0, 3)}, path)
    return path


def write_with_checksums(folder: Path) -> Path:
    """Write a file with checksums."""
    tensors_by_name = tensors()
    plans = [TensorPlan(name, tuple(t.shape), t.dtype) for name, t in tensors_by_name.items()]
    [shard] = plan_shards(plans, 1 << 30)
    write_shard(folder, shard, tensors_by_name.items())
    return folder / shard.file


def read(file: SafetensorsFile, name: str, box: Box | None = None) -> torch.Tensor:
    entry = file.entries[name]
    out = torch.full(entry.shape if box is None else box.sizes, 7, dtype=entry.dtype)
    file.read_into(name, box, out)
    return out


@st.composite
def boxes(draw: st.DrawFn) -> tuple[str, Box]:
    name = draw(st.sampled_from(sorted(SHAPES)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in SHAPES[name])
    sizes = (draw(st.integers(1, size - o)) for size, o in zip(SHAPES[name], offsets, strict=True))
    return name, Box(offsets, tuple(sizes))


@pytest.mark.parametrize("rows_bytes", [1, 60, 16 << 20])
@given(case=boxes(), gap=st.integers(0, 2))
def test_any_box_is_read_as_the_slice_of_its_tensor(path, rows_bytes, case, gap):
    """Into memory in one piece, or between other elements, which stay as they are."""
    name, box = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "_ROWS_BYTES", rows_bytes)
        patch.setattr(files, "_READ_BYTES", 13)
        wide = torch.full([size + gap for size in box.sizes], -1.0)
        out = wide[tuple(slice(0, size) for size in box.sizes)]
        SafetensorsFile(path).read_into(name, box, out)
    assert torch.equal(out, tensors()[name][box.slices])
    assert (wide == -1).sum() == wide.numel() - out.numel()


def test_a_whole_tensor_is_read_without_a_box(path):
    file = SafetensorsFile(path)
    for name, tensor in tensors().items():
        assert torch.equal(read(file, name), tensor)
    assert read(file, "empty").shape == (0, 3)


def test_a_whole_tensor_is_read_between_other_elements(path):
    wide = torch.zeros(9, 6)
    SafetensorsFile(path).read_into("matrix", None, wide[:, :5])
    assert torch.equal(wide[:, :5], tensors()["matrix"])
    assert not wide[:, 5].any()


def test_a_read_that_the_kernel_cuts_short_goes_on(tmp_path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: preadv(fd, [into[0][:5]], offset))
    file = SafetensorsFile(write_with_checksums(tmp_path))
    for name, tensor in tensors().items():
        assert torch.equal(read(file, name), tensor)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_read_bit_for_bit(tmp_path, name):
    dtype = DTYPES[name]
    tensor = torch.arange(24, dtype=torch.uint8).view(torch.uint8) % 2
    tensor = tensor.to(dtype) if dtype == torch.bool else tensor.repeat(8).view(dtype)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert file.entries["a"].dtype == dtype
    values = read(file, "a")
    assert torch.equal(values.view(torch.uint8), tensor.view(torch.uint8))


def test_an_entry_says_where_the_bytes_stand(path):
    entry = SafetensorsFile(path).entries["matrix"]
    assert entry == Entry(torch.float32, (9, 5), entry.offset, 180)
    stored = path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    assert stored == tensors()["matrix"].numpy().tobytes()


def test_another_shape_or_dtype_is_an_error_of_the_caller(path):
    file = SafetensorsFile(path)
    for out in (torch.empty(5, 9), torch.empty(9, 5, dtype=torch.float16)):
        with pytest.raises(ValueError, match="do not fit"):
            file.read_into("matrix", None, out)


def test_nothing_stays_open_or_mapped(path):
    def count_open_files() -> tuple[int, bool]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), str(path) in maps

    gc.collect()  # what earlier tests have left
    before = count_open_files()
    file = SafetensorsFile(path)
    read(file, "matrix")
    read(file, "matrix", Box((1, 1), (2, 2)))
    assert count_open_files() == before
    assert not before[1]


def test_threads_read_at_the_same_time(path):
    file, expected = SafetensorsFile(path), tensors()["matrix"]
    with ThreadPoolExecutor(8) as pool:
        rows = pool.map(
            lambda n: (n % 9, read(file, "matrix", Box((n % 9, 0), (1, 5)))), range(200)
        )
        assert all(torch.equal(row[0], expected[n]) for n, row in rows)


def test_each_flipped_bit_of_a_tensor_is_named(tmp_path):
    path = write_with_checksums(tmp_path)
    data, file = path.read_bytes(), SafetensorsFile(path)
    for name, entry in file.entries.items():
        for offset in {entry.offset, entry.offset + entry.nbytes - 1}:
            for bit in range(8):
                damaged = bytearray(data)
                damaged[offset] ^= 1 << bit
                path.write_bytes(damaged)
                with pytest.raises(
                    ConfigError,
                    match=rf"tensor {name} of .*model\.safetensors is damaged: its checksum is "
                    r"[0-9a-f]{8} instead of [0-9a-f]{8}$",
                ):
                    read(SafetensorsFile(path), name)


def test_a_whole_box_and_memory_with_gaps_are_compared_with_the_checksum_too(tmp_path):
    path = write_with_checksums(tmp_path)
    entry = SafetensorsFile(path).entries["matrix"]
    damaged = bytearray(path.read_bytes())
    damaged[entry.offset] ^= 1
    path.write_bytes(damaged)
    file = SafetensorsFile(path)
    for out in (torch.empty(9, 5), torch.empty(9, 6)[:, :5]):
        with pytest.raises(ConfigError, match=r"tensor matrix of .* is damaged"):
            file.read_into("matrix", Box((0, 0), (9, 5)), out)


def with_header(path: Path, change) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def checksums(first: object) -> str:
    return json.dumps(dict.fromkeys(SHAPES, "00000000") | {"scalar": first})


def set_checksums(text: str):
    return lambda header: header["__metadata__"].update({"mcore_rl.crc32": text})


def rename(header: dict) -> None:
    header["a\nb"] = header.pop("vector")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename, r"'a\\nb' is not the name of a tensor"),
        (
            lambda h: h["vector"].update(dtype="U32", shape=[7]),
            "tensor vector has dtype U32, which",
        ),
        (lambda h: h["vector"].update(shape=[8]), "cannot be read as safetensors"),
        (
            lambda h: h.update(vector={**h["vector"], "shape": [-7]}),
            "cannot be read as safetensors",
        ),
        (set_checksums("{"), "mcore_rl.crc32 is not valid JSON"),
        (set_checksums("[]"), "mcore_rl.crc32 is a JSON list, not an object"),
        (set_checksums(checksums("1")), "mcore_rl.crc32 of tensor scalar is '1', not a CRC32"),
        (set_checksums(checksums(1)), "mcore_rl.crc32 of tensor scalar is 1, not a CRC32"),
        (set_checksums(checksums("0000000G")), "is '0000000G', not a CRC32"),
        (set_checksums("{}"), "mcore_rl.crc32 names other tensors than the header"),
    ],
)
def test_a_header_that_is_no_models_is_refused(tmp_path, change, message):
    path = write_with_checksums(tmp_path)
    with_header(path, change)
    with pytest.raises(ConfigError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 7, 8, 100, -1])
def test_a_truncated_file_is_refused(path, tmp_path, length):
    (tmp_path / "a.safetensors").write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConfigError, match=r"a\.safetensors cannot be read as safetensors"):
        SafetensorsFile(tmp_path / "a.safetensors")


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent.safetensors"):
        with pytest.raises(ConfigError, match="cannot be read as safetensors"):
            SafetensorsFile(path)


def test_a_file_that_changes_behind_its_header_is_refused(path, tmp_path):
    copy = tmp_path / "a.safetensors"
    copy.write_bytes(path.read_bytes())
    file = SafetensorsFile(copy)
    copy.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ConfigError, match="has changed since its header was read"):
        read(file, "matrix")
    copy.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(file, "matrix")
