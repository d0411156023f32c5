"""The Ray of a job: what is said of one that others have started."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.schema import RLConfig
from mcore_rl.controller import small_stores
from mcore_rl.controller.object_store import held_bytes
from mcore_rl.jobs import session as its

Told = Callable[..., str]


@pytest.fixture
def config() -> RLConfig:
    """Eight servers of a device each: two nodes of four devices have half of the samples each."""
    config = RLConfig()
    config.rollout.num_servers = 8
    config.trainer.prompts_per_step = 4096
    return config


@pytest.fixture
def half(config: RLConfig) -> int:
    return (held_bytes(config) + 1) // 2


@pytest.fixture
def told(
    config: RLConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Told:
    """told(nodes) is what a session of a Ray with these nodes prints."""

    def of(nodes: list[dict[str, Any]], address: str = "10.0.0.1:20000") -> str:
        monkeypatch.setattr(its, "get_device_resource", lambda: "GPU")
        monkeypatch.setattr(its, "ray_session", lambda **_: contextlib.nullcontext())
        monkeypatch.setattr(small_stores.ray, "nodes", lambda: nodes)
        monkeypatch.setenv("RAY_ADDRESS", address)
        with its.session(config, 8, Path("/tmp")):
            return capsys.readouterr().out

    return of


def node(name: str, store: int, devices: int = 4, *, alive: bool = True) -> dict[str, Any]:
    """As ray.nodes() has it."""
    resources = {"CPU": 1.0, "object_store_memory": float(store)}
    if devices:
        resources["GPU"] = float(devices)
    return {"NodeName": name, "Alive": alive, "Resources": resources if alive else {}}


def test_an_object_store_that_others_have_made_too_small_is_told_once(told, half):
    nodes = [node("n1", 512 << 20), node("n2", half - 1), node("n3", half)]
    out = told([*nodes, node("head", 1 << 20, devices=0), node("gone", 1 << 20, alive=False)])
    assert out.count("\n") == 1
    assert out.startswith("Ray's object store has 512 MiB on n1, n2; a node with servers may hold")
    assert f"samples of {half / 2**20:,.0f} MiB" in out and "spilled to disk" in out
    assert f"MCORE_RL_OBJECT_STORE_BYTES={half} " in out


def test_of_many_nodes_with_too_small_a_store_a_few_are_named(told):
    out = told([node(f"n{number}", 512 << 20) for number in range(1, 33)])
    assert "on n1, n2, n3, n4 and 28 more nodes; " in out


def test_nothing_is_said_of_an_object_store_that_has_room_nor_of_a_private_one(told, half):
    assert told([node("n1", half), node("n2", half)]) == ""
    assert told([node("n1", 1 << 20), node("n2", 1 << 20)], address="") == ""
