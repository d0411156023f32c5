"""Calls of Ray for one call of a group, counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.schema import Layout
from mcore_rl.controller import sending
from mcore_rl.controller.dispatch import Dispatch, DispatchMode
from mcore_rl.controller.sending import send
from mcore_rl.data.batch import Batch
from mcore_rl.parallel.mesh import Mesh


class Ray:
    """`ray.put`, and actors whose calls are kept."""

    def __init__(self) -> None:
        self.stored: list[Batch] = []
        self.calls: list[tuple[int, tuple[Any, ...]]] = []

    def put(self, batch: Batch) -> str:
        self.stored.append(batch)
        return f"object {len(self.stored) - 1}"

    def actor(self, rank: int) -> Any:
        def remote(*args: Any) -> int:
            self.calls.append((rank, args))
            return 1000 + rank

        return SimpleNamespace(call=SimpleNamespace(remote=remote))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(sending, "ray", made)
    return made


def batch_of(num_rows: int) -> Batch:
    return Batch({"row": np.arange(num_rows)})


def num_calls(ray: Ray, mode: DispatchMode, layout: Layout, num_rows: int) -> tuple[int, int]:
    """How many calls of actors and how many objects one call takes."""
    ray.calls.clear()
    ray.stored.clear()
    parts = mode.scatter(Mesh(layout), (batch_of(num_rows), "word"), {})
    references = send([ray.actor(rank) for rank in range(layout.world_size)], "update", parts)
    assert references == {1000 + rank: rank for rank in range(layout.world_size)}
    return len(ray.calls), len(ray.stored)


@pytest.mark.parametrize("num_rows", [1, 64, 4096])
def test_calls_grow_with_ranks_and_not_with_samples(ray: Ray, num_rows: int):
    for dp in (2, 8, 32):
        layout = Layout(tp=4, dp=dp)
        assert num_calls(ray, Dispatch.MEGATRON_COMPUTE, layout, num_rows) == (4 * dp, dp)
        assert num_calls(ray, Dispatch.DP_COMPUTE, layout, num_rows) == (4 * dp, 0)
        assert num_calls(ray, Dispatch.ONE_TO_ALL, layout, num_rows) == (4 * dp, 1)


def test_ranks_of_a_part_are_pointed_to_one_stored_batch_and_one_of_them_answers(ray: Ray):
    parts = Dispatch.MEGATRON_COMPUTE.scatter(Mesh(Layout(tp=2, dp=2)), (batch_of(5),), {})
    send([ray.actor(rank) for rank in range(4)], "update", parts)
    assert [batch.array("row").tolist() for batch in ray.stored] == [list(p.rows) for p in parts]
    found = [(rank, args[0], args[1], args[4:]) for rank, args in ray.calls]
    assert found == [
        (0, "update", True, ("object 0",)),
        (1, "update", False, ("object 0",)),
        (2, "update", True, ("object 1",)),
        (3, "update", False, ("object 1",)),
    ]
