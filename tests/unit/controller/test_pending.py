"""Which failure of several ends a call, and when: replies come by a clock of the test's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller import pending
from mcore_rl.controller.pending import (
    GRACE_S,
    Limit,
    PendingCall,
    WorkerError,
    gathered,
    outlived,
)
from mcore_rl.controller.rank_actor import Failure, FailureKind, Reply

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
    """Its rank dies when it ends, and the trainer that waits for it learns of it."""

    def __init__(self, name: str, sent: Sent, waiting: Sent) -> None:
        super().__init__(name)
        self._sent, self._waiting = sent, waiting

    def close(self, reason: str = "") -> None:
        super().close(reason)
        self._sent.answer.set_result(failure(FailureKind.DIED, "killed"))
        self._waiting.answer.set_result(failure(FailureKind.BLAMED, "rank 2 is gone"))


def sent(call: Sent, group: Group) -> PendingCall:
    return PendingCall(group, "update", {call: 0}, dict, LIMIT)


def test_after_a_death_a_server_that_is_silent_ends_and_so_does_who_waits_for_it():
    """The trainer waits for a server that is stopped: the run goes on without both servers."""
    first, second, trainer = Sent(), Sent(), Sent()
    dead, silent = Group("rollout-0"), Killed("rollout-1", second, trainer)
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


def test_without_a_death_one_that_is_stopped_counts_as_dead(monkeypatch: pytest.MonkeyPatch):
    """The other server and the trainer only wait for it."""
    stopped, waits, trainer = Sent(), Sent(), Sent()
    first, second = Killed("rollout-0", stopped, trainer), Group("rollout-1")
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
