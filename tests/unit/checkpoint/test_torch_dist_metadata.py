"""Metadata of distributed checkpoints: what does not hold is refused before tensors are read."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
import subprocess
import zlib
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

from mcore_rl.checkpoint import torch_dist_metadata
from mcore_rl.checkpoint.torch_dist import DistFile, DistReader
from mcore_rl.checkpoint.torch_dist_metadata import write_metadata
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.rules import Box

TENSOR = torch.arange(24.0).reshape(4, 6)


def write(folder, **tensors):
    """Write a checkpoint of one file, each tensor in one chunk."""
    with DistFile(folder / "__0_0.distcp") as file:
        for key, tensor in tensors.items():
            file.add_tensor(key, tensor.shape, (0,) * tensor.dim(), tensor)
    write_metadata(folder, file.records)


def remove(name):
    return lambda folder: (folder / name).unlink()


def rewrite(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def cut(name, by):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - by)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove(".metadata"), r"\.metadata cannot be read: No such file"),
        (remove("metadata.json"), "is not a distributed checkpoint: it has no metadata.json"),
        (rewrite("metadata.json", b"{"), "metadata.json is not valid JSON"),
        (rewrite("metadata.json", b"[]"), "metadata.json is a JSON list"),
        (
            rewrite("metadata.json", b'{"sharded_backend": "zarr"}'),
            "sharded_backend is 'zarr', allow",
        ),
        (remove("__0_0.distcp"), "is not a complete checkpoint: it has no file __0_0.distcp"),
        (cut("__0_0.distcp", 1), r"__0_0.distcp is truncated: it has \d+ bytes of at least \d+"),
        (rewrite(".metadata", b""), r"\.metadata is damaged, or not a checkpoint's metadata"),
        (rewrite(".metadata", b"\x80\x04garbage"), r"\.metadata is damaged, or not a checkpoint's"),
        (rewrite(".metadata", pickle.dumps([1])), "it is a list, not a Metadata"),
        (rewrite(".metadata", b"\x80\x04K\x01.more"), "it has data after its end"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, damage, message):
    write(tmp_path, w=TENSOR)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message):
        DistReader(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        DistReader(tmp_path / "nowhere")


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    write(tmp_path, w=TENSOR)
    (tmp_path / "__0_0.distcp").unlink()
    os.mkfifo(tmp_path / "__0_0.distcp")
    with pytest.raises(ConfigError, match="has no file"):
        DistReader(tmp_path)


def change_metadata(folder, change):
    path = folder / ".metadata"
    stored = pickle.loads(path.read_bytes())
    change(stored)
    path.write_bytes(pickle.dumps(stored))


def find_place(stored, key="w"):
    return next(index for index in stored.storage_data if index.fqn == key)


def info(stored, **changes):
    index = find_place(stored)
    stored.storage_data[index] = replace(stored.storage_data[index], **changes)


def entry(stored, **changes):
    stored.state_dict_metadata["w"] = replace(stored.state_dict_metadata["w"], **changes)


def first_chunk(stored, offsets, sizes):
    stored.state_dict_metadata["w"].chunks[0] = metadata.ChunkStorageMetadata(offsets, sizes)


def same_place(stored):
    index = metadata.MetadataIndex("w", (1, 0))
    stored.storage_data[index] = filesystem._StorageInfo("__0_0.distcp", 0, 10)
    object.__setattr__(index, "offset", torch.Size((0, 0)))


def place_of_nothing(stored):
    index = metadata.MetadataIndex("v", (0, 0))
    stored.storage_data[index] = filesystem._StorageInfo("__0_0.distcp", 0, 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: info(m, relative_path="../w"), r"file of w is '../w', not a name in the folder"),
        (lambda m: info(m, relative_path="/etc/passwd"), "not a name in the folder"),
        (lambda m: info(m, relative_path=".."), "not a name in the folder"),
        (lambda m: info(m, relative_path=""), "not a name in the folder"),
        (lambda m: info(m, relative_path="a\0b"), "not a name in the folder"),
        (lambda m: info(m, relative_path=3), "not a name in the folder"),
        (lambda m: info(m, offset=-1), "offset of w is not a number"),
        (lambda m: info(m, length=1 << 70), "offset of w is not a number"),
        (lambda m: info(m, length=1.5), "offset of w is not a number"),
        (lambda m: info(m, offset=1 << 40), "is truncated"),
        (lambda m: info(m, length=10), "more elements than its item has bytes for"),
        (lambda m: info(m, transform_descriptors=["zstd"]), "through an extension"),
        (lambda m: entry(m, size=torch.Size((5, 6))), r"do not cover its shape \(5, 6\)"),
        (lambda m: entry(m, size=[4, 6]), "size or an offset of w is not a number"),
        (lambda m: entry(m, size=(4, True)), "size or an offset of w is not a number"),
        (lambda m: entry(m, size=(4, 6, 1)), "other dims than its shape"),
        (lambda m: entry(m, chunks=None), "chunks of w is a NoneType"),
        (lambda m: entry(m, chunks=[]), "do not cover"),
        (lambda m: entry(m, chunks=[3]), "a chunk of w is a int, not a ChunkSt"),
        (lambda m: entry(m, properties=None), "properties of w is a NoneType"),
        (lambda m: m.storage_data.pop(find_place(m)), "does not say where w is stored"),
        (lambda m: setattr(m, "storage_data", None), "storage_data is a NoneType, not a dict"),
        (lambda m: setattr(m, "state_dict_metadata", []), "state_dict_metadata is a list"),
        (lambda m: m.state_dict_metadata.pop("w"), "an item of w is part of no tensor"),
        (
            lambda m: m.state_dict_metadata.update({3: 4}),
            "a key is a int, not a str",
        ),
        (lambda m: m.state_dict_metadata.update(v=4), "the entry of v is a int, not a TensorS"),
        (lambda m: first_chunk(m, (1, 0), (4, 6)), "does not say where w is stored"),
        (lambda m: first_chunk(m, (0, 0), (4, 5)), "do not cover"),
        (same_place, "an item of w has two places"),
        (place_of_nothing, "an item of v is part of no tensor"),
    ],
)
def test_metadata_that_does_not_hold_is_refused(tmp_path, change, message):
    write(tmp_path, w=TENSOR)
    change_metadata(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        DistReader(tmp_path)


def test_items_do_not_share_bytes(tmp_path):
    write(tmp_path, a=torch.zeros(2), b=torch.ones(2))

    def swap(stored):
        a, b = find_place(stored, "a"), find_place(stored, "b")
        stored.storage_data[a] = stored.storage_data[b]

    change_metadata(tmp_path, swap)
    with pytest.raises(ConfigError, match=r"two items of __0_0.distcp share the bytes at \d+"):
        DistReader(tmp_path)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (TENSOR.double(), "torch.float64"),
        (TENSOR.reshape(6, 4), r"\(6, 4\)"),
        ({"w": TENSOR}, "it is a dict, not a tensor"),
        (TENSOR.to_sparse(), "the bytes of 2 tensors"),
        (torch.empty(4, 6, device="meta"), "the bytes of 0 tensors"),
        ([TENSOR, TENSOR + 1], "the bytes of 2 tensors"),
    ],
)
def test_an_item_that_is_something_else_than_the_metadata_says_is_refused(
    tmp_path, written, message
):
    write(tmp_path, w=TENSOR)
    torch.save(written, tmp_path / "__0_0.distcp")
    size = (tmp_path / "__0_0.distcp").stat().st_size
    change_metadata(tmp_path, lambda stored: info(stored, length=size))
    with pytest.raises(ConfigError, match=rf"__0_0.distcp: w is damaged .*{message}"):
        DistReader(tmp_path).read("w", Box((0, 0), (4, 6)))


def pack_crc(data):
    return struct.pack("<I", zlib.crc32(data))


def test_an_item_of_the_other_byte_order_is_refused(tmp_path):
    write(tmp_path, w=TENSOR)
    data, old, new = (tmp_path / "__0_0.distcp").read_bytes(), b"little", b"big   "
    changed = data.replace(old, new).replace(pack_crc(old), pack_crc(new))
    (tmp_path / "__0_0.distcp").write_bytes(changed)
    with pytest.raises(ConfigError, match=r"w is damaged .*its bytes are not in little endian"):
        DistReader(tmp_path).read("w", Box((0, 0), (4, 6)))


@pytest.mark.parametrize("stored", [95, 97])
def test_an_item_stored_in_other_than_its_size_is_refused(tmp_path, stored):
    """Change the first of the two sizes, both 4 * 6 * 4 = 96 bytes, in the archive's directory."""
    write(tmp_path, w=TENSOR)
    data, crc = (tmp_path / "__0_0.distcp").read_bytes(), pack_crc(TENSOR.numpy().data)
    start = data.index(b"PK\1\2")
    changed = data[start:].replace(
        crc + struct.pack("<2I", 96, 96), crc + struct.pack("<2I", stored, 96)
    )
    (tmp_path / "__0_0.distcp").write_bytes(data[:start] + changed)
    with pytest.raises(ConfigError, match=r"w is damaged .*it is compressed"):
        DistReader(tmp_path).read("w", Box((0, 0), (4, 6)))


# Pickles as programs.


class Calls:
    """Pickles to a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def build_opcodes(module, name):
    """Return the opcodes that push a class."""
    texts = b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name))
    return texts + b"\x93"


@pytest.mark.parametrize(
    "function", [os.system, subprocess.Popen, eval, exec, __import__, pickle.loads, torch.load]
)
def test_what_does_not_belong_into_metadata_is_refused_before_it_is_called(
    tmp_path, monkeypatch, function
):
    (tmp_path / "ck").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    write(tmp_path / "ck", w=TENSOR)
    call = Calls(function, "touch canary")
    change_metadata(tmp_path / "ck", lambda m: setattr(m, "planner_data", [call]))
    with pytest.raises(ConfigError, match=rf"names [\w.]+\.{function.__name__}, which is not in a"):
        DistReader(tmp_path / "ck")
    assert not list((tmp_path / "empty").iterdir())


DCP = "torch.distributed.checkpoint"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (f"{DCP}.filesystem", "os.system"),
        (f"{DCP}.metadata", "os.system"),
        (f"{DCP}.filesystem", "_generate_uuid"),
        (f"{DCP}.metadata", "os"),
        (f"{DCP}.planner", "SavePlan.__init__"),
        ("torch.distributed", "checkpoint.metadata.Metadata"),
        ("torch", "serialization._get_layout"),
        ("builtins", "getattr"),
    ],
)
def test_names_are_exact_pairs_of_a_module_and_a_class(tmp_path, module, name):
    write(tmp_path, w=TENSOR)
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + build_opcodes(module, name) + b".")
    with pytest.raises(ConfigError, match=f"names {module}.{name}, which is not in a checkpoint's"):
        DistReader(tmp_path)


def test_a_pickle_cannot_change_the_classes_that_it_names(tmp_path):
    """BUILD on a class itself, with (None, {"size": 1}): attributes that it is to have."""
    write(tmp_path, w=TENSOR)
    kind = metadata.TensorStorageMetadata
    change = build_opcodes(kind.__module__, kind.__name__) + b"N}\x8c\x04sizeK\x01s\x86b."
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + change)
    with pytest.raises(ConfigError, match="it is a type, not a Metadata"):
        DistReader(tmp_path)
    assert not hasattr(kind, "size")


def test_memo_places_are_not_the_pickles_to_choose(tmp_path):
    """LONG_BINPUT 2**31 makes the unpickler touch 32 GiB: refused before it runs."""
    write(tmp_path, w=TENSOR)
    (tmp_path / ".metadata").write_bytes(b"\x80\x04]r" + struct.pack("<I", 1 << 31) + b".")
    with pytest.raises(ConfigError, match="opcode LONG_BINPUT at byte 3"):
        DistReader(tmp_path)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_older_protocols_are_refused(tmp_path, protocol):
    write(tmp_path, w=TENSOR)
    stored = pickle.loads((tmp_path / ".metadata").read_bytes())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(stored, protocol))
    with pytest.raises(ConfigError, match="opcode"):
        DistReader(tmp_path)


def test_only_opcodes_of_plain_data_are_known():
    """Check that no other opcode that imports, calls or looks up is allowed."""
    known = set(torch_dist_metadata._OPCODES.split())
    assert known <= {op.name for op in pickletools.opcodes}
    assert known.isdisjoint(
        {"GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "PUT"}
    )
    assert not any(name.endswith("PUT") or name.startswith("BYTEARRAY") for name in known)
