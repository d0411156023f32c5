"""Which signals let a step end, and which end a run at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from mcore_rl.controller.stop_signals import SIGNALS, RunStopped, stop_signals


def test_inside_a_step_a_signal_is_a_request_and_one_that_follows_at_once_is_the_same(capfd):
    with (
        pytest.raises(RunStopped, match="SIGTERM: "),  # since nobody has looked
        stop_signals("go on") as stop,
        stop.heeded_after_a_step(),
    ):
        assert stop.requested == ""
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.requested == "SIGTERM"
    assert capfd.readouterr().err.startswith("SIGTERM: the run ends after this step")


@pytest.mark.parametrize("number", SIGNALS)
def test_outside_of_a_step_it_ends_the_run_whatever_becomes_of_the_exception(number):
    told = f"{number.name}: the run was in no step; go on"
    with pytest.raises(RunStopped, match=told), stop_signals("go on"):
        try:
            signal.raise_signal(number)
        except SystemExit:
            raise SystemExit(1) from None  # as a call into Ray does


def test_handlers_come_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with stop_signals("go on"):
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


STEP = """
import time
from mcore_rl.controller.stop_signals import stop_signals
with stop_signals("go on") as stop, stop.heeded_after_a_step():
    print("step", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("second", "status"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)],
)
def test_a_second_one_does_what_it_did_before(second, status):
    command = [sys.executable, "-c", STEP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"step\n"
        process.send_signal(signal.SIGUSR1)
        time.sleep(1.5)
        assert process.poll() is None
        process.send_signal(second)
        assert process.wait(10) == status
