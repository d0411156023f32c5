"""Groups and servers of a pool. The servers are fakes that answer when a test says so; no Ray."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RolloutConfig, SpeculativeConfig, TimeoutsConfig
from mcore_rl.controller import object_columns
from mcore_rl.controller.dispatch import RemoteMethod
from mcore_rl.controller.object_store import GENERATED_BYTES_PER_TOKEN
from mcore_rl.controller.pending_call import PendingCall, Timeout, WorkerError
from mcore_rl.controller.worker_process import Reply, WorkerInfo
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import DraftCounts, SamplingParams
from mcore_rl.observability.timeline import TIMELINE
from mcore_rl.rollout import server_pool
from mcore_rl.rollout.manager import RolloutPool
from mcore_rl.rollout.server_pool import COLLECT_ALL_S, POLL_S, ServerPool
from mcore_rl.rollout.worker import RolloutWorker
from tests.operations import growth

SAMPLING = SamplingParams(n=2, max_tokens=3)
NEVER = Timeout(3600, "timeouts.start_s")


class Call(PendingCall):
    """A call on one rank, answered by a test."""

    def __init__(self, group: ServedGroup, method: str, args: tuple[Any, ...], limit: Timeout):
        self.reply, self.method, self.args = Future[Reply](), method, args
        super().__init__(group, method, {self: 0}, lambda values: [values[0]], limit)  # type: ignore[dict-item]

    def future(self) -> Future[Reply]:
        return self.reply

    def answer(self, value: Any = None) -> None:
        self.reply.set_result(Reply(value))


class ServedGroup:
    """The worker group of a server, which records all calls."""

    def __init__(self, number: int, start_limit: Timeout = NEVER) -> None:
        self.name, self.end_reason, self._start_timeout = f"rollout-{number}", "", start_limit
        self.worker_infos = {0: WorkerInfo("host", "node", 1, "/nowhere")}
        self.calls, self.build_calls, self.may_make = list[Call](), list[Call](), list[int]()

    def close(self, reason: str = "") -> None:
        self.end_reason = self.end_reason or reason or "closed"

    def submit(self, method: RemoteMethod[..., Any], *args: Any) -> Call:
        limit = Timeout(60, "timeouts.call_s")
        if method.registration.is_start:
            limit = self._start_timeout
        if method.result_bytes:
            self.may_make.append(method.result_bytes)
        self.calls.append(Call(self, method.name, args, limit))
        return self.calls[-1]

    def last(self, method: str) -> Call:
        return next(call for call in reversed(self.calls) if call.method == method)


def make_pool(
    *groups: ServedGroup,
    restart: Callable[[int], ServedGroup] = ServedGroup,
    takes_turns: bool = False,
    desired: Callable[[], set[int]] | None = None,
    load_format: Any = "checkpoint",
) -> ServerPool:
    """Make a pool of servers 0, 1, ... that have started; `restart` makes those started again."""
    initial = dict(enumerate(groups))

    def start(number: int) -> Any:
        return initial.pop(number, None) or restart(number)

    pool = ServerPool(
        start,
        len(groups),
        max_restarts=3,
        takes_turns=takes_turns,
        timeouts=TimeoutsConfig(),
        desired=desired,
        load_format=load_format,
    )
    pool.submit_start()
    pool.mark_started()
    return pool


def make_prompts(*groups: int) -> Batch:
    ids = Jagged.pack([[1] for _ in groups], np.int64)
    return Batch({"prompt_ids": ids, "group_ids": np.array(groups)})


def make_samples(version: int, *groups: int) -> Batch:
    return Batch.collate(
        [
            Sample([1], [group, i], [1, 1], [0.0, 0.0], [version] * 2, "stop", group)
            for group in groups
            for i in range(2)
        ]
    )


def summarize(batches: list[Batch]) -> list[tuple[list[int], set[int]]]:
    """Return group ids and versions of each batch."""
    return [
        (sorted({*b.array("group_ids").tolist()}), {*b.jagged("weight_versions").values.tolist()})
        for b in batches
    ]


def test_an_earlier_answer_is_not_used_for_a_group_that_began_again():
    group = ServedGroup(0)
    pool = make_pool(group)
    pool.begin(make_prompts(5, 6), SAMPLING)
    assert pool.collect("train", 0) == []
    old = group.last("collect")
    pool.abandon("train", [5])
    pool.mark_updated(3)
    pool.begin(make_prompts(5), SAMPLING)
    old.answer(make_samples(0, 5, 6))  # both had ended before the server got the call
    assert summarize(pool.collect("train", 0)) == [([6], {0})]
    assert pool.num_outstanding("train") == 1
    group.last("collect").answer(make_samples(3, 5))
    assert summarize(pool.collect("train", 0)) == [([5], {3})]
    assert pool.num_outstanding("train") == 0


def test_groups_of_a_dead_server_are_rerouted_once():
    groups = ServedGroup(0), ServedGroup(1)
    pool = make_pool(*groups)
    pool.begin(make_prompts(0, 1, 2, 3), SAMPLING)
    pool.begin(make_prompts(3), SAMPLING, "evaluation")
    assert pool.pop_rerouted("train") == []
    pool.collect("train", 0)
    groups[1].last("collect").reply.set_exception(RayActorError())
    for _ in range(2):
        pool.collect("train", 0)
    begun = [c.args[0].array("group_ids").tolist() for c in groups[0].calls if c.method == "begin"]
    assert begun == [[0, 2], [1, 3], [3]]  # and the evaluation's group
    assert pool.pop_rerouted("train") == [1, 3] and pool.pop_rerouted("train") == []


def test_large_prompts_are_stored_and_stored_again_when_they_are_rerouted(monkeypatch):
    objects: list[Any] = []
    store = SimpleNamespace(
        put=lambda value: objects.append(value) or len(objects) - 1,
        get=lambda references, timeout: [objects[reference] for reference in references],
        nodes=lambda: [],
    )
    monkeypatch.setattr(object_columns, "ray", store)
    groups = ServedGroup(0), ServedGroup(1)
    pool = make_pool(*groups)
    ids = Jagged.pack([[group] * 4000 for group in range(4)], np.int32)
    pool.begin(Batch({"prompt_ids": ids, "group_ids": np.arange(4)}), SAMPLING)
    pool.begin(make_prompts(9), SAMPLING)
    assert [len(columns["prompt_ids"]) for columns in objects] == [2, 2]  # not the small ones
    pool.collect("train", 0)
    groups[1].last("collect").reply.set_exception(RayActorError())
    for _ in range(2):
        pool.collect("train", 0)
    assert len(objects) == 3
    rerouted = object_columns.fetch_columns(groups[0].last("begin").args[0].drop_lengths())
    assert rerouted.names == ["prompt_ids", "group_ids"]
    assert rerouted.array("group_ids").tolist() == [1, 3]
    assert [set(row.tolist()) for row in rerouted.jagged("prompt_ids")] == [{1}, {3}]


def test_a_late_start_is_begun_again_while_others_serve(monkeypatch, capsys):
    monkeypatch.setattr(server_pool, "CHECK_S", 0.0)
    monkeypatch.setattr(
        "mcore_rl.controller.pending_call.describe_unanswered", lambda silent, _: silent[0].call
    )
    started: list[ServedGroup] = []

    def restart(number: int) -> ServedGroup:
        started.append(ServedGroup(number, Timeout(0, "timeouts.start_s")))
        return started[-1]

    groups = ServedGroup(0), ServedGroup(1)
    pool = make_pool(*groups, restart=restart)
    pool.begin(make_prompts(0, 1), SAMPLING)
    pool.collect("train", 0)
    groups[1].last("collect").reply.set_exception(RayActorError())
    for _ in range(9):
        pool.collect("train", 0)
    assert len(started) > 5 and all(group.end_reason for group in started[:-1])
    output = capsys.readouterr().out
    assert output.count("It is started again: 1, rollout.max_restarts=3\n") == 1
    assert (
        len(
            re.findall(
                r"(?m)^server 1 on host host: rollout-1\.prepare It is started again$", output
            )
        )
        > 4
    )
    groups[0].last("collect").reply.set_exception(RayActorError())
    with pytest.raises(WorkerError, match=r"rollout-[01]\.prepare"):  # none serves
        for _ in range(9):
            pool.collect("train", 0)


def test_drafts_are_counted_over_all_servers_that_are_up():
    """The acceptance is of all drafted tokens, no mean over servers; one has died in the call."""
    answers = [DraftCounts(10, 20, 5), None, DraftCounts(10, 60, 50)]

    class Answering(ServedGroup):
        def submit(self, method: RemoteMethod[..., Any], *args: Any) -> Call:
            answer, call = answers[int(self.name[-1])], super().submit(method, *args)
            if method is RolloutWorker.take_draft_counts and answer is None:
                call.reply.set_exception(RayActorError())
            elif method is RolloutWorker.take_draft_counts:
                call.answer(answer)
            return call

    settings = RolloutConfig(speculative=SpeculativeConfig(2))
    pool: Any = RolloutPool(make_pool(*map(Answering, range(3))), settings, 0)
    expected = {"drafts/acceptance": 55 / 80, "drafts/step_tokens": 1 + 55 / 20}
    assert pool.compute_draft_metrics() == expected


def test_a_late_start_on_shared_devices_ends_the_run(
    monkeypatch,
):
    monkeypatch.setattr(server_pool, "CHECK_S", 0.0)
    monkeypatch.setattr(
        "mcore_rl.controller.pending_call.describe_unanswered", lambda silent, _: silent[0].call
    )
    groups = ServedGroup(0), ServedGroup(1)
    late = Timeout(0, "timeouts.start_s")
    pool = make_pool(*groups, restart=lambda number: ServedGroup(number, late), takes_turns=True)
    pool.begin(make_prompts(0, 1), SAMPLING)
    pool.collect("train", 0)
    groups[1].last("collect").reply.set_exception(RayActorError())
    with pytest.raises(WorkerError, match=r"rollout-1\.prepare"):
        for _ in range(9):
            pool.collect("train", 0)


def test_a_server_that_is_up_gets_weights_while_another_starts(monkeypatch):
    monkeypatch.setattr("mcore_rl.rollout.server_pool.wait_until_built", len)
    restarted = {0: ServedGroup(0), 1: ServedGroup(1)}
    groups = ServedGroup(0), ServedGroup(1)
    pool = make_pool(*groups, restart=restarted.__getitem__)
    pool.mark_updated(3)
    pool.resend = lambda: pool.mark_updated(3)
    pool.begin(make_prompts(0, 1), SAMPLING)
    pool.collect("train", 0)
    for group in groups:
        group.last("collect").reply.set_exception(RayActorError())
    pool.collect("train", 0)
    for method in ("prepare", "start"):
        restarted[0].last(method).answer()
    for _ in range(2):
        pool.collect("train", 0)
    assert restarted[0].last("begin").args[0].array("group_ids").tolist() == [0, 1]


def test_servers_collect_their_share_and_wait_longer_the_more_there_are():
    for num, wait_s in ((1, POLL_S), (2, POLL_S), (16, 2 * POLL_S), (400, 2.0)):
        groups = [ServedGroup(number) for number in range(num)]
        pool = make_pool(*groups)
        pool.begin(make_prompts(*range(num)), SAMPLING)
        pool.collect("train", 0, at_least=3 * num - 1)
        assert {g.last("collect").args for g in groups} == {("train", wait_s, 3 if num > 1 else 2)}
    for num, wait_s in ((1, COLLECT_ALL_S), (192, 6.0), (400, 10.0)):
        groups = [ServedGroup(number) for number in range(num)]
        pool = make_pool(*groups)
        pool.begin(make_prompts(*range(3 * num)), SAMPLING)
        pool.collect("train", 0, at_least=None)
        assert {g.last("collect").args for g in groups} == {("train", wait_s, 3)}


def count_collects(group: ServedGroup) -> int:
    return sum(call.method == "collect" for call in group.calls)


@pytest.mark.parametrize(
    ("num", "at_least", "pause_s"),
    [(32, None, 0.0), (192, None, 6.0), (400, None, 10.0), (192, 1, 2.0)],
)
def test_a_poll_leaves_many_servers_alone_for_as_long_as_a_call_may_wait(
    monkeypatch, num, at_least, pause_s
):
    now_s = 100.0
    monkeypatch.setattr(server_pool, "time", SimpleNamespace(monotonic=lambda: now_s))
    groups = [ServedGroup(number) for number in range(num)]
    pool = make_pool(*groups)
    pool.begin(make_prompts(*range(2 * num)), SAMPLING)

    def poll() -> int:
        earlier = sum(map(count_collects, groups))
        assert pool.poll("train", at_least) == []
        return sum(map(count_collects, groups)) - earlier

    assert poll() == num
    assert {group.last("collect").args for group in groups} == {("train", 0.0, 0)}
    for group in groups:
        group.last("collect").answer(Batch({}))
    now_s = 100.0 + 0.9 * pause_s
    assert poll() == (0 if pause_s else num)
    now_s = 100.0 + pause_s
    assert poll() == (num if pause_s else 0)


def test_a_poll_returns_samples_of_a_server_that_it_does_not_ask_again():
    groups = [ServedGroup(number) for number in range(40)]
    pool = make_pool(*groups)
    pool.begin(make_prompts(*range(80)), SAMPLING)
    pool.poll("train", at_least=None)
    groups[3].last("collect").answer(make_samples(0, 3))
    assert summarize(pool.poll("train", at_least=None)) == [([3], {0})]
    assert count_collects(groups[3]) == 1
    pool.collect("train", 0)  # a step waits for samples
    assert count_collects(groups[3]) == 2


def test_operations_for_an_answer_do_not_depend_on_the_number_of_servers(monkeypatch):
    monkeypatch.setattr(server_pool, "CHECK_S", 3600.0)
    TIMELINE.take("training", 0)  # a timeline that is full of other tests' spans takes more
    groups = {num: [ServedGroup(number) for number in range(num)] for num in (16, 128)}
    pools = {num: make_pool(*groups[num]) for num in groups}
    for num, pool in pools.items():
        pool.begin(make_prompts(*range(num)), SAMPLING)
        pool.collect("train", 0)

    def answer_one_at_a_time(num: int) -> None:
        for number, group in enumerate(groups[num]):
            group.last("begin").answer()
            group.last("collect").answer(make_samples(0, number))
            assert len(pools[num].collect("train", 0)) == 1
            pools[num].begin(make_prompts(num + number), SAMPLING)
            pools[num].collect("train", 0)

    assert growth(answer_one_at_a_time, 16, 128) < 1.2
    assert all(pool.num_outstanding("train") == num for num, pool in pools.items())


def test_a_call_is_compared_with_its_limit_once_a_second(monkeypatch):
    times = [0.0]
    clock = SimpleNamespace(monotonic=lambda: times[-1])
    for module in ("controller.pending_call", "rollout.server_pool"):
        monkeypatch.setattr(f"mcore_rl.{module}.time", clock)
    monkeypatch.setattr(
        "mcore_rl.controller.pending_call.describe_unanswered", lambda silent, _: str(silent[0])
    )
    restarted: list[int] = []

    def restart(number: int) -> ServedGroup:
        restarted.append(number)
        return ServedGroup(number)

    groups = ServedGroup(0), ServedGroup(1)
    pool = make_pool(*groups, restart=restart)
    pool.begin(make_prompts(0, 1), SAMPLING)
    monkeypatch.setattr(groups[1].last("begin"), "_timeout", Timeout(10, "timeouts.call_s"))
    for seconds, late in ((9.0, []), (9.9, []), (10.5, [1]), (11.5, [1])):
        times.append(seconds)
        pool.collect("train", 0)
        assert restarted == late


def test_bytes_of_an_answer_are_limited_by_the_tokens_of_its_groups():
    # Each group has two samples, of a prompt and up to three tokens.
    pool = make_pool(group := ServedGroup(0))
    ids = Jagged.pack([[1] * num for num in (9, 1, 2, 4)], np.int64)
    pool.begin(Batch({"prompt_ids": ids, "group_ids": np.arange(4)}), SAMPLING)
    for at_least, lengths in ((1, [9]), (2, [4, 2]), (None, [1, 2, 4])):
        pool.collect("train", 0, at_least)
        assert group.may_make.pop() == sum(
            2 * (num + 3) * GENERATED_BYTES_PER_TOKEN for num in lengths
        )
        group.last("collect").answer(make_samples(0, 0) if at_least == 1 else make_samples(0))


def test_samples_have_no_more_bytes_per_token_than_are_counted():
    sample = Sample([1], [2], [1], [0.0], [0], "stop", 0, process_rewards=[0.5], state_ids=[1])
    batch = Batch.collate([sample])
    columns = [c for name in batch.names if isinstance(c := batch[name], Jagged)]
    prompt_ids = columns.pop([batch["prompt_ids"] is c for c in columns].index(True))
    assert prompt_ids.values.nbytes <= GENERATED_BYTES_PER_TOKEN
    assert sum(column.values.nbytes for column in columns) <= GENERATED_BYTES_PER_TOKEN


def test_tend_collects_and_routes_groups_without_resending_weights():
    groups = ServedGroup(0), ServedGroup(1)
    pool = make_pool(*groups)
    pool.resend = lambda: pytest.fail("the trainer has other weights")
    pool.begin(make_prompts(0, 1), SAMPLING)
    assert pool.poll("train") == []
    assert {group.last("collect").args for group in groups} == {("train", 0.0, 0)}  # no wait
    groups[0].last("collect").answer(make_samples(0, 0))
    assert summarize(pool.poll("train")) == [([0], {0})]
    groups[1].last("collect").reply.set_exception(RayActorError())
    for _ in range(2):
        pool.poll("train")
    assert groups[0].last("begin").args[0].array("group_ids").tolist() == [1]
    groups[0].last("collect").reply.set_exception(RayActorError())
    pool.poll("train")
    assert pool.poll("train") == [] and pool.num_outstanding("train") == 1


class Leaving(ServedGroup):
    """A group whose shut_down succeeds at once."""

    def submit(self, method: RemoteMethod[..., Any], *args: Any) -> Call:
        call = super().submit(method, *args)
        if method is RolloutWorker.shut_down:
            call.answer()
        return call


def test_servers_leave_and_join_before_a_push(monkeypatch, capsys):
    monkeypatch.setattr("mcore_rl.rollout.server_pool.wait_until_built", len)
    desired, groups = {0, 1}, [Leaving(0), Leaving(1)]
    restarted = {number: Leaving(number) for number in (0, 1)}
    pool = make_pool(*groups, restart=restarted.__getitem__, desired=lambda: desired)
    pool.follow_desired()
    pool.begin(make_prompts(0, 1), SAMPLING)
    pool.collect("train", 0)
    assert not any(group.end_reason for group in groups)

    desired -= {1}
    pool.follow_desired()
    assert (groups[0].end_reason, bool(groups[1].end_reason)) == ("", True)
    pool.collect("train", 0)
    assert groups[0].last("begin").args[0].array("group_ids").tolist() == [1]

    desired |= {1}
    desired -= {0}
    for _ in range(2):  # the first stays until the second is up
        pool.follow_desired()
        assert not groups[0].end_reason
    for method in ("prepare", "start"):
        restarted[1].last(method).answer()
    pool.admit()
    pool.follow_desired()
    assert groups[0].end_reason and pool.num_up == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "as is wanted" in line]
    assert lines == [
        "rollout-1 has left, as is wanted", "rollout-1 is started, as is wanted",
        "rollout-0 has left, as is wanted",
    ]  # fmt: skip


def test_an_unreadable_file_of_servers_changes_nothing(capsys):
    def desired() -> set[int]:
        raise ConfigError("servers.json is damaged")

    pool = make_pool(ServedGroup(0), ServedGroup(1), desired=desired)
    pool.follow_desired()
    assert pool.num_up == 2
    assert capsys.readouterr().out == "servers stay as they are: servers.json is damaged\n"


def test_a_server_that_cannot_start_is_removed_without_a_wait():
    # Its node has died: nothing answers.
    starting = ServedGroup(1)
    pool = make_pool(ServedGroup(0), ServedGroup(1), restart={1: starting}.__getitem__)
    pool.begin(make_prompts(0, 1), SAMPLING)
    pool.collect("train", 0)
    pool._servers[1].group.last("collect").reply.set_exception(RayActorError())  # type: ignore[attr-defined]
    pool.collect("train", 0)
    pool.remove(1)
    assert starting.end_reason
    assert [call.method for call in starting.calls] == ["prepare", "start"]


@pytest.mark.parametrize("method", ["abandon", "collect", "begin"])
def test_a_server_that_answers_a_call_too_late_is_started_again(monkeypatch, capsys, method):
    # Its process may be stopped, while the other runs.
    monkeypatch.setattr(server_pool, "CHECK_S", 0.0)
    monkeypatch.setattr(
        "mcore_rl.controller.pending_call.describe_unanswered", lambda silent, _: str(silent[0])
    )
    late, good, restarted = ServedGroup(0), ServedGroup(1), list[ServedGroup]()

    def restart(number: int) -> ServedGroup:
        restarted.append(ServedGroup(number))
        return restarted[-1]

    pool = make_pool(late, good, restart=restart)
    pool.begin(make_prompts(0, 1, 2, 3), SAMPLING)
    assert pool.collect("train", 0) == []
    if method == "abandon":
        pool.abandon("train", [0, 1])
    monkeypatch.setattr(late.last(method), "_timeout", Timeout(0, "timeouts.call_s"))
    pool.collect("train", 0)
    assert [group.name for group in restarted] == ["rollout-0"] and not good.end_reason
    assert "rank 0 (host host, pid 1)" in late.end_reason
    output = capsys.readouterr().out
    assert output.startswith("server 0 on host host is lost: rank 0 (host host, pid 1)")
    assert "It is started again: 1, rollout.max_restarts=3" in output


def test_stopped_servers_are_restarted_when_no_group_ends(monkeypatch):
    groups, restarts = [ServedGroup(0), ServedGroup(1)], list[int]()
    pool = make_pool(*groups, restart=lambda number: restarts.append(number) or ServedGroup(number))
    monkeypatch.setattr(pool, "_call_timeout", Timeout(0.2, "timeouts.call_s"))
    stopped = ["rollout-1.collect"]
    monkeypatch.setattr(
        server_pool, "find_stopped", lambda silent: [s for s in silent if s.call in stopped]
    )
    monkeypatch.setattr(
        server_pool, "describe_unanswered", lambda silent, limit: f"{silent[0]} is stopped"
    )
    pool.begin(make_prompts(0, 1, 2, 3), SAMPLING)
    assert pool.collect("train", 0.3) == [] and restarts == [1]
    stopped.clear()
    with pytest.raises(WorkerError, match="no group has come back: rank 0"):
        pool.collect("train", 0.3)


def test_groups_of_a_server_that_answers_too_late_have_all_their_time_on_another(monkeypatch):
    # Both limits are timeouts.call_s: they may end together.
    monkeypatch.setattr(server_pool, "CHECK_S", 0.0)
    monkeypatch.setattr(
        "mcore_rl.controller.pending_call.describe_unanswered", lambda silent, _: str(silent[0])
    )
    monkeypatch.setattr(server_pool, "find_stopped", lambda silent: [])
    monkeypatch.setattr(server_pool, "describe_unanswered", lambda silent, _: silent[0].call)
    late = ServedGroup(1)
    pool = make_pool(ServedGroup(0), late)
    monkeypatch.setattr(pool, "_call_timeout", Timeout(1, "timeouts.call_s"))
    pool.begin(make_prompts(0, 1), SAMPLING)
    assert pool.collect("train", 0.6) == []
    monkeypatch.setattr(late.last("collect"), "_timeout", Timeout(0, "timeouts.call_s"))
    assert pool.collect("train", 0.6) == [] and late.end_reason
    with pytest.raises(WorkerError, match="no group has come back: rollout-0"):
        pool.collect("train", 0.6)


class AnsweringGroup(ServedGroup):
    """Answers each call at once."""

    def submit(self, method: RemoteMethod[..., Any], *args: Any) -> Call:
        call = super().submit(method, *args)
        call.answer([])
        return call


def record_resends(pool: ServerPool) -> list[int]:
    """Make `pool` send weights by recording their version in the list that is returned."""
    versions: list[int] = []

    def resend() -> None:
        versions.append(pool.version)
        pool.mark_updated(pool.version)

    pool.resend = resend
    return versions


@pytest.mark.parametrize(
    ("load_format", "version", "reads_weights"),
    [
        ("checkpoint", 0, True), ("checkpoint", 3, True), ("auto", 0, True), ("auto", 3, False),
        ("dummy", 0, False), ("dummy", 3, False),
    ],
)  # fmt: skip
def test_a_restarted_server_reads_weights_unless_a_push_brings_them_before_it_serves(
    monkeypatch, load_format, version, reads_weights
):
    monkeypatch.setattr(server_pool, "wait_until_built", len)
    first, restarted = ServedGroup(0), ServedGroup(0)
    pool = make_pool(first, restart={0: restarted}.__getitem__, load_format=load_format)
    resent = record_resends(pool)
    pool.mark_updated(version)
    pool.begin(make_prompts(0), SAMPLING)
    pool.collect("train", 0)
    first.last("collect").reply.set_exception(RayActorError())
    pool.collect("train", 0)
    assert restarted.last("start").args == (reads_weights,)
    for method in ("prepare", "start"):
        restarted.last(method).answer()
    pool.collect("train", 0)
    pool.collect("train", 0)
    serves_at_once = reads_weights and not version
    assert resent == ([] if serves_at_once else [version])
    assert restarted.last("begin").args[0].array("group_ids").tolist() == [0]


def test_servers_without_weights_are_sent_some_before_the_first_group():
    groups = [ServedGroup(0), ServedGroup(1)]
    pool = make_pool(*groups, load_format="dummy")
    assert [group.last("start").args for group in groups] == [(False,)] * 2
    sent = record_resends(pool)
    pool.begin(make_prompts(0, 1), SAMPLING)
    assert not any(call.method == "begin" for group in groups for call in group.calls)
    pool.collect("train", 0)
    assert sent == [0]
    assert all(group.last("begin") for group in groups)


@pytest.mark.parametrize(
    ("load_format", "reads_weights"), [("checkpoint", True), ("auto", False), ("dummy", False)]
)
def test_a_server_that_joins_on_shared_devices_starts_by_the_load_format(
    monkeypatch, load_format, reads_weights
):
    monkeypatch.setattr(server_pool, "wait_until_built", len)
    first, restarted = ServedGroup(0), AnsweringGroup(0)
    pool = make_pool(
        first, restart={0: restarted}.__getitem__, takes_turns=True, load_format=load_format
    )
    pool.mark_updated(5)
    pool.begin(make_prompts(0), SAMPLING)
    pool.collect("train", 0)
    first.last("collect").reply.set_exception(RayActorError())
    pool.resend = lambda: None
    pool.collect("train", 0)
    assert [call.method for call in restarted.calls] == ["prepare"]
    pool.start_asleep()
    assert [(call.method, call.args) for call in restarted.calls[1:]] == [
        ("start", (reads_weights,)),
        ("sleep", ()),
    ]
