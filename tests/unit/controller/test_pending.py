"""Which failure of several ends a call, and when: replies come by a clock of the test's own."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller import pending
from mcore_rl.controller.pending import GRACE_S, Limit, PendingCall, WorkerError, gathered
from mcore_rl.controller.rank_actor import Failure, FailureKind, Reply

LIMIT = Limit(10.0, "timeouts.call_s")


def failure(kind: FailureKind, message: str) -> Reply:
    return Reply(failure=Failure(kind, "ValueError", message))


class Group:
    def __init__(self, name: str = "policy") -> None:
        self.name, self.worker_infos, self.ended = name, {}, ""

    def close(self, reason: str = "") -> None:
        self.ended = reason


class Ray:
    """`ray.wait` and `ray.get` of replies that come at a moment; nobody waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.replies: list[tuple[float, Reply]] = []  # a reference is a place in it

    def wait(self, references, num_returns, timeout):
        first = min(self.replies[reference][0] for reference in references)
        self.now = max(self.now, min(first, self.now + timeout))
        ready = [r for r in references if self.replies[r][0] <= self.now]
        return ready[:num_returns], []

    def get(self, reference):
        return self.replies[reference][1]

    def call(
        self, *replies: tuple[float, Reply], group: Group | None = None, limit: Limit = LIMIT
    ) -> PendingCall:
        """To ranks 0, 1, ..."""
        first = len(self.replies)
        self.replies += replies
        calls = {first + rank: rank for rank in range(len(replies))}
        return PendingCall(group or Group(), "update", calls, dict, limit)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(pending, "ray", made)
    monkeypatch.setattr(pending, "time", SimpleNamespace(monotonic=lambda: made.now))
    told = "{0.call}: {0} of {1}, in {2}"
    monkeypatch.setattr(
        pending, "report", lambda silent, limit: told.format(silent[0], len(silent), limit)
    )
    return made


def test_the_limit_is_of_the_whole_call_and_not_of_each_reply(ray: Ray):
    call = ray.call(*((4.0 * rank, Reply(rank)) for rank in range(5)))
    with pytest.raises(WorkerError, match=r"^policy.update: rank 3 of 2, in 10 s \(timeouts.call"):
        call.result()
    assert ray.now == 10


def test_a_limit_that_is_given_goes_before_the_method_s_own(ray: Ray):
    late = ray.call((30.0, Reply(7)))
    assert late.result(Limit(60.0, "weight_sync.timeout_s")) == {0: 7}
    with pytest.raises(WorkerError, match=r"in 3 s \(weight_sync.timeout_s\)"):
        ray.call((34.0, Reply(7))).result(Limit(3.0, "weight_sync.timeout_s"))
    assert ray.now == 33


def test_several_calls_have_the_longest_of_their_limits(ray: Ray):
    short, long = ray.call((0.0, Reply())), ray.call((40.0, Reply()), limit=Limit(50.0, "start_s"))
    assert gathered([short, long]) == [{0: None}, {0: None}]
    assert ray.now == 40


def test_only_groups_that_are_late_end_at_the_limit_and_say_so_again(ray: Ray):
    done, late = Group("actor"), Group("rollout")
    calls = [
        ray.call((1.0, Reply()), group=done),
        ray.call((1.0, Reply()), (math.inf, Reply()), group=late),
    ]
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"^rollout.update: rank 1 of 1, in 10 s"):
            gathered(calls)
    assert ray.now == 10
    assert late.ended == (
        "the group has ended: rollout.update: rank 1 of 1, in 10 s (timeouts.call_s)"
    )
    assert not done.ended


def test_of_two_failures_of_a_kind_the_first_is_told(ray: Ray):
    call = ray.call(
        (math.inf, Reply()),
        (2.5, failure(FailureKind.RAISED, "late")),
        (2.0, failure(FailureKind.RAISED, "early")),
    )
    with pytest.raises(WorkerError, match=r"^policy.update: rank 2 raised ValueError: early"):
        call.result()
    assert ray.now == 2 + GRACE_S


@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        (FailureKind.DIED, WorkerError, "policy.update: rank 1 died. the cause"),
        (FailureKind.CONFIG, ConfigError, "policy.update: rank 1: the cause"),
        (FailureKind.RAISED, WorkerError, "policy.update: rank 1 raised ValueError: the cause"),
    ],
)
def test_a_rank_that_blames_another_gives_it_time_to_be_heard(ray: Ray, kind, error, told):
    call = ray.call(
        (2.0, failure(FailureKind.BLAMED, "rank 1 is silent")),
        (2.0 + GRACE_S / 2, failure(kind, "the cause")),
    )
    with pytest.raises(error) as raised:
        call.result()
    assert str(raised.value) == told
    assert ray.now == 2 + GRACE_S / 2
