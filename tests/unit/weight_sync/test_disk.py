"""Shards through files: what is in them, who waits for whom, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

import routes

from mcore_rl.config.errors import ConfigError
from mcore_rl.weight_sync.connection import StreamError


@pytest.fixture
def route(tmp_path: Path) -> Callable[..., routes.Route]:
    """Nobody has to be there at the same time: ranks can send and receive one after the other."""
    checkpoint, folder = routes.save_model(tmp_path / "model"), tmp_path / "weights"
    folder.mkdir()
    return lambda timeout_s=5.0: routes.Route(checkpoint, folder, "disk", timeout_s)


def send(sides: routes.Route, version: int) -> None:
    for rank in range(2):
        sides.send(version, rank)


def test_the_files_of_a_version_go_when_both_ranks_have_it_and_the_next_is_sent(route, tmp_path):
    sides = route()
    for version in (1, 2):
        send(sides, version)
        for rank in range(2):
            sides.receive(version, rank)
        sent = sorted(file.name for file in (tmp_path / "weights").glob("*.safetensors"))
        assert sent == [f"version-{version}-from-{rank}.safetensors" for rank in range(2)]


def test_the_files_hold_each_byte_that_is_missing_once(route, tmp_path):
    sides = route()
    send(sides, 1)
    wanted = [sides.wanted(rank) for rank in range(2)]
    files = [load_file(file) for file in (tmp_path / "weights").glob("*.safetensors")]
    sent = sum(t.numel() for file in files for n, t in file.items() if not n.endswith("crc32"))
    tensors = [tensor for rank in wanted for tensor in rank.values()]
    assert sent == sum(4 * int((~tensor.isnan()).sum()) for tensor in tensors)  # NaN: padding


def test_a_version_that_does_not_come_is_named_with_its_file(route):
    with pytest.raises(StreamError, match=r"version-7-from-\d\.safetensors of training rank \d"):
        route(0.1).receive(7, 0)


def test_a_file_with_a_flipped_bit_is_refused(route, tmp_path):
    sides = route()
    send(sides, 1)
    for file in (tmp_path / "weights").glob("*.safetensors"):
        held = bytearray(file.read_bytes())
        held[-1] ^= 1
        file.write_bytes(held)
    with pytest.raises(ConfigError, match="is damaged: its checksum is"):
        for rank in range(2):
            sides.receive(1, rank)


def test_a_version_that_a_server_has_not_taken_stands_and_stops_the_next(route, tmp_path):
    sides = route(0.1)
    send(sides, 1)
    sides.receive(1, 0)
    with pytest.raises(StreamError, match="version 1 was not taken by generation rank 1"):
        send(sides, 2)
    assert len(list((tmp_path / "weights").glob("version-1-*"))) == 2


def test_a_folder_that_machines_do_not_share_is_refused(route, tmp_path):
    (tmp_path / "weights").rmdir()
    with pytest.raises(ConfigError, match=r"transport='disk': there is no folder"):
        route()
