"""Calls of a group: the calls of Ray that they take, and their outcomes; placement of ranks."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError, PeerError
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller import object_columns, worker_group
from mcore_rl.controller.dispatch import Dispatch, DispatchMode, register
from mcore_rl.controller.object_columns import fetch_columns, store_columns
from mcore_rl.controller.pending_call import WorkerError
from mcore_rl.controller.resource_pool import order_by_node
from mcore_rl.controller.worker_group import WorkerGroup, send_parts
from mcore_rl.controller.worker_process import FailureKind, WorkerProcess
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.parallel.mesh import Mesh


class Ray:
    """`ray.put`, and actors whose calls are recorded."""

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
    monkeypatch.setattr(worker_group, "ray", made)
    return made


def batch_of(num_rows: int) -> Batch:
    return Batch({"row": np.arange(num_rows)})


def count_calls(ray: Ray, mode: DispatchMode, layout: Layout, num_rows: int) -> tuple[int, int]:
    """Return the calls of actors and the objects that one call takes."""
    ray.calls.clear()
    ray.stored.clear()
    parts = mode.scatter(Mesh(layout), (batch_of(num_rows), "word"), {})
    references = send_parts([ray.actor(rank) for rank in range(layout.world_size)], "update", parts)
    assert references == {1000 + rank: rank for rank in range(layout.world_size)}
    return len(ray.calls), len(ray.stored)


@pytest.mark.parametrize("num_rows", [1, 64, 4096])
def test_calls_grow_with_ranks_and_not_with_samples(ray: Ray, num_rows: int):
    for dp in (2, 8, 32):
        layout = Layout(tp=4, dp=dp)
        assert count_calls(ray, Dispatch.MEGATRON_COMPUTE, layout, num_rows) == (4 * dp, dp)
        assert count_calls(ray, Dispatch.DP_COMPUTE, layout, num_rows) == (4 * dp, 0)
        assert count_calls(ray, Dispatch.ONE_TO_ALL, layout, num_rows) == (4 * dp, 1)


def test_ranks_of_a_part_share_a_stored_batch_and_one_of_them_returns_the_value(ray: Ray):
    parts = Dispatch.MEGATRON_COMPUTE.scatter(Mesh(Layout(tp=2, dp=2)), (batch_of(5),), {})
    send_parts([ray.actor(rank) for rank in range(4)], "update", parts)
    assert [batch.array("row").tolist() for batch in ray.stored] == [list(p.rows) for p in parts]
    assert [(rank, *call[:2], stored) for rank, (call, *stored) in ray.calls] == [
        (0, "update", True, ["object 0"]),
        (1, "update", False, ["object 0"]),
        (2, "update", True, ["object 1"]),
        (3, "update", False, ["object 1"]),
    ]


class Scorer:
    """A worker that adds a number to each token, and records the columns that it got."""

    def __init__(self) -> None:
        self.columns: list[str] = []

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, reads=("response_ids",), writes=("values",))
    def score(self, batch: Batch, add: int) -> Batch | None:
        self.columns = batch.names
        ids = batch.jagged("response_ids")
        return batch.with_columns(values=ids.with_values(ids.values + add)) if len(batch) else None


class Reply:
    def __init__(self, value: Any) -> None:
        self._value = value

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._value)
        return future


def group_of(workers: list[Any]) -> WorkerGroup:
    """Return a group of ranks that answer at once, in this process."""
    group = WorkerGroup.__new__(WorkerGroup)
    layout = Layout(dp=len(workers))
    group._set_up("policy", type(workers[0]), layout, TimeoutsConfig(), lambda: None)
    for rank, worker in enumerate(workers):
        host = WorkerProcess("policy", rank)
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
    assert group.call(Model.to, "host", model=False) == ["host", "host"]
    assert group.call(Model.apply) == "applied"  # which rank 1 has no part in
    assert group.call(Model.to, "device") == ["device", "device"]
    moves = [("host", False), ("device", True)]
    assert [worker.calls for worker in workers] == [[moves[0], "apply", moves[1]], moves]


def test_a_failure_names_the_call_and_an_unknown_method_is_refused():
    group = group_of([Model()])
    with pytest.raises(WorkerError, match=r"policy.to: rank 0 raised ValueError: no such place"):
        group.call(Model.to, "nowhere")
    for call in (group.call, group.submit):
        with pytest.raises(TypeError, match=r"^Model has no registered method 'score'$"):
            call(Scorer.score, [], add=[])


class Maker:
    @register(makes=True)
    def make(self) -> Batch: ...


def test_with_result_bytes_gives_a_call_more_results(monkeypatch):
    # Each part may take as many objects as all other columns together.
    monkeypatch.setattr(object_columns, "_get_object_bytes", lambda: 1000)
    group, sizes = group_of([Maker()]), []

    def options(num_returns: int) -> Any:
        sizes.append(num_returns)
        results = [Reply(None) for _ in range(num_returns)]
        return SimpleNamespace(remote=lambda *given: sizes.append(given[1:3]) or results)

    group._actors, group._num_parts = (
        [SimpleNamespace(call_for_samples=SimpleNamespace(options=options))],
        2,
    )
    group.submit(Maker.make)
    group.submit(Maker.make.with_result_bytes(10_500))
    assert sizes == [1 + 8 * 3, (8, 2), 1 + 11 * 3, (11, 2)]


def test_each_rank_reads_and_writes_columns_of_its_entry_of_a_list(monkeypatch):
    stored: list[Any] = []
    objects = SimpleNamespace(
        put=lambda value: stored.append(value) or len(stored) - 1,
        get=lambda references, timeout: [stored[number] for number in references],
    )
    monkeypatch.setattr(object_columns, "ray", objects)
    monkeypatch.setattr(object_columns, "_get_object_bytes", lambda: 1 << 20)
    ids = Jagged.pack([[1, 2], [3], [4]], np.int64)
    batch = store_columns(
        Batch({"prompt_ids": ids, "response_ids": ids, "rewards": np.arange(3.0)})
    )
    workers = [Scorer() for _ in range(3)]
    rows = [2, 0], [], [1]
    parts = [batch.take(part) for part in rows]
    scores = group_of(workers).call(Scorer.score, parts, add=(10, 20, 30))
    assert [worker.columns for worker in workers] == [["response_ids"]] * 3
    assert scores[1] is None  # no batch, returned as it is
    for scored, part, add in ((scores[0], [2, 0], 10), (scores[2], [1], 30)):
        assert {*scored.names} > {"prompt_ids", "response_ids", "rewards", "values"}
        assert scored.array("rewards").tolist() == part
        assert [v.tolist() for v in fetch_columns(scored).jagged("values")] == [
            [token + add for token in ids[row]] for row in part
        ]


def test_a_server_whose_devices_are_on_two_nodes_is_refused_with_their_names():
    group = SimpleNamespace(name="rollout", _first_bundle=0, _bundles_per_rank=2)
    pool = SimpleNamespace(get_node=lambda rank: "n1" if rank < 3 else "n2", bundles=[0, 1, 2, 3])
    message = r"rank 1 needs 2 devices of one node; .* on n1, n2\. Allowed: nodes with a multiple"
    with pytest.raises(ConfigError, match=message):
        WorkerGroup._get_scheduling(group, pool, 1)


class Starts(Ray):
    """A Ray whose actors are ready at once, with the bundle that each was started in."""

    cloudpickle = SimpleNamespace(dumps=lambda value: b"")

    def __init__(self) -> None:
        super().__init__()
        self.bundles: list[int] = []

    def is_initialized(self) -> bool:
        return False

    def remote(self, _: type) -> Any:
        reply = SimpleNamespace(remote=lambda *_: Reply(None))
        actor = SimpleNamespace(get_info=reply, open_rendezvous=reply, build=reply)

        def options(scheduling_strategy: Any, **_: Any) -> Any:
            self.bundles.append(scheduling_strategy.placement_group_bundle_index)
            return SimpleNamespace(remote=lambda *_: actor)

        return SimpleNamespace(options=options)


def test_the_ranks_of_a_group_start_in_its_own_bundles(monkeypatch):
    starts = Starts()
    monkeypatch.setattr(worker_group, "ray", starts)
    pool: Any = SimpleNamespace(
        num_ranks=8, bundles=[7, 6, 5, 4, 3, 2, 1, 0], placement_group=None, detached="",
        log_dir=None, reserve=lambda *_: None, release=lambda *_: None,
        get_actor_options=lambda share: {}, get_node=lambda rank: "n1",
    )  # fmt: skip
    options: Any = {"layout": Layout(tp=2), "pool": pool, "timeouts": TimeoutsConfig()}
    with WorkerGroup(Model, **options, first_bundle=4, bundles_per_rank=2, wait=False):
        # Places 4 and 6 of the pool, of 4, 5, 6 and 7: Ray's bundles 3 and 1.
        assert starts.bundles == [3, 1]


def test_order_by_node_keeps_the_bundles_of_a_node_together():
    assert order_by_node(["b", "a", "b", "a"]) == [1, 3, 0, 2]
    assert order_by_node(["n10", "n9", "n10", "n9"]) == [1, 3, 0, 2]  # by number
    assert order_by_node(["a", "b", "b", "b", "a", "b"]) == [1, 2, 3, 5, 0, 4]  # most bundles first


class FailingWorker:
    def fail(self, error: Exception) -> None:
        raise error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("bad input"), FailureKind.CONFIG),
        (ValueError("not finite"), FailureKind.RAISED),
        (PeerError("rank 3 is silent"), FailureKind.BLAMED),
    ],
)
def test_a_failed_call_replies_with_the_kind_of_failure(error: Exception, kind: FailureKind):
    process = WorkerProcess("policy", 1)
    process._worker = FailingWorker()
    failure = process.call(("fail", True, [error], {})).failure
    assert failure is not None
    assert (failure.kind, failure.message) == (kind, str(error))
    assert failure.type_name == type(error).__name__
    assert "in fail" in failure.trace


def test_a_rank_appends_both_streams_to_its_log(tmp_path: Path):
    for word in ("first", "second"):  # of two processes, one after the other
        child = os.fork()
        if not child:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not what pytest reads
            WorkerProcess("actor", 3, tmp_path)
            os.write(1, f"{word} out\n".encode())
            os.write(2, f"{word} err\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
    log = (tmp_path / "actor-3.log").read_text()
    assert log == "first out\nfirst err\nsecond out\nsecond err\n"
