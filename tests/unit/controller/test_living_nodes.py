"""Nodes that do not answer, and what Ray says of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.controller import living_nodes


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """One that answers, and one that refuses and that nobody else gets."""
    with socket.create_server(("127.0.0.1", 0)) as open_, socket.socket() as shut:
        shut.bind(("127.0.0.1", 0))
        yield open_.getsockname()[1], shut.getsockname()[1]


class Ray:
    """Knows after some looks that node 1 is dead."""

    def __init__(self, ports: tuple[int, int], looks: float) -> None:
        self._ports, self._looks, self.num_looks = ports, looks, 0

    def nodes(self) -> list[dict[str, Any]]:
        self.num_looks += 1
        alive = True, self.num_looks <= self._looks
        return [
            {
                "NodeID": str(number), "NodeName": f"n{number}", "Alive": alive[number],
                "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port,
            }
            for number, port in enumerate(self._ports)
        ]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(living_nodes, "_unreachable", set())


def test_a_node_that_does_not_answer_is_waited_for_until_ray_knows(monkeypatch, ports):
    ray = Ray(ports, looks=2)
    monkeypatch.setattr(living_nodes, "ray", ray)
    assert living_nodes.living_nodes() == {"0": True, "1": False}
    assert ray.num_looks == 3
    assert living_nodes.living_nodes() == {"0": True, "1": False} and ray.num_looks == 4


def test_a_node_that_the_driver_cannot_reach_is_told_and_not_waited_for_again(
    monkeypatch, ports, capsys
):
    ray = Ray(ports, looks=float("inf"))
    monkeypatch.setattr(living_nodes, "ray", ray)
    monkeypatch.setattr(living_nodes, "_NOTICE_S", 0.0)
    for _ in range(2):
        assert living_nodes.living_nodes() == {"0": True, "1": True}
    told = f"no connection from the driver to Ray on n1 (port {ports[1]}), which Ray says live"
    assert capsys.readouterr().out.count(told) == 1
    assert ray.num_looks <= 4


def test_a_node_alone_is_not_asked(monkeypatch):
    node = {"NodeID": "0", "Alive": True}
    monkeypatch.setattr(living_nodes, "ray", SimpleNamespace(nodes=lambda: [node]))
    assert living_nodes.living_nodes() == {"0": True}
