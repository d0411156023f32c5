"""Pickles read as data."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
import subprocess
from collections import OrderedDict
from pathlib import PosixPath

import pytest

from mcore_rl.checkpoint import inert_pickle
from mcore_rl.checkpoint.inert_pickle import ForeignName, Node

PATH = {(PosixPath.__module__, "PosixPath"): None}


class Calls:
    """Pickles to a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [4, 5])
def test_plain_data_comes_back(protocol):
    data = {"a": [1, -2, 300, 70_000, 1 << 40], "b": (None, True, 0.5, ()), "ä" * 300: {(1, 2): {}}}
    assert inert_pickle.read(pickle.dumps(data, protocol), {}) == data


def test_an_object_becomes_a_node_with_what_its_class_was_called_with():
    node = inert_pickle.read(pickle.dumps(PosixPath("/a/b")), PATH)
    assert isinstance(node, Node)
    assert (node.kind, node.args, node.state) == ("PosixPath", ("/", "a", "b"), None)


def test_a_name_may_stand_for_something_else():
    data = pickle.dumps(OrderedDict(a=1))
    assert inert_pickle.read(data, {("collections", "OrderedDict"): dict}) == {"a": 1}


@pytest.mark.parametrize(
    "function", [os.system, subprocess.Popen, eval, exec, getattr, __import__, pickle.loads]
)
def test_other_names_are_refused_before_they_are_called(function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(Calls(function, "touch canary"))
    with pytest.raises(ForeignName, match=function.__name__):
        inert_pickle.read(data, PATH)
    assert not list(tmp_path.iterdir())


def test_an_allowed_name_is_not_called_either(tmp_path):
    canary = tmp_path / "canary"
    node = inert_pickle.read(pickle.dumps(Calls(os.mkdir, str(canary))), {("posix", "mkdir"): None})
    assert (node.kind, node.args) == ("mkdir", (str(canary),))
    assert not canary.exists()


def named(module, name):
    """The opcodes that push a class."""
    texts = b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name))
    return texts + b"\x93"


def test_a_pickle_cannot_change_the_class_of_nodes():
    # BUILD on the class itself, with {"kind": 1} as its attributes.
    change = named(PosixPath.__module__, "PosixPath") + b"}\x8c\x04kindK\x01sb."
    with pytest.raises(ValueError, match="__setstate__"):
        inert_pickle.read(b"\x80\x04" + change, PATH)
    assert Node.kind == ""
    assert inert_pickle.read(pickle.dumps(PosixPath("/")), PATH).kind == "PosixPath"


def test_memo_places_are_not_the_pickles_to_choose():
    """LONG_BINPUT 2**31 makes the unpickler touch 32 GiB: refused before it runs."""
    bomb = b"\x80\x04]r" + struct.pack("<I", 1 << 31) + b"."
    with pytest.raises(ValueError, match="opcode 0x72 at byte 3"):
        inert_pickle.read(bomb, {})


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_older_protocols_are_refused(protocol):
    with pytest.raises(ValueError, match="opcode"):
        inert_pickle.read(pickle.dumps({"a": "b"}, protocol), {})


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_pickle_that_is_cut_short_is_refused(cut):
    data = pickle.dumps({"a": [1, 2, 3], "bcdefgh": PosixPath("/a")})
    with pytest.raises(ValueError):
        inert_pickle.read(data[:-cut], PATH)


@pytest.mark.parametrize(
    "data",
    [b"", b".", b"\x80\x04.", b"\x80\x04K\x01.more", b"\x80\x04a.", b"\x80\x04h\x05.", b"N" * 50],
)
def test_what_is_no_pickle_is_refused(data):
    with pytest.raises(ValueError):
        inert_pickle.read(data, {})


def test_only_opcodes_of_plain_data_are_known():
    """No opcode that imports, calls or finds things in another way than the ones that are read."""
    known = inert_pickle._ARGUMENT_BYTES.keys() | inert_pickle._COUNT_BYTES.keys()
    names = {op.name for op in pickletools.opcodes if ord(op.code) in known}
    assert names.isdisjoint(
        {"GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "PUT"}
    )
    assert not any(name.endswith("PUT") or name.startswith("BYTEARRAY") for name in names)
