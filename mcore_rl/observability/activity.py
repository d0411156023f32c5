"""What this process does now, for whoever shows it: a phase, since when, and what has come of it.

A process has one thing to show at a time, on one terminal: hence one `ACTIVITY`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

FIRST_S = 30.0  # a phase that takes longer is worth a line; the next ones come at 1, 2, 4, ... min


@dataclass(eq=False, slots=True)
class Phase:
    title: str
    step: int  # 0: of no step
    since: float


@dataclass(eq=False, slots=True)
class Count:
    """Of what generation has been asked for."""

    asked: int
    what: str
    is_beside: bool  # in a thread of its own, while the phase does something else
    came: int = 0


class Activity:
    """The phases that are open; the outermost one is what is shown."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._phases: list[Phase] = []
        self._counts: list[Count] = []

    @contextmanager
    def phase(self, title: str, step: int = 0, since: float | None = None) -> Iterator[None]:
        """`since` is when it began, if that is not now."""
        phase = Phase(title, step, self.now() if since is None else since)
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.remove(phase)

    @contextmanager
    def counting(self, asked: int, what: str) -> Iterator[Callable[[int], None]]:
        """Inside, takes how many have come so far."""
        is_beside = threading.current_thread() is not threading.main_thread()
        count = Count(asked, what, is_beside)
        self._counts.append(count)

        def came(num: int) -> None:
            count.came = num

        try:
            yield came
        finally:
            self._counts.remove(count)

    @property
    def outermost(self) -> Phase | None:
        return next(iter(self._phases), None)

    def __str__(self) -> str:
        """Empty between phases; else as "step 12: generate 190/512 samples, 61 s"."""
        phase, count = self.outermost, next(reversed(self._counts), None)
        if phase is None:
            return ""
        of_step = f"step {phase.step}: " if phase.step else ""
        took = f"{self.now() - phase.since:.0f} s"
        if count is None:
            return f"{of_step}{phase.title}, {took}"
        num = f"{count.came}/{count.asked} {count.what}"
        if count.is_beside and phase.title != "generate":
            return f"{of_step}{phase.title}, {took}; {num} ahead"
        return f"{of_step}{phase.title} {num}, {took}"


ACTIVITY = Activity()


class Teller:
    """Writes a line of a phase that takes long, at growing intervals."""

    def __init__(self, write: Callable[[str], None], activity: Activity = ACTIVITY) -> None:
        self._write, self._activity = write, activity
        self._phase: Phase | None = None
        self._due_s = FIRST_S

    def look(self) -> float:
        """Write what is due; returns the seconds until something can be."""
        phase = self._activity.outermost
        if phase is None:
            return FIRST_S
        if phase is not self._phase:
            self._phase, self._due_s = phase, FIRST_S
        took = self._activity.now() - phase.since
        if took >= self._due_s:
            self._write(str(self._activity))
            while self._due_s <= took:
                self._due_s *= 2
        return self._due_s - took

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside, a thread looks; it sleeps until a line can be due.

        The waits of a driver are many, and some are not ours: rank 0 of torchrun computes itself.
        """
        is_over = threading.Event()

        def run() -> None:
            while not is_over.wait(self.look()):
                pass

        thread = threading.Thread(target=run, name="tells-phases", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
