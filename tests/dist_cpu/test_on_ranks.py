"""A job on ranks fails its test when it fails on any of them."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe

import pytest
import ranks
import torch

from mcore_rl.config.schema import Layout


def answering(*reports: str | None) -> list[ranks._Rank]:
    """Ranks without processes: each saves its number and answers so; "silent" never does."""

    def serve(rank: int, orders) -> None:
        *_, file = orders.recv()
        torch.save({"": {"rank": rank}}, file)
        for other in threads[:rank]:  # the last to answer
            other.join()
        if reports[rank] != "silent":
            orders.send(reports[rank])

    made, threads = [], []
    for rank in range(len(reports)):
        made.append(ranks._Rank.__new__(ranks._Rank))
        made[-1].orders, connection = Pipe()
        made[-1].process = connection  # which stays open so long
        threads.append(threading.Thread(target=serve, args=(rank, connection)))
    for thread in threads:
        thread.start()
    return made


def test_results_come_by_rank():
    assert ranks._collect_results(answering(None, None, None), {}) == [
        {"": {"rank": n}} for n in range(3)
    ]


@pytest.mark.parametrize("other_report", [None, "silent"])
def test_an_assertion_that_fails_on_the_last_rank_alone_is_raised(other_report):
    report = "rank 3:\nAssertionError: of rank 3"
    with pytest.raises(AssertionError, match=r"^rank 3:\nAssertionError: of rank 3"):
        ranks._collect_results(answering(other_report, other_report, other_report, report), {})


def test_calls_run_once_for_each_arguments_on_as_many_ranks_as_they_say(monkeypatch):
    sizes = []
    monkeypatch.setattr(ranks, "spawn", lambda size, jobs: {"": sizes.append(size) or len(sizes)})
    assert [fails_on_the_last(), fails_on_the_last()] == [1, 1]
    wide, deep = Layout(tp=2, dp=2), Layout(pp=2)
    assert [describe_layout(wide), describe_layout(deep), describe_layout(wide)] == [2, 3, 2]
    assert sizes == [4, 4, 2]
    ranks.forget_results()


@ranks.spawn_on_ranks(4)
def fails_on_the_last() -> ranks.Result:
    assert os.environ["RANK"] != "3", "of rank 3"
    return {}


@ranks.spawn_on_ranks()
def describe_layout(layout: Layout) -> ranks.Result:
    return {"layout": str(layout)}


@pytest.mark.nightly  # it costs all processes of the lane
def test_an_assertion_that_fails_on_rank_3_alone_fails_a_test():
    with pytest.raises(AssertionError, match=r"^rank 3:\n(.|\n)*AssertionError: of rank 3"):
        fails_on_the_last()
