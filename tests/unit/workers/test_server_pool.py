"""Groups and servers of a pool, whose servers answer when a test says so; no Ray."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import TimeoutsConfig
from mcore_rl.controller import object_columns
from mcore_rl.controller.object_store import MADE_BYTES_PER_TOKEN
from mcore_rl.controller.pending import Limit, PendingCall, WorkerError
from mcore_rl.controller.rank_actor import Reply, WorkerInfo
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample
from mcore_rl.rollout.protocol import SamplingParams
from mcore_rl.workers import server_pool
from mcore_rl.workers.server_pool import ALL, LOOK_S, TOGETHER_S, ServerPool

SAMPLING = SamplingParams(n=2, max_tokens=3)
NEVER = Limit(3600, "timeouts.start_s")


class Call(PendingCall):
    """Of one rank, that a test answers."""

    named: Mapping[str, Any]

    def __init__(self, group: ServedGroup, method: str, given: tuple[Any, ...], limit: Limit):
        self.reply, self.method, self.given = Future[Reply](), method, given
        super().__init__(group, method, {self: 0}, lambda values: [values[0]], limit)  # type: ignore[dict-item]

    def future(self) -> Future[Reply]:
        return self.reply

    def answer(self, value: Any = None) -> None:
        self.reply.set_result(Reply(value))


class ServedGroup:
    """The group of a server; all calls on it stay on record."""

    def __init__(self, number: int, start_limit: Limit = NEVER) -> None:
        self.name, self.ended, self._start_limit = f"rollout-{number}", "", start_limit
        self.worker_infos = {0: WorkerInfo("host", "node", 1, "/nowhere")}
        self.calls, self.building, self.may_make = list[Call](), list[Call](), list[int]()

    def close(self, reason: str = "") -> None:
        self.ended = self.ended or reason or "closed"

    def __getattr__(self, method: str) -> Any:
        limit = (
            self._start_limit if method in ("prepare", "start") else Limit(60, "timeouts.call_s")
        )

        class Method:
            @staticmethod
            def making(num_bytes: int) -> Any:
                self.may_make.append(num_bytes)
                return Method

            @staticmethod
            def submit(*given: Any, **named: Any) -> Call:
                self.calls.append(Call(self, method, given, limit))
                self.calls[-1].named = named
                return self.calls[-1]

        return Method

    def last(self, method: str) -> Call:
        return next(call for call in reversed(self.calls) if call.method == method)


def pool_of(
    *groups: ServedGroup,
    again: Callable[[int], ServedGroup] = ServedGroup,
    takes_turns: bool = False,
    wanted: Callable[[], set[int]] | None = None,
    load_format: Any = "checkpoint",
) -> ServerPool:
    """Servers of number 0, 1, ... that have started; those started again are `again`'s."""
    first = dict(enumerate(groups))

    def start(number: int) -> Any:
        return first.pop(number, None) or again(number)

    pool = ServerPool(
        start,
        len(groups),
        max_restarts=3,
        takes_turns=takes_turns,
        timeouts=TimeoutsConfig(),
        wanted=wanted,
        load_format=load_format,
    )
    pool.submit_start()
    pool.started()
    return pool


def prompts(*groups: int) -> Batch:
    ids = Jagged.of([[1] for _ in groups], np.int64)
    return Batch({"prompt_ids": ids, "group_ids": np.array(groups)})


def samples(version: int, *groups: int) -> Batch:
    return Batch.of(
        [
            Sample([1], [group, i], [1, 1], [0.0, 0.0], [version] * 2, "stop", group)
            for group in groups
            for i in range(2)
        ]
    )


def found(batches: list[Batch]) -> list[tuple[list[int], set[int]]]:
    """Groups and versions of each."""
    return [
        (sorted({*b.array("group_ids").tolist()}), {*b.jagged("weight_versions").values.tolist()})
        for b in batches
    ]


def test_an_answer_that_was_under_way_is_not_taken_for_the_group_that_has_begun_again():
    group = ServedGroup(0)
    pool = pool_of(group)
    pool.begin(prompts(5, 6), SAMPLING)
    assert pool.collect("train", 0) == []
    old = group.last("collect")
    pool.abandon("train", [5])
    pool.updated(3)
    pool.begin(prompts(5), SAMPLING)
    old.answer(samples(0, 5, 6))  # both had ended before the server was told
    assert found(pool.collect("train", 0)) == [([6], {0})]
    assert pool.num_outstanding("train") == 1
    group.last("collect").answer(samples(3, 5))
    assert found(pool.collect("train", 0)) == [([5], {3})]
    assert pool.num_outstanding("train") == 0


def test_groups_whose_server_has_died_are_told_once_they_have_begun_again():
    groups = ServedGroup(0), ServedGroup(1)
    pool = pool_of(*groups)
    pool.begin(prompts(0, 1, 2, 3), SAMPLING)
    pool.begin(prompts(3), SAMPLING, "evaluation")
    assert pool.rerouted("train") == []
    pool.collect("train", 0)
    groups[1].last("collect").reply.set_exception(RayActorError())
    for _ in range(2):
        pool.collect("train", 0)
    begun = [c.given[0].array("group_ids").tolist() for c in groups[0].calls if c.method == "begin"]
    assert begun == [[0, 2], [1, 3], [3]]  # and that of the evaluation
    assert pool.rerouted("train") == [1, 3] and pool.rerouted("train") == []


def test_large_prompts_go_by_reference_and_those_that_begin_again_are_stored_again(monkeypatch):
    kept: list[Any] = []
    objects = SimpleNamespace(
        put=lambda one: kept.append(one) or len(kept) - 1,
        get=lambda references, timeout: [kept[one] for one in references],
        nodes=lambda: [],
    )
    monkeypatch.setattr(object_columns, "ray", objects)
    groups = ServedGroup(0), ServedGroup(1)
    pool = pool_of(*groups)
    ids = Jagged.of([[group] * 4000 for group in range(4)], np.int32)
    pool.begin(Batch({"prompt_ids": ids, "group_ids": np.arange(4)}), SAMPLING)
    pool.begin(prompts(9), SAMPLING)
    assert [len(one["prompt_ids"]) for one in kept] == [2, 2]  # each server's own, small ones not
    pool.collect("train", 0)
    groups[1].last("collect").reply.set_exception(RayActorError())
    for _ in range(2):
        pool.collect("train", 0)
    assert len(kept) == 3
    again = object_columns.fetch(groups[0].last("begin").given[0].to_read())
    assert again.names == ["prompt_ids", "group_ids"]
    assert again.array("group_ids").tolist() == [1, 3]
    assert [set(row.tolist()) for row in again.jagged("prompt_ids")] == [{1}, {3}]


def test_a_server_that_finds_no_node_in_time_is_asked_for_again_while_others_serve(
    monkeypatch, capsys
):
    monkeypatch.setattr("mcore_rl.controller.pending.report", lambda silent, _: silent[0].call)
    started: list[ServedGroup] = []

    def again(number: int) -> ServedGroup:
        started.append(ServedGroup(number, Limit(0, "timeouts.start_s")))
        return started[-1]

    groups = ServedGroup(0), ServedGroup(1)
    pool = pool_of(*groups, again=again)
    pool.begin(prompts(0, 1), SAMPLING)
    pool.collect("train", 0)
    groups[1].last("collect").reply.set_exception(RayActorError())
    for _ in range(9):
        pool.collect("train", 0)
    assert len(started) > 5 and all(group.ended for group in started[:-1])
    told = capsys.readouterr().out
    assert told.count("It is started again: 1, rollout.max_restarts=3\n") == 1
    assert len(re.findall(r"(?m)^rollout-1\.prepare It is started again$", told)) > 4
    groups[0].last("collect").reply.set_exception(RayActorError())
    with pytest.raises(
        WorkerError, match=r"rollout-[01]\.prepare"
    ):  # now there is none that serves
        for _ in range(9):
            pool.collect("train", 0)


def test_on_shared_devices_all_wait_for_a_server_that_starts_so_one_that_is_late_ends_the_run(
    monkeypatch,
):
    monkeypatch.setattr("mcore_rl.controller.pending.report", lambda silent, _: silent[0].call)
    groups = ServedGroup(0), ServedGroup(1)
    late = Limit(0, "timeouts.start_s")
    pool = pool_of(*groups, again=lambda number: ServedGroup(number, late), takes_turns=True)
    pool.begin(prompts(0, 1), SAMPLING)
    pool.collect("train", 0)
    groups[1].last("collect").reply.set_exception(RayActorError())
    with pytest.raises(WorkerError, match=r"rollout-1\.prepare"):
        for _ in range(9):
            pool.collect("train", 0)


def test_a_server_that_is_up_gets_its_weights_though_another_finds_no_node(monkeypatch):
    monkeypatch.setattr("mcore_rl.workers.server_groups.wait_until_built", len)
    again = {0: ServedGroup(0), 1: ServedGroup(1)}
    groups = ServedGroup(0), ServedGroup(1)
    pool = pool_of(*groups, again=again.__getitem__)
    pool.updated(3)
    pool.resend = lambda: pool.updated(3)
    pool.begin(prompts(0, 1), SAMPLING)
    pool.collect("train", 0)
    for group in groups:
        group.last("collect").reply.set_exception(RayActorError())
    pool.collect("train", 0)
    for method in ("prepare", "start"):
        again[0].last(method).answer()
    for _ in range(2):
        pool.collect("train", 0)
    assert again[0].last("begin").given[0].array("group_ids").tolist() == [0, 1]


def test_servers_are_asked_for_their_share_and_the_more_there_are_the_longer_each_waits():
    for num, held_s in ((1, LOOK_S), (2, LOOK_S), (16, 2 * LOOK_S), (400, 2.0)):
        groups = [ServedGroup(number) for number in range(num)]
        pool = pool_of(*groups)
        pool.begin(prompts(*range(num)), SAMPLING)
        pool.collect("train", 0, at_least=3 * num - 1)
        assert {g.last("collect").given for g in groups} == {("train", held_s, 3 if num > 1 else 2)}
    pool = pool_of(group := ServedGroup(0))
    pool.begin(prompts(0), SAMPLING)
    pool.collect("train", 0, ALL)
    assert group.last("collect").given[1:] == (TOGETHER_S, ALL)


def test_a_server_may_answer_with_as_many_bytes_as_its_share_of_groups_has_tokens():
    """Each has two samples, of a prompt and up to three tokens."""
    pool = pool_of(group := ServedGroup(0))
    ids = Jagged.of([[1] * num for num in (9, 1, 2, 4)], np.int64)
    pool.begin(Batch({"prompt_ids": ids, "group_ids": np.arange(4)}), SAMPLING)
    for at_least, lengths in ((1, [9]), (2, [4, 2]), (ALL, [1, 2, 4])):
        pool.collect("train", 0, at_least)
        assert group.may_make.pop() == sum(2 * (num + 3) * MADE_BYTES_PER_TOKEN for num in lengths)
        group.last("collect").answer(samples(0, 0) if at_least == 1 else samples(0))


def test_samples_of_servers_have_no_more_bytes_a_token_than_is_counted():
    one = Sample([1], [2], [1], [0.0], [0], "stop", 0, process_rewards=[0.5], state_ids=[1])
    made = Batch.of([one])
    along = [column for name in made.names if isinstance(column := made[name], Jagged)]
    ids, others = along.pop([made["prompt_ids"] is c for c in along].index(True)), along
    assert ids.values.nbytes <= MADE_BYTES_PER_TOKEN
    assert sum(column.values.nbytes for column in others) <= MADE_BYTES_PER_TOKEN


def test_while_weights_change_groups_are_taken_and_begun_and_no_weights_are_asked_for():
    groups = ServedGroup(0), ServedGroup(1)
    pool = pool_of(*groups)
    pool.resend = lambda: pytest.fail("the trainer has other weights now")
    pool.begin(prompts(0, 1), SAMPLING)
    assert pool.tend("train") == []
    assert {group.last("collect").given for group in groups} == {("train", 0.0, 0)}  # no wait
    groups[0].last("collect").answer(samples(0, 0))
    assert found(pool.tend("train")) == [([0], {0})]
    groups[1].last("collect").reply.set_exception(RayActorError())
    for _ in range(2):
        pool.tend("train")
    assert groups[0].last("begin").given[0].array("group_ids").tolist() == [1]
    groups[0].last("collect").reply.set_exception(RayActorError())
    pool.tend("train")
    assert pool.tend("train") == [] and pool.num_outstanding("train") == 1


class Leaving(ServedGroup):
    """Answers as soon as it is to end."""

    @property
    def shut_down(self) -> Any:
        call = Call(self, "shut_down", (), NEVER)
        call.answer()
        return SimpleNamespace(submit=lambda: call)


def test_before_a_push_servers_leave_and_join_as_is_wanted(monkeypatch, capsys):
    monkeypatch.setattr("mcore_rl.workers.server_groups.wait_until_built", len)
    wanted, groups = {0, 1}, [Leaving(0), Leaving(1)]
    again = {number: Leaving(number) for number in (0, 1)}
    pool = pool_of(*groups, again=again.__getitem__, wanted=lambda: wanted)
    pool.follow_wanted()
    pool.begin(prompts(0, 1), SAMPLING)
    pool.collect("train", 0)
    assert not any(group.ended for group in groups)

    wanted -= {1}
    pool.follow_wanted()
    assert (groups[0].ended, bool(groups[1].ended)) == ("", True)
    pool.collect("train", 0)
    assert groups[0].last("begin").given[0].array("group_ids").tolist() == [1]

    wanted |= {1}
    wanted -= {0}
    for _ in range(2):  # the first stays until the second is up
        pool.follow_wanted()
        assert not groups[0].ended
    for method in ("prepare", "start"):
        again[1].last(method).answer()
    pool.admit()
    pool.follow_wanted()
    assert groups[0].ended and pool.num_up == 1
    told = [line for line in capsys.readouterr().out.splitlines() if "as is wanted" in line]
    assert told == [
        "rollout-1 has left, as is wanted", "rollout-1 is started, as is wanted",
        "rollout-0 has left, as is wanted",
    ]  # fmt: skip


def test_what_is_wanted_and_cannot_be_read_changes_nothing(capsys):
    def wanted() -> set[int]:
        raise ConfigError("servers.json is damaged")

    pool = pool_of(ServedGroup(0), ServedGroup(1), wanted=wanted)
    pool.follow_wanted()
    assert pool.num_up == 2
    assert capsys.readouterr().out == "servers stay as they are: servers.json is damaged\n"


def test_a_server_that_cannot_start_leaves_without_a_wait():
    """As one whose node has died: nothing answers for it."""
    starting = ServedGroup(1)
    pool = pool_of(ServedGroup(0), ServedGroup(1), again={1: starting}.__getitem__)
    pool.begin(prompts(0, 1), SAMPLING)
    pool.collect("train", 0)
    pool._servers[1].group.last("collect").reply.set_exception(RayActorError())  # type: ignore[attr-defined]
    pool.collect("train", 0)
    pool.remove(1)
    assert starting.ended
    assert [call.method for call in starting.calls] == ["prepare", "start"]


@pytest.mark.parametrize("method", ["abandon", "collect", "begin"])
def test_a_server_that_answers_a_call_too_late_is_started_again(monkeypatch, capsys, method):
    """Its process is stopped, say, while the other goes on."""
    monkeypatch.setattr("mcore_rl.controller.pending.report", lambda silent, _: str(silent[0]))
    late, good, again = ServedGroup(0), ServedGroup(1), list[ServedGroup]()

    def restarted(number: int) -> ServedGroup:
        again.append(ServedGroup(number))
        return again[-1]

    pool = pool_of(late, good, again=restarted)
    pool.begin(prompts(0, 1, 2, 3), SAMPLING)
    assert pool.collect("train", 0) == []
    if method == "abandon":
        pool.abandon("train", [0, 1])
    monkeypatch.setattr(late.last(method), "_limit", Limit(0, "timeouts.call_s"))
    pool.collect("train", 0)
    assert [group.name for group in again] == ["rollout-0"] and not good.ended
    assert "rank 0 (host host, pid 1)" in late.ended
    assert "It is started again: 1, rollout.max_restarts=3" in capsys.readouterr().out


def test_servers_that_are_stopped_while_no_group_ends_are_started_again(monkeypatch):
    groups, again = [ServedGroup(0), ServedGroup(1)], list[int]()
    pool = pool_of(*groups, again=lambda number: again.append(number) or ServedGroup(number))
    monkeypatch.setattr(pool, "_call_limit", Limit(0.2, "timeouts.call_s"))
    stopped = ["rollout-1.collect"]
    monkeypatch.setattr(
        server_pool, "find_stopped", lambda silent: [s for s in silent if s.call in stopped]
    )
    monkeypatch.setattr(server_pool, "report", lambda silent, limit: f"{silent[0]} is stopped")
    pool.begin(prompts(0, 1, 2, 3), SAMPLING)
    assert pool.collect("train", 0.3) == [] and again == [1]
    stopped.clear()
    with pytest.raises(WorkerError, match="no group has come back: rank 0"):
        pool.collect("train", 0.3)


WITHOUT = {"reads_weights": False}


class AnsweringGroup(ServedGroup):
    """Answers each call at once."""

    def __getattr__(self, method: str) -> Any:
        made = super().__getattr__(method)

        def submit(*given: Any, **named: Any) -> Call:
            call: Call = made.submit(*given, **named)
            call.answer([])
            return call

        return SimpleNamespace(submit=submit)


@pytest.mark.parametrize(
    ("load_format", "version", "named"),
    [
        ("checkpoint", 0, {}), ("checkpoint", 3, {}), ("auto", 0, {}), ("auto", 3, WITHOUT),
        ("dummy", 0, WITHOUT), ("dummy", 3, WITHOUT),
    ],
)  # fmt: skip
def test_a_server_reads_weights_at_its_restart_unless_it_gets_some_before_it_serves(
    monkeypatch, load_format, version, named
):
    monkeypatch.setattr("mcore_rl.workers.server_groups.wait_until_built", len)
    again, resent = ServedGroup(0), list[int]()
    pool = pool_of(ServedGroup(0), again={0: again}.__getitem__, load_format=load_format)
    pool.resend = lambda: resent.append(pool.version) or pool.updated(pool.version)
    pool.updated(version)
    pool.begin(prompts(0), SAMPLING)
    pool.collect("train", 0)
    pool._servers[0].group.last("collect").reply.set_exception(RayActorError())  # type: ignore[attr-defined]
    pool.collect("train", 0)
    assert again.last("start").named == named
    for method in ("prepare", "start"):
        again.last(method).answer()
    pool.collect("train", 0)
    pool.collect("train", 0)
    serves_at_once = not named and not version
    assert resent == ([] if serves_at_once else [version])
    assert again.last("begin").given[0].array("group_ids").tolist() == [0]


def test_servers_without_weights_are_sent_some_before_the_first_group():
    first, second = ServedGroup(0), ServedGroup(1)
    pool = pool_of(first, second, load_format="dummy")
    assert [group.last("start").named for group in (first, second)] == [WITHOUT] * 2
    sent: list[int] = []
    pool.resend = lambda: sent.append(pool.version) or pool.updated(pool.version)
    pool.begin(prompts(0, 1), SAMPLING)
    assert not any(call.method == "begin" for group in (first, second) for call in group.calls)
    pool.collect("train", 0)
    assert sent == [0]
    assert first.last("begin") and second.last("begin")


@pytest.mark.parametrize(
    ("load_format", "named"), [("checkpoint", {}), ("auto", WITHOUT), ("dummy", WITHOUT)]
)
def test_on_shared_devices_a_server_that_joins_starts_as_all_others_do(
    monkeypatch, load_format, named
):
    monkeypatch.setattr("mcore_rl.workers.server_groups.wait_until_built", len)
    first, again = ServedGroup(0), AnsweringGroup(0)
    pool = pool_of(first, again={0: again}.__getitem__, takes_turns=True, load_format=load_format)
    pool.updated(5)
    pool.begin(prompts(0), SAMPLING)
    pool.collect("train", 0)
    first.last("collect").reply.set_exception(RayActorError())
    pool.resend = lambda: None
    pool.collect("train", 0)
    assert [call.method for call in again.calls] == ["prepare"]
    pool.start_asleep()
    assert [(call.method, call.named) for call in again.calls[1:]] == [
        ("start", named),
        ("sleep", {}),
    ]
