"""Signals that ask a run to end when it has saved what it has learned. No Ray here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STOPPED = os.EX_TEMPFAIL  # exit status 75: start it again with resume=auto
_TWICE_S = 1.0  # a terminal or a batch system may tell a process and those around it the same


class RunStopped(Exception):
    """A signal has ended a run, which can go on from what it has saved."""


class StopSignals:
    """`requested` is the name of the signal that asks the run to end, "" before there is one."""

    def __init__(self, go_on: str = "") -> None:
        """`go_on` says how to go on after it."""
        self._go_on = go_on
        self.requested = ""
        self._is_in_step = False

    @contextmanager
    def heeded_after_a_step(self) -> Iterator[None]:
        """Inside, somebody looks at `requested`; elsewhere a signal ends the run at once.

        Raises:
            RunStopped: nobody has looked since one came.
        """
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False
        if self.requested:
            raise self.stopped()

    def stopped(self) -> RunStopped:
        return RunStopped(f"{self.requested}: the run was in no step; {self._go_on}")

    def receive(self, signum: int) -> bool:
        """Whether the run has to end at once."""
        self.requested = signal.Signals(signum).name
        word = "the run ends after this step, when it is saved; a second one ends it now"
        if self._is_in_step:
            with suppress(OSError):  # nobody may read it any more
                os.write(2, f"{self.requested}: {word}\n".encode())
        return not self._is_in_step


@contextmanager
def stop_signals(go_on: str) -> Iterator[StopSignals]:
    """The first of SIGTERM, SIGUSR1 and SIGINT is a request; the next does what it did before.

    Raises:
        RunStopped: the run was not in a step, and has ended at once.
    """
    stop = StopSignals(go_on)
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    received_s, ended_at_once = 0.0, False

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def receive(signum: int, frame: object) -> None:
        nonlocal received_s, ended_at_once
        if stop.requested:
            if time.monotonic() - received_s > _TWICE_S:
                restore()
                signal.raise_signal(signum)
            return
        received_s = time.monotonic()
        if stop.receive(signum):
            ended_at_once = True
            raise SystemExit(STOPPED)

    for number in SIGNALS:
        signal.signal(number, receive)
    try:
        yield stop
    finally:
        restore()
        if ended_at_once:  # a call into Ray that was interrupted forgets the exit code
            raise stop.stopped()
