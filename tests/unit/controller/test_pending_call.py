"""Choose the failure that ends a call, with replies that come by a clock of the test."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread, Timer
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller import pending_call
from mcore_rl.controller.pending_call import (
    GRACE_S,
    PendingCall,
    ReplyQueue,
    Timeout,
    UnansweredCall,
    WorkerError,
    describe_unanswered,
    find_stopped,
    gather_results,
    wait_for_survivors,
)
from mcore_rl.controller.worker_process import Failure, FailureKind, Reply, WorkerInfo
from mcore_rl.observability.stacks import ProcessState
from tests.operations import growth

LIMIT = Timeout(10.0, "timeouts.call_s")


def failure(kind: FailureKind, message: str) -> Reply:
    return Reply(failure=Failure(kind, "ValueError", message))


class Group:
    def __init__(self, name: str = "policy") -> None:
        self.name, self.worker_infos, self.end_reason = name, {}, ""

    def close(self, reason: str = "") -> None:
        self.end_reason = reason


@dataclass(frozen=True, eq=False)
class Coming:
    """A reference to a reply that comes at a moment, and its future."""

    moment: float
    rank: int
    reply: Reply

    def future(self) -> Coming:
        return self

    def result(self) -> Reply:
        return self.reply

    def add_done_callback(self, callback: Callable[[Coming], object]) -> None:
        """Call nothing: replies come when somebody waits for them."""


class Clock:
    """Time passes when somebody waits for replies."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def iterate_replies(self, futures: Iterable[Coming], timeout: float) -> Iterator[Coming]:
        deadline = self.time_s + timeout
        for future in sorted(futures, key=lambda future: future.moment):
            self.time_s = max(self.time_s, min(future.moment, deadline))
            if future.moment > deadline:
                raise TimeoutError
            yield future

    def call(
        self, *replies: tuple[float, Reply], group: Group | None = None, limit: Timeout = LIMIT
    ) -> PendingCall:
        """Call ranks 0, 1, ..."""
        calls = {Coming(moment, rank, r): rank for rank, (moment, r) in enumerate(replies)}
        return PendingCall(group or Group(), "update", calls, dict, limit)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pending_call, "as_completed", made.iterate_replies)
    monkeypatch.setattr(pending_call, "time", SimpleNamespace(monotonic=lambda: made.time_s))
    message = "{0.call}: {0} of {1}, in {2}"
    monkeypatch.setattr(
        pending_call,
        "describe_unanswered",
        lambda ranks, timeout: message.format(ranks[0], len(ranks), timeout),
    )
    return made


def test_timeout_counts_for_the_call_and_not_for_each_reply(clock: Clock):
    call = clock.call(*((4.0 * rank, Reply(rank)) for rank in range(5)))
    with pytest.raises(WorkerError, match=r"^policy.update: rank 3 of 2, in 10 s \(timeouts.call"):
        call.result()
    assert clock.time_s == 10


def test_result_takes_a_timeout_that_replaces_the_one_of_the_method(clock: Clock):
    late = clock.call((30.0, Reply(7)))
    assert late.result(Timeout(60.0, "weight_sync.timeout_s")) == {0: 7}
    with pytest.raises(WorkerError, match=r"in 3 s \(weight_sync.timeout_s\)"):
        clock.call((34.0, Reply(7))).result(Timeout(3.0, "weight_sync.timeout_s"))
    assert clock.time_s == 33


def test_gather_results_waits_for_the_longest_timeout_of_its_calls(clock: Clock):
    short, long = (
        clock.call((0.0, Reply())),
        clock.call((40.0, Reply()), limit=Timeout(50.0, "start_s")),
    )
    assert gather_results([short, long]) == [{0: None}, {0: None}]
    assert clock.time_s == 40


def test_timeout_ends_only_groups_that_are_late_and_is_raised_again(clock: Clock):
    done, late = Group("actor"), Group("rollout")
    calls = [
        clock.call((1.0, Reply()), group=done),
        clock.call((1.0, Reply()), (math.inf, Reply()), group=late),
    ]
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"^rollout.update: rank 1 of 1, in 10 s"):
            gather_results(calls)
    assert clock.time_s == 10
    assert late.end_reason == (
        "the group has ended: rollout.update: rank 1 of 1, in 10 s (timeouts.call_s)"
    )
    assert not done.end_reason


def test_gather_results_raises_the_first_of_two_failures_of_a_kind(clock: Clock):
    call = clock.call(
        (math.inf, Reply()),
        (2.5, failure(FailureKind.RAISED, "late")),
        (2.0, failure(FailureKind.RAISED, "early")),
    )
    with pytest.raises(WorkerError, match=r"^policy.update: rank 2 raised ValueError: early"):
        call.result()
    assert clock.time_s == 2 + GRACE_S


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (FailureKind.DIED, WorkerError, "policy.update: rank 1 died. the cause"),
        (FailureKind.CONFIG, ConfigError, "policy.update: rank 1: the cause"),
        (FailureKind.RAISED, WorkerError, "policy.update: rank 1 raised ValueError: the cause"),
    ],
)
def test_result_waits_for_the_cause_after_a_rank_blames_another(clock: Clock, kind, error, message):
    call = clock.call(
        (2.0, failure(FailureKind.BLAMED, "rank 1 is silent")),
        (2.0 + GRACE_S / 2, failure(kind, "the cause")),
    )
    with pytest.raises(error) as raised:
        call.result()
    assert str(raised.value) == message
    assert clock.time_s == 2 + GRACE_S / 2


class Counted(Future[Reply]):
    """A rank's reply and its reference; it comes when that of the rank before has been taken."""

    looks = 0  # at any of them

    def __init__(self, rank: int, following: Counted | None) -> None:
        super().__init__()
        self.rank, self.following = rank, following

    def future(self) -> Counted:
        return self

    def result(self, timeout: float | None = None) -> Reply:
        if self.following is not None:
            self.following.set_result(Reply(self.following.rank))
        return super().result(0)

    def __hash__(self) -> int:
        Counted.looks += 1
        return id(self)


@pytest.mark.parametrize("num_ranks", [64, 1024, 4096])
def test_result_looks_at_each_reply_a_few_times(monkeypatch: pytest.MonkeyPatch, num_ranks: int):
    replies: list[Counted] = []  # the last first
    for rank in reversed(range(num_ranks)):
        replies.append(Counted(rank, replies[-1] if replies else None))
    replies[-1].set_result(Reply(0))
    monkeypatch.setattr(Counted, "looks", 0)
    call = PendingCall(Group(), "update", {reply: reply.rank for reply in replies}, dict, LIMIT)
    assert call.result() == {rank: rank for rank in range(num_ranks)}
    assert Counted.looks <= 8 * num_ranks


class Sent:
    """A call to one rank, answered by the test."""

    def __init__(self) -> None:
        self.answer = Future[Reply]()

    def future(self) -> Future[Reply]:
        return self.answer


class Killed(Group):
    """Its rank dies when it ends, and the trainer that waits for it learns of it, at once or later.

    Later than the limit of a call, and earlier than NODE_GRACE_S.
    """

    def __init__(self, name: str, sent: Sent, waiting: Sent, later_s: float) -> None:
        super().__init__(name)
        self._sent, self._waiting, self._later_s = sent, waiting, later_s

    def close(self, reason: str = "") -> None:
        super().close(reason)
        self._sent.answer.set_result(failure(FailureKind.DIED, "killed"))
        answer_later(self._waiting, failure(FailureKind.BLAMED, "rank 2 is gone"), self._later_s)


def answer_later(call: Sent, reply: Reply, seconds: float) -> None:
    Timer(seconds, call.answer.set_result, [reply]).start()


def sent(call: Sent, group: Group) -> PendingCall:
    return PendingCall(group, "update", {call: 0}, dict, LIMIT)


@pytest.mark.parametrize("later_s", [0.0, 0.5])
def test_wait_for_survivors_ends_silent_servers_after_a_death(later_s):
    # The trainer waits for a server that is stopped: the run goes on without both servers.
    first, second, trainer = Sent(), Sent(), Sent()
    dead, silent = Group("rollout-0"), Killed("rollout-1", second, trainer, later_s)
    calls = [sent(first, dead), sent(second, silent), sent(trainer, Group("actor"))]
    first.answer.set_result(failure(FailureKind.DIED, "killed"))
    reasons = list[str]()
    limit = Timeout(0.1, "weight_sync.timeout_s")
    deaths = wait_for_survivors(
        calls, [dead, silent], limit, lambda: reasons.append(dead.end_reason)
    )
    assert sorted(deaths) == [0, 1] and len(reasons) == 1 and "killed" in reasons[0]
    assert "rollout-1.update: rank 0 has not answered in 0.1 s" in str(deaths[1])


def test_wait_for_survivors_raises_at_the_timeout_without_a_death():
    first, second = Group("rollout-0"), Group("rollout-1")
    calls = [sent(Sent(), first), sent(Sent(), second)]
    with pytest.raises(WorkerError, match=r"has not answered in 0\.1 s"):
        wait_for_survivors(calls, [first, second], Timeout(0.1, "weight_sync.timeout_s"))


def test_wait_for_survivors_returns_a_death_that_is_reported_after_the_blame():
    server, trainer, dead = Sent(), Sent(), Group("rollout-0")
    calls = [sent(server, dead), sent(trainer, Group("actor"))]
    trainer.answer.set_result(failure(FailureKind.BLAMED, "rank 1 is gone"))
    answer_later(server, failure(FailureKind.DIED, "killed"), 0.3)
    assert [*wait_for_survivors(calls, [dead])] == [0]


def test_wait_for_survivors_raises_blame_of_a_server_that_lives(monkeypatch):
    """After time for the server to be heard; it has no more to say."""
    monkeypatch.setattr(pending_call, "GRACE_S", 0.3)
    monkeypatch.setattr(pending_call, "_POLL_S", 0.05)
    trainer, group = Sent(), Group("rollout-0")
    trainer.answer.set_result(failure(FailureKind.BLAMED, "rank 1 is gone"))
    with pytest.raises(WorkerError, match=r"actor.update: rank 0 raised \w+: rank 1 is gone"):
        wait_for_survivors([sent(Sent(), group), sent(trainer, Group("actor"))], [group])


def answer_in_turn(calls: list[Sent], reply: Reply) -> Thread:
    """Answer each a little after the one before, so that each ends a wait."""

    def answer() -> None:
        for call in calls:
            time.sleep(0.002)
            call.answer.set_result(reply)

    thread = Thread(target=answer)
    thread.start()
    return thread


ANSWERS = {
    "values": Reply(1),
    "deaths": failure(FailureKind.DIED, "killed"),
    "blame after a death": failure(FailureKind.BLAMED, "rank 0 is gone"),
}


@pytest.mark.parametrize("answers", ANSWERS)
def test_wait_for_survivors_takes_time_linear_in_calls(answers):
    def wait_for(num_calls: int) -> None:
        references, groups = ([make() for _ in range(num_calls)] for make in (Sent, Group))
        calls = [sent(*both) for both in zip(references, groups, strict=True)]
        if answers == "blame after a death":
            references[0].answer.set_result(failure(FailureKind.DIED, "killed"))
        left = [reference for reference in references if not reference.answer.done()]
        thread = answer_in_turn(left, ANSWERS[answers])
        deaths = wait_for_survivors(calls, groups)
        thread.join()
        assert len(deaths) == {"values": 0, "deaths": num_calls}.get(answers, 1)

    assert growth(wait_for, 16, 128) < 1.5


def test_reply_queue_returns_each_reply_once():
    references = [Sent() for _ in range(3)]
    calls = [sent(reference, Group()) for reference in references]
    references[0].answer.set_result(Reply(0))
    replies = ReplyQueue(calls)
    replies.watch(calls)
    assert replies.wait(10.0) == [calls[0]] and calls[0].result() == {0: 0}
    for index in (2, 1):
        references[index].answer.set_result(Reply(index))
    assert calls[1].has_ended()
    assert replies.wait(10.0) == [calls[2]]
    assert replies.wait(0.01) == []


def test_wait_for_survivors_ends_a_stopped_server_at_the_timeout(monkeypatch: pytest.MonkeyPatch):
    # The other server and the trainer only wait for it.
    stopped, waits, trainer = Sent(), Sent(), Sent()
    first, second = Killed("rollout-0", stopped, trainer, 0.0), Group("rollout-1")
    monkeypatch.setattr(
        pending_call, "find_stopped", lambda silent: [s for s in silent if "rollout-0" in s.call]
    )

    def end_waits() -> None:
        waits.answer.set_result(failure(FailureKind.BLAMED, "a server has died"))

    calls = [sent(stopped, first), sent(waits, second), sent(trainer, Group("actor"))]
    deaths = wait_for_survivors(
        calls, [first, second], Timeout(0.1, "weight_sync.timeout_s"), end_waits
    )
    assert list(deaths) == [0] and first.end_reason and not second.end_reason
    assert "rollout-0.update: rank 0 has not answered in 0.1 s" in str(deaths[0])


def test_wait_for_survivors_raises_at_the_timeout_for_a_stopped_trainer(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        pending_call, "find_stopped", lambda silent: [s for s in silent if "actor" in s.call]
    )
    server, trainer = Group("rollout-0"), Group("actor")
    calls = [sent(Sent(), server), sent(Sent(), trainer)]
    with pytest.raises(WorkerError, match=r"has not answered in 0\.1 s"):
        wait_for_survivors(calls, [server], Timeout(0.1, "weight_sync.timeout_s"))


LIMIT_TEXT = "9 s (timeouts.call_s)"
UP, GONE, BUSY = (letter * 56 for letter in "abc")  # ids of nodes


class Nodes:
    """Ray's tasks on nodes: one answers with its looks, one fails, one is never done."""

    def __init__(self, looks: dict[int, ProcessState]) -> None:
        self.looks, self.waited, self.cancelled = looks, [], []
        self.children: dict[int, list[ProcessState]] = {}

    def options(self, scheduling_strategy):
        node = scheduling_strategy.node_id
        return SimpleNamespace(remote=lambda pids: (node, tuple(pids)))

    def wait(self, tasks, num_returns, timeout):
        assert num_returns == len(tasks)
        self.waited.append(timeout)
        late = [task for task in tasks if task[0] == BUSY]
        return [task for task in tasks if task not in late], late

    def get(self, task):
        if task[0] == GONE:
            raise RayError("the node is gone")
        return [[self.looks[pid], *self.children.get(pid, [])] for pid in task[1]]

    def cancel(self, task, force):
        self.cancelled.append((task[0], force))


def describe(
    monkeypatch, states: dict[int, tuple[str, str]], child: tuple[int, str] | None = None
) -> tuple[list[str], list[int], Nodes]:
    """Return the paragraphs on ranks, the stopped ranks, and the nodes.

    Args:
        states: Node and state by rank; pids are 100 + rank.
        child: A rank that has started another process, and the state of that.
    """
    looks = {
        100 + rank: ProcessState(
            100 + rank, "ray::Rank", state, f'Thread 1 "MainThread"\n    f{rank} (a)'
        )
        for rank, (_, state) in states.items()
    }
    nodes = Nodes(looks)
    if child is not None:
        nodes.children[100 + child[0]] = [ProcessState(200, "engine", child[1], "")]
    monkeypatch.setattr(pending_call, "ray", nodes)
    monkeypatch.setattr(pending_call, "_inspect_pids", nodes)
    unanswered = [
        UnansweredCall(
            "actor.update", rank, WorkerInfo("h", node, 100 + rank, "") if node else None
        )
        for rank, (node, _) in states.items()
    ]
    stopped = [rank.rank for rank in find_stopped(unanswered)]
    nodes.waited.clear(), nodes.cancelled.clear()
    return describe_unanswered(unanswered, LIMIT_TEXT).split("\n\n"), stopped, nodes


def test_timeout_error_begins_with_the_blocking_rank_and_names_all_ranks(monkeypatch):
    states = dict.fromkeys(range(6), (UP, "waiting")) | {4: (UP, "stopped by a signal")}
    (line, *stacks), stopped, _ = describe(monkeypatch, states)
    assert stopped == [4]
    first, *rest = line.split(". Nor has ")[0], *line.split("or has ")[1:]
    who = "rank 4 (host h, pid 104)"
    assert (
        first
        == f"actor.update: {who} has not answered in {LIMIT_TEXT}: stopped by a signal, in f4 (a)"
    )
    assert rest == [
        "rank 0 (host h, pid 100): waiting, in f0 (a); n",
        "rank 1 (host h, pid 101): waiting, in f1 (a); n",
        "rank 2 (host h, pid 102): waiting, in f2 (a); n",
        "ranks 3, 5",
    ]
    assert [stack.split("\n")[0] for stack in stacks] == [
        f"actor.update, rank {rank} (host h, pid {100 + rank}):" for rank in (4, 0, 1, 2, 3, 5)
    ]


def test_timeout_error_begins_with_a_rank_whose_child_is_gone(monkeypatch):
    states = {0: (UP, "running"), 1: (UP, "waiting"), 2: (UP, "waiting")}
    (line, *_), _, _ = describe(monkeypatch, states, child=(2, "gone"))
    assert line.startswith("actor.update: rank 2 (host h, pid 102) has not answered in ")
    assert "its process 200 (engine) is gone" in line


def test_timeout_error_comes_without_nodes_that_do_not_answer(monkeypatch):
    states = {0: (UP, "running"), 1: (GONE, "running"), 2: (BUSY, "running"), 3: ("", "")}
    (line, *stacks), stopped, nodes = describe(monkeypatch, states)
    assert line.count("its processes were not inspected in 60 s") == 2
    assert "rank 3: its process has not come up" in line
    assert "rank 0 (host h, pid 100): running, in f0 (a)" in line
    assert len(stacks) == 1
    assert nodes.waited == [60.0]
    assert nodes.cancelled == [(BUSY, True)]
    assert stopped == []  # of ranks that nobody sees, nothing is known


def test_find_stopped_returns_ranks_that_are_gone_or_stopped_by_a_signal(monkeypatch):
    states = ("gone", "stopped by a signal", "stopped by a debugger", "running", "waiting")
    _, stopped, _ = describe(monkeypatch, {rank: (UP, state) for rank, state in enumerate(states)})
    assert stopped == [0, 1]


def test_grace_is_longer_with_ranks_on_several_nodes():
    infos = [WorkerInfo("h", node_id, 1, "") for node_id in ("a", "b")]
    call = SimpleNamespace(group=SimpleNamespace(worker_infos=dict(enumerate(infos))))
    assert pending_call._get_grace_s([call]) == pending_call.NODE_GRACE_S
    call.group.worker_infos.pop(1)
    assert pending_call._get_grace_s([call]) == pending_call.GRACE_S
