"""Shards into a real vLLM server: it generates as after a full export, and refuses what is wrong.

dist_cpu/test_shard_sync.py compares parameters and tokens for the other families, with real
trainers of every layout.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))
sys.path.insert(0, str(Path(__file__).parent))

import shards

from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.weight_sync import shared_memory

pytestmark = pytest.mark.server

Served = tuple[VLLMServer, shards.Trainer, Callable[..., Any]]


@pytest.fixture(scope="module")
def served(shared_server) -> Served:
    """A server with experts, its trainer, and the way to run on the server's loop."""
    trainer = shards.Trainer([Path(model.path) for model in shared_server.models])
    return shared_server.server, trainer, shared_server.run


@pytest.fixture(scope="module")
def both_ways(served: Served) -> dict[str, Any]:
    server, trainer, run = served
    found: dict[str, Any] = run(shards.both_ways(server, trainer))
    return found


def test_a_server_generates_token_for_token_as_after_a_full_export(both_ways):
    shards.assert_both_ways_agree(both_ways)


def refuses_until_a_whole_update(served: Served, both_ways: dict[str, Any]) -> None:
    server, trainer, run = served
    with pytest.raises(RuntimeError, match="did not complete"):
        run(shards.answers(server))
    transport = run(trainer.connect(server))
    assert run(shards.take_shards(server, trainer, 1, transport)) == [None, None]
    shards.assert_equal(run(shards.answers(server)), both_ways["export"])


def test_a_bit_that_flips_is_caught_with_its_tensor_and_ranks(served, both_ways, monkeypatch):
    server, trainer, run = served
    flipped = []

    def flip(memory: Any) -> None:
        if not flipped:
            byte = os.pread(memory.descriptors[0], 1, 100)
            flipped.append(os.pwrite(memory.descriptors[0], bytes([byte[0] ^ 1]), 100))

    with monkeypatch.context() as patch:
        patch.setattr(shared_memory._FileBuckets, "finish_writes", flip)
        transport = run(trainer.connect(server))
        _, outcome = run(shards.take_shards(server, trainer, 1, transport))
    assert flipped
    assert isinstance(outcome, RuntimeError)
    checksums = "is [0-9a-f]{16}, and was [0-9a-f]{16}"
    place = r"model\.\S+, box at \(.*\) of \(.*\) from training rank 0"
    assert re.search(f"{place}: the checksum on generation rank 0 {checksums}", str(outcome))
    refuses_until_a_whole_update(served, both_ways)


def test_a_box_that_does_not_come_is_an_error_that_names_its_module(served, both_ways, monkeypatch):
    server, trainer, run = served
    described, lost = shared_memory._describe_slice, []

    def losing(piece: Any, memory: torch.Tensor) -> list[Any]:
        entry: list[Any] = described(piece, memory)
        if entry[0] == "model.layers.1.self_attn.o_proj.weight" and not lost:
            lost.append(entry)
            entry[2] = [1, *entry[2][1:]]  # one row of it
        return entry

    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "_describe_slice", losing)
        transport = run(trainer.connect(server, verify="off"))
        _, outcome = run(shards.take_shards(server, trainer, 1, transport))
    assert lost
    assert "did not get all weights: ['model.layers.1.self_attn.o_proj']" in str(outcome)
    refuses_until_a_whole_update(served, both_ways)
