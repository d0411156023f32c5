"""Calls of Ray for one call of a group: how many, and what each of them has."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller import object_columns, sending
from mcore_rl.controller.dispatch import Dispatch, DispatchMode, register
from mcore_rl.controller.object_columns import fetch, store
from mcore_rl.controller.pending import WorkerError
from mcore_rl.controller.rank_actor import RankActor
from mcore_rl.controller.sending import send
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch, Jagged
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
    found = [(rank, *call[:2], stored) for rank, (call, *stored) in ray.calls]
    assert found == [
        (0, "update", True, ["object 0"]),
        (1, "update", False, ["object 0"]),
        (2, "update", True, ["object 1"]),
        (3, "update", False, ["object 1"]),
    ]


class Scorer:
    """Adds to each token; `asked` has the columns that came."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, reads=("response_ids",), writes=("values",))
    def score(self, batch: Batch, add: int) -> Batch | None:
        self.asked = batch.names
        ids = batch.jagged("response_ids")
        return batch.with_columns(values=ids.with_values(ids.values + add)) if len(batch) else None


class Reply:
    def __init__(self, value: Any) -> None:
        self._value = value

    def future(self) -> Future[Any]:
        found: Future[Any] = Future()
        found.set_result(self._value)
        return found


def group_of(workers: list[Any]) -> WorkerGroup:
    """Ranks that answer at once, in this process."""
    group = WorkerGroup.__new__(WorkerGroup)
    layout = Layout(dp=len(workers))
    group._set_up("policy", type(workers[0]), layout, TimeoutsConfig(), lambda: None)
    for rank, worker in enumerate(workers):
        host = RankActor("policy", rank)
        host._worker = worker
        call = SimpleNamespace(remote=lambda *args, host=host: Reply(host.call(*args)))
        group._actors.append(SimpleNamespace(call=call))
    return group


class Model:
    """Records its calls, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @register()
    def to(self, place: str, *, model: bool = True) -> str:
        if place == "nowhere":
            raise ValueError("no such place")
        self.calls.append((place, model))
        return place

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def apply(self) -> str:
        self.calls.append("apply")
        return "applied"


def test_every_rank_or_rank_0_alone_does_each_call_once_in_order():
    workers = [Model(), Model()]
    group = group_of(workers)
    assert group.to("host", model=False) == ["host", "host"]
    assert group.apply() == "applied"  # which rank 1 has no part in
    assert group.to("device") == ["device", "device"]
    moves = [("host", False), ("device", True)]
    assert [worker.calls for worker in workers] == [[moves[0], "apply", moves[1]], moves]


def test_a_failure_names_the_call_and_an_unknown_method_is_refused():
    group = group_of([Model()])
    with pytest.raises(WorkerError, match=r"policy.to: rank 0 raised ValueError: no such place"):
        group.to("nowhere")
    with pytest.raises(AttributeError, match="no registered method 'move'"):
        group.move("device")


class Maker:
    @register(makes=True)
    def make(self) -> Batch: ...


def test_a_call_that_may_make_more_has_more_results(monkeypatch):
    """As many objects of all other columns together as of each part."""
    monkeypatch.setattr(object_columns, "_object_bytes", lambda: 1000)
    group, asked = group_of([Maker()]), []

    def options(num_returns: int) -> Any:
        asked.append(num_returns)
        results = [Reply(None) for _ in range(num_returns)]
        return SimpleNamespace(remote=lambda *given: asked.append(given[1:3]) or results)

    group._actors, group._num_parts = [SimpleNamespace(make=SimpleNamespace(options=options))], 2
    group.make.submit()
    group.make.making(10_500).submit()
    assert asked == [1 + 8 * 3, (8, 2), 1 + 11 * 3, (11, 2)]


def test_of_a_list_each_rank_fetches_what_it_reads_and_gives_back_what_it_writes(monkeypatch):
    kept: list[Any] = []
    objects = SimpleNamespace(
        put=lambda one: kept.append(one) or len(kept) - 1,
        get=lambda references, timeout: [kept[one] for one in references],
    )
    monkeypatch.setattr(object_columns, "ray", objects)
    monkeypatch.setattr(object_columns, "_object_bytes", lambda: 1 << 20)
    ids = Jagged.pack([[1, 2], [3], [4]], np.int64)
    batch = store(Batch({"prompt_ids": ids, "response_ids": ids, "rewards": np.arange(3.0)}))
    workers = [Scorer() for _ in range(3)]
    rows = [2, 0], [], [1]
    found = group_of(workers).score([batch.take(its) for its in rows], add=(10, 20, 30))
    assert [worker.asked for worker in workers] == [["response_ids"]] * 3
    assert found[1] is None  # what is no batch comes as it is
    for scored, its, add in ((found[0], [2, 0], 10), (found[2], [1], 30)):
        assert {*scored.names} > {"prompt_ids", "response_ids", "rewards", "values"}
        assert scored.array("rewards").tolist() == its
        assert [v.tolist() for v in fetch(scored).jagged("values")] == [
            [token + add for token in ids[row]] for row in its
        ]
