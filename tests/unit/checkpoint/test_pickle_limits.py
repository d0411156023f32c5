"""Pickles of a checkpoint that are small, and would be hashed, printed or walked for years."""

from __future__ import annotations

import io
import pickle
import random
import time
import zipfile
from collections import Counter, OrderedDict

import pytest
import torch

from mcore_rl.checkpoint.pickle_limits import check_nesting, check_pickle
from mcore_rl.checkpoint.torch_dist import DistFile, DistReader
from mcore_rl.checkpoint.torch_dist_metadata import write_metadata
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.rules import Box
from tests.odd_files import ODD_KINDS, make_odd_file

LEVELS = 60  # 2**60 values
DCP = "torch.distributed.checkpoint.metadata"
EMPTY_DICT, SETITEM, STOP, NONE, BUILD, REDUCE, NEWOBJ = b"}", b"s", b".", b"N", b"b", b"R", b"\x81"


def nest(levels: int = LEVELS) -> bytes:
    """Return opcodes of (((), ()), ((), ())), each level named twice in the next."""
    return b")\x94" + b"".join(bytes((ord("h"), i)) + b"\x86\x94" for i in range(levels))


def nest_once(levels: int) -> bytes:
    return b")" + b"\x85" * levels


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def new(attribute: str, module: str = DCP) -> bytes:
    return name(module, attribute) + b")" + NEWOBJ


def build_index(fqn: bytes) -> bytes:
    return new("MetadataIndex") + b"}" + text("fqn") + fqn + b"s" + BUILD


# Keys that only call for the next one when they are there: 2**60 through dicts and torch.Size.
def nest_by_dicts(levels: int) -> bytes:
    key = b")\x94"
    for index in range(levels):
        pairs = b"".join(
            bytes((ord("h"), 2 * index)) + b"K" + bytes([i]) + b"\x86Ns" for i in (1, 2)
        )
        key += name("torch", "Size") + name("collections", "OrderedDict") + b")R" + pairs
        key += b"\x94\x85R\x94"
    return key


HASHED = {
    "key": b"}" + nest() + b"Ns",
    "key of several": b"}(" + nest() + b"Nu",
    "name of an item": b"}" + build_index(nest()) + b"Ns",
    "names inside": b"}" + build_index(nest()) + b"\x85Ns",
    "size": b"}" + name("torch", "Size") + nest() + b"\x85R" + b"Ns",
    "sizes of dicts": nest_by_dicts(LEVELS) + b"}h" + bytes([2 * LEVELS]) + b"Ns",
    "state": new("Metadata") + b"}" + nest() + b"Ns" + BUILD,
    "pairs of a dict": name("collections", "OrderedDict") + b"]]" + nest() + b"aNaa\x85R",
    "deep key": b"}" + nest_once(200_000) + b"Ns",
    "deep name": b"}" + build_index(nest_once(200_000)) + b"\x85" + b"Ns",
}


@pytest.fixture
def checkpoint(tmp_path):
    tensor = torch.arange(24.0).reshape(4, 6)
    with DistFile(tmp_path / "__0_0.distcp") as file:
        file.add_tensor("w", tensor.shape, (0, 0), tensor)
    write_metadata(tmp_path, file.records, {"a": [1, {"b": (2, 3)}]})
    return tmp_path


def require_quick_refusal(read, message: str) -> None:
    start_s = time.process_time()
    with pytest.raises(ConfigError, match=message):
        read()
    assert time.process_time() - start_s < 10


@pytest.mark.parametrize("name", HASHED)
def test_nested_values_of_metadata_are_refused_and_not_hashed(name, checkpoint):
    (checkpoint / ".metadata").write_bytes(b"\x80\x04" + HASHED[name] + STOP)
    require_quick_refusal(
        lambda: DistReader(checkpoint), r"\.metadata is damaged, or not a checkpoint's metadata"
    )


@pytest.mark.parametrize("field", ["relative_path", "offset", "transform_descriptors"])
def test_nested_values_in_the_place_of_an_item_are_not_printed(field, checkpoint):
    info = new("_StorageInfo", "torch.distributed.checkpoint.filesystem")
    fields = b"".join(
        text(key) + (nest() if key == field else value) + b"s"
        for key, value in {"relative_path": text("f"), "offset": b"K\0", "length": b"K\1"}.items()
    )
    if field == "transform_descriptors":
        fields += text(field) + nest() + b"s"
    storage = b"}" + build_index(text("w")) + info + b"}" + fields + BUILD + b"s"
    metadata = new("Metadata") + b"}" + text("storage_data") + storage + b"s" + BUILD
    (checkpoint / ".metadata").write_bytes(b"\x80\x04" + metadata + STOP)
    require_quick_refusal(lambda: DistReader(checkpoint), r"\.metadata is damaged")


def rewrite_common(
    folder, pickled: bytes, *more: tuple[str, bytes], is_legacy: bool = True
) -> None:
    """Write the common state as torch.save does, with another pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
        for entry in more:
            archive.writestr(*entry)
    (folder / "common.pt").write_bytes(file.getvalue())


def put(opcodes: bytes) -> bytes:
    """Return opcodes with the memo of protocol 2, whose places are written."""
    parts = opcodes.split(b"\x94")
    puts = (b"q" + bytes([i]) for i in range(len(parts) - 1))
    return b"\x80\x02" + b"".join(a + b for a, b in zip(parts, [*puts, b""], strict=True)) + STOP


OBJECTS = {
    "key": b"}" + nest() + b"Ns",
    "deep key": b"}" + nest_once(200_000) + b"Ns",
    "pairs of a dict": b"ccollections\nOrderedDict\n]]" + nest() + b"aNaa\x85R",
    "storage": b"(U\7storagectorch\nFloatStorage\n" + nest() + b"U\3cpuK\1tQ",
    "function": nest() + b")R",
    "class": nest() + b")\x81",
    "state": b"ccollections\nOrderedDict\n)R]]" + nest() + b"aNaab",
}


@pytest.mark.parametrize("name", OBJECTS)
def test_nested_values_of_objects_are_refused_and_not_hashed(name, checkpoint):
    rewrite_common(checkpoint, put(OBJECTS[name]))
    reader = DistReader(checkpoint)
    require_quick_refusal(reader.load_common, r"common\.pt: the common state is damaged or not saf")


SHARED_LISTS = b"".join(
    b"]q" + bytes([i + 1]) + b"(h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(LEVELS)
)
A = b"}X\1\0\0\0a"


@pytest.mark.parametrize(
    "opcodes",
    [A + nest() + b"s", A + b"]q\0" + SHARED_LISTS + b"s", A + b"]" * 5000 + b"a" * 4999 + b"s",
     A + b"]q\0h\0as"],
    ids=["tuples", "lists", "deep", "cycle"],
)  # fmt: skip
def test_values_that_none_hashes_are_refused_when_they_are_too_many_or_too_deep(
    opcodes, checkpoint
):
    data = put(opcodes) if b"\x94" in opcodes else b"\x80\x02" + opcodes + STOP
    rewrite_common(checkpoint, data)
    require_quick_refusal(
        DistReader(checkpoint).load_common, "the common state is damaged or not safe to load: it "
    )


def test_second_pickle_of_an_archive_is_refused(checkpoint):
    rewrite_common(checkpoint, b"\x80\x02}.", ("archive/DATA.PKL", b"\x80\x02}."))
    require_quick_refusal(DistReader(checkpoint).load_common, "is not a single archive")


def test_state_that_optimizers_and_generators_have_is_within_the_limits(checkpoint):
    state = {
        "ordered": OrderedDict((i, (i, i)) for i in range(1000)),
        "groups": [{"params": list(range(100_000)), "betas": (0.9, 0.95)}],
        "random": random.Random(0).getstate(),
        "tensor": torch.zeros(3, 4),
        "counter": Counter("abca"),
        "names": {("a", ("b", i)): {"c": [None, 1.5, True]} for i in range(1000)},
        "sizes": [torch.Size((1, 2)), torch.float32],
    }
    file = io.BytesIO()
    torch.save(state, file)
    (checkpoint / "common.pt").write_bytes(file.getvalue())
    loaded = DistReader(checkpoint).load_common()
    assert loaded.pop("tensor").equal(state.pop("tensor"))
    assert loaded == state


@pytest.mark.parametrize("protocol", [2, 4])
def test_plain_values_of_pickle_are_within_the_limits(protocol):
    shared = [(1, "a")] * 3
    value = {i: [shared, shared, {(i, (i,)): None}] for i in range(300)}
    check_pickle(pickle.dumps(value, protocol))
    check_nesting(value)


@pytest.mark.parametrize("kind", [*ODD_KINDS, "huge"])
@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt"])
def test_file_of_another_kind_is_refused_without_a_wait(name, kind, checkpoint):
    make_odd_file(checkpoint / name, kind)
    require_quick_refusal(
        lambda: DistReader(checkpoint).load_common(),
        rf"{name}.*(cannot be read|is damaged or not safe)",
    )


@pytest.mark.parametrize("kind", ODD_KINDS)
def test_item_of_another_kind_of_file_is_refused_without_a_wait(kind, checkpoint):
    reader = DistReader(checkpoint)
    make_odd_file(checkpoint / "__0_0.distcp", kind)  # after it was checked
    for read in (lambda: DistReader(checkpoint), lambda: reader.read("w", Box((0, 0), (4, 6)))):
        require_quick_refusal(read, r"has no file __0_0|__0_0\.distcp: w is damaged or not safe")
