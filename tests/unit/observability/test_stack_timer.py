"""Stacks of a process where something takes too long."""

from __future__ import annotations

import sys
import threading
import time

from mcore_rl.observability.stack_timer import StackTimer


def waits_for_ever(begun: threading.Event, ended: threading.Event) -> None:
    begun.set()
    ended.wait()


def test_what_takes_too_long_is_named_with_all_stacks_once(capfd):
    begun, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=waits_for_ever, args=[begun, ended])
    thread.start()
    assert begun.wait(60)  # else it may not be there when the stacks are taken
    timer = StackTimer("rank 3 on here", 0.1)
    timer.begin("model.update")
    found, deadline, name = "", time.monotonic() + 60, sys._getframe().f_code.co_name
    while not {"waits_for_ever", name} <= {*found.split()} and time.monotonic() < deadline:
        time.sleep(0.05)
        found += capfd.readouterr().err
    ended.set()
    thread.join()
    first, *lines = found.splitlines()
    assert first == "rank 3 on here: model.update takes longer than 0.1 s; its threads:"
    stacks = "\n".join(lines)
    assert "in waits_for_ever" in stacks and f"in {name}" in stacks


def test_what_ends_in_time_leaves_nothing(capfd):
    timer = StackTimer("rank 3 on here", 1.0)
    timer.begin("model.update")
    timer.stop()
    timer.stop()
    time.sleep(1.5)
    assert capfd.readouterr().err == ""
