"""Which failure of several ends a call, and when: replies come by a clock of the test's own."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread, Timer
from types import SimpleNamespace

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller import pending
from mcore_rl.controller.pending import (
    GRACE_S,
    Limit,
    PendingCall,
    Replies,
    WorkerError,
    gathered,
    outlived,
)
from mcore_rl.controller.rank_actor import Failure, FailureKind, Reply
from tests.operations import growth

LIMIT = Limit(10.0, "timeouts.call_s")


def failure(kind: FailureKind, message: str) -> Reply:
    return Reply(failure=Failure(kind, "ValueError", message))


class Group:
    def __init__(self, name: str = "policy") -> None:
        self.name, self.worker_infos, self.ended = name, {}, ""

    def close(self, reason: str = "") -> None:
        self.ended = reason


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


class Clock:
    """Time passes when somebody waits for replies."""

    def __init__(self) -> None:
        self.now = 0.0

    def as_completed(self, futures: Iterable[Coming], timeout: float) -> Iterator[Coming]:
        deadline = self.now + timeout
        for future in sorted(futures, key=lambda future: future.moment):
            self.now = max(self.now, min(future.moment, deadline))
            if future.moment > deadline:
                raise TimeoutError
            yield future

    def call(
        self, *replies: tuple[float, Reply], group: Group | None = None, limit: Limit = LIMIT
    ) -> PendingCall:
        """To ranks 0, 1, ..."""
        calls = {Coming(at, rank, reply): rank for rank, (at, reply) in enumerate(replies)}
        return PendingCall(group or Group(), "update", calls, dict, limit)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pending, "as_completed", made.as_completed)
    monkeypatch.setattr(pending, "time", SimpleNamespace(monotonic=lambda: made.now))
    told = "{0.call}: {0} of {1}, in {2}"
    monkeypatch.setattr(
        pending, "report", lambda silent, limit: told.format(silent[0], len(silent), limit)
    )
    return made


def test_the_limit_is_of_the_whole_call_and_not_of_each_reply(clock: Clock):
    call = clock.call(*((4.0 * rank, Reply(rank)) for rank in range(5)))
    with pytest.raises(WorkerError, match=r"^policy.update: rank 3 of 2, in 10 s \(timeouts.call"):
        call.result()
    assert clock.now == 10


def test_a_limit_that_is_given_goes_before_the_method_s_own(clock: Clock):
    late = clock.call((30.0, Reply(7)))
    assert late.result(Limit(60.0, "weight_sync.timeout_s")) == {0: 7}
    with pytest.raises(WorkerError, match=r"in 3 s \(weight_sync.timeout_s\)"):
        clock.call((34.0, Reply(7))).result(Limit(3.0, "weight_sync.timeout_s"))
    assert clock.now == 33


def test_several_calls_have_the_longest_of_their_limits(clock: Clock):
    short, long = (
        clock.call((0.0, Reply())),
        clock.call((40.0, Reply()), limit=Limit(50.0, "start_s")),
    )
    assert gathered([short, long]) == [{0: None}, {0: None}]
    assert clock.now == 40


def test_only_groups_that_are_late_end_at_the_limit_and_say_so_again(clock: Clock):
    done, late = Group("actor"), Group("rollout")
    calls = [
        clock.call((1.0, Reply()), group=done),
        clock.call((1.0, Reply()), (math.inf, Reply()), group=late),
    ]
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"^rollout.update: rank 1 of 1, in 10 s"):
            gathered(calls)
    assert clock.now == 10
    assert late.ended == (
        "the group has ended: rollout.update: rank 1 of 1, in 10 s (timeouts.call_s)"
    )
    assert not done.ended


def test_of_two_failures_of_a_kind_the_first_is_told(clock: Clock):
    call = clock.call(
        (math.inf, Reply()),
        (2.5, failure(FailureKind.RAISED, "late")),
        (2.0, failure(FailureKind.RAISED, "early")),
    )
    with pytest.raises(WorkerError, match=r"^policy.update: rank 2 raised ValueError: early"):
        call.result()
    assert clock.now == 2 + GRACE_S


@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        (FailureKind.DIED, WorkerError, "policy.update: rank 1 died. the cause"),
        (FailureKind.CONFIG, ConfigError, "policy.update: rank 1: the cause"),
        (FailureKind.RAISED, WorkerError, "policy.update: rank 1 raised ValueError: the cause"),
    ],
)
def test_a_rank_that_blames_another_gives_it_time_to_be_heard(clock: Clock, kind, error, told):
    call = clock.call(
        (2.0, failure(FailureKind.BLAMED, "rank 1 is silent")),
        (2.0 + GRACE_S / 2, failure(kind, "the cause")),
    )
    with pytest.raises(error) as raised:
        call.result()
    assert str(raised.value) == told
    assert clock.now == 2 + GRACE_S / 2


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
def test_replies_that_come_one_by_one_are_each_looked_at_a_few_times(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int
):
    replies: list[Counted] = []  # the last first
    for rank in reversed(range(num_ranks)):
        replies.append(Counted(rank, replies[-1] if replies else None))
    replies[-1].set_result(Reply(0))
    monkeypatch.setattr(Counted, "looks", 0)
    call = PendingCall(Group(), "update", {reply: reply.rank for reply in replies}, dict, LIMIT)
    assert call.result() == {rank: rank for rank in range(num_ranks)}
    assert Counted.looks <= 8 * num_ranks


class Sent:
    """A call to one rank that is answered when the test says so."""

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
def test_after_a_death_a_server_that_is_silent_ends_and_so_does_who_waits_for_it(later_s):
    """The trainer waits for a server that is stopped: the run goes on without both servers."""
    first, second, trainer = Sent(), Sent(), Sent()
    dead, silent = Group("rollout-0"), Killed("rollout-1", second, trainer, later_s)
    calls = [sent(first, dead), sent(second, silent), sent(trainer, Group("actor"))]
    first.answer.set_result(failure(FailureKind.DIED, "killed"))
    told = list[str]()
    limit = Limit(0.1, "weight_sync.timeout_s")
    deaths = outlived(calls, [dead, silent], limit, lambda: told.append(dead.ended))
    assert sorted(deaths) == [0, 1] and len(told) == 1 and "killed" in told[0]
    assert "rollout-1.update: rank 0 has not answered in 0.1 s" in str(deaths[1])


def test_without_a_death_a_server_that_is_silent_ends_the_run():
    first, second = Group("rollout-0"), Group("rollout-1")
    calls = [sent(Sent(), first), sent(Sent(), second)]
    with pytest.raises(WorkerError, match=r"has not answered in 0\.1 s"):
        outlived(calls, [first, second], Limit(0.1, "weight_sync.timeout_s"))


def test_who_blames_a_server_before_it_is_known_to_be_dead_does_not_end_the_run():
    server, trainer, dead = Sent(), Sent(), Group("rollout-0")
    calls = [sent(server, dead), sent(trainer, Group("actor"))]
    trainer.answer.set_result(failure(FailureKind.BLAMED, "rank 1 is gone"))
    answer_later(server, failure(FailureKind.DIED, "killed"), 0.3)
    assert [*outlived(calls, [dead])] == [0]


def test_who_blames_a_server_that_lives_ends_the_run(monkeypatch):
    """After time for the server to be heard; it has no more to say."""
    monkeypatch.setattr(pending, "GRACE_S", 0.3)
    monkeypatch.setattr(pending, "_LOOK_S", 0.05)
    trainer, group = Sent(), Group("rollout-0")
    trainer.answer.set_result(failure(FailureKind.BLAMED, "rank 1 is gone"))
    with pytest.raises(WorkerError, match=r"actor.update: rank 0 raised \w+: rank 1 is gone"):
        outlived([sent(Sent(), group), sent(trainer, Group("actor"))], [group])


def answer_in_turn(calls: list[Sent], reply: Reply) -> Thread:
    """Each a little after the one before, so that each ends a wait."""

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
def test_waiting_for_many_calls_takes_work_linear_in_them(answers):
    def wait_for(num_calls: int) -> None:
        references, groups = ([make() for _ in range(num_calls)] for make in (Sent, Group))
        calls = [sent(*both) for both in zip(references, groups, strict=True)]
        if answers == "blame after a death":
            references[0].answer.set_result(failure(FailureKind.DIED, "killed"))
        left = [reference for reference in references if not reference.answer.done()]
        thread = answer_in_turn(left, ANSWERS[answers])
        deaths = outlived(calls, groups)
        thread.join()
        assert len(deaths) == {"values": 0, "deaths": num_calls}.get(answers, 1)

    assert growth(wait_for, 16, 128) < 1.5


def test_replies_that_come_before_a_wait_or_twice_are_each_taken_once():
    references = [Sent() for _ in range(3)]
    calls = [sent(reference, Group()) for reference in references]
    references[0].answer.set_result(Reply(0))
    replies = Replies(calls)
    replies.watch(calls)
    assert replies.wait(10.0) == [calls[0]] and calls[0].result() == {0: 0}
    for index in (2, 1):
        references[index].answer.set_result(Reply(index))
    assert calls[1].has_ended()
    assert replies.wait(10.0) == [calls[2]]
    assert replies.wait(0.01) == []


def test_without_a_death_one_that_is_stopped_counts_as_dead(monkeypatch: pytest.MonkeyPatch):
    """The other server and the trainer only wait for it."""
    stopped, waits, trainer = Sent(), Sent(), Sent()
    first, second = Killed("rollout-0", stopped, trainer, 0.0), Group("rollout-1")
    monkeypatch.setattr(
        pending, "find_stopped", lambda silent: [s for s in silent if "rollout-0" in s.call]
    )

    def end_waits() -> None:
        waits.answer.set_result(failure(FailureKind.BLAMED, "a server has died"))

    calls = [sent(stopped, first), sent(waits, second), sent(trainer, Group("actor"))]
    deaths = outlived(calls, [first, second], Limit(0.1, "weight_sync.timeout_s"), end_waits)
    assert list(deaths) == [0] and first.ended and not second.ended
    assert "rollout-0.update: rank 0 has not answered in 0.1 s" in str(deaths[0])


def test_a_trainer_that_is_stopped_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        pending, "find_stopped", lambda silent: [s for s in silent if "actor" in s.call]
    )
    server, trainer = Group("rollout-0"), Group("actor")
    calls = [sent(Sent(), server), sent(Sent(), trainer)]
    with pytest.raises(WorkerError, match=r"has not answered in 0\.1 s"):
        outlived(calls, [server], Limit(0.1, "weight_sync.timeout_s"))
