"""What one rank answers when its worker fails, and where it prints; no Ray."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from mcore_rl.config.errors import ConfigError, PeerError
from mcore_rl.controller.rank_actor import FailureKind, RankActor


class Worker:
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
def test_a_failure_says_whether_it_may_be_the_cause(error: Exception, kind: FailureKind):
    host = RankActor("policy", 1)
    host._worker = Worker()
    failure = host.call(("fail", True, [error], {})).failure
    assert failure is not None
    assert (failure.kind, failure.message) == (kind, str(error))
    assert failure.type_name == type(error).__name__
    assert "in fail" in failure.trace


def test_a_rank_prints_both_streams_to_the_end_of_its_log(tmp_path: Path):
    for word in ("first", "second"):  # of two processes, one after the other
        child = os.fork()
        if not child:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not what pytest reads
            RankActor("actor", 3, tmp_path)
            os.write(1, f"{word} out\n".encode())
            os.write(2, f"{word} err\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
    log = (tmp_path / "actor-3.log").read_text()
    assert log == "first out\nfirst err\nsecond out\nsecond err\n"
