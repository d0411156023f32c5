"""The phase that this process is in, its progress and its time: for the screen and for metrics.

A process shows one phase at a time, on one terminal: hence one `ACTIVITY`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mcore_rl.observability.timeline import DRIVER, TIMELINE

FIRST_REPORT_S = 30.0  # a longer phase gets a line; the next ones come after 1, 2, 4, ... min


@dataclass(eq=False, slots=True)
class Phase:
    """Work that the process does, such as "generate"."""

    title: str
    step: int  # 0: of no step
    since: float  # when it began, by the clock of its Activity


@dataclass(eq=False, slots=True)
class Count:
    """Progress of generation: how many of `total` are done."""

    total: int
    unit: str
    is_background: bool  # in another thread, while the phase does something else
    num_done: int = 0


class Activity:
    """Open phases, of which the outermost is shown, and counts of generation."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._phases: list[Phase] = []
        self._counts: list[Count] = []

    @contextmanager
    def enter_phase(self, title: str, step: int = 0, since: float | None = None) -> Iterator[None]:
        """Open a phase; `since` is when it began, if before."""
        phase = Phase(title, step, self.clock() if since is None else since)
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.remove(phase)

    @contextmanager
    def count(self, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes how many of `total` are done so far."""
        is_background = threading.current_thread() is not threading.main_thread()
        count = Count(total, unit, is_background)
        self._counts.append(count)

        def update(num_done: int) -> None:
            count.num_done = num_done

        try:
            yield update
        finally:
            self._counts.remove(count)

    @property
    def outermost(self) -> Phase | None:
        """The phase to show; None between phases."""
        return next(iter(self._phases), None)

    def __str__(self) -> str:
        """Return "" between phases; else a text like "step 12: generate 190/512 samples, 61 s"."""
        phase, count = self.outermost, next(reversed(self._counts), None)
        if phase is None:
            return ""
        step = f"step {phase.step}: " if phase.step else ""
        duration = f"{self.clock() - phase.since:.0f} s"
        if count is None:
            return f"{step}{phase.title}, {duration}"
        progress = f"{count.num_done}/{count.total} {count.unit}"
        if count.is_background and phase.title != "generate":
            return f"{step}{phase.title}, {duration}; {progress} ahead"
        return f"{step}{phase.title} {progress}, {duration}"


ACTIVITY = Activity()


class SlowPhaseReporter:
    """Writes a line about a phase that takes long, at growing intervals."""

    def __init__(self, write: Callable[[str], None], activity: Activity = ACTIVITY) -> None:
        self._write, self._activity = write, activity
        self._phase: Phase | None = None
        self._due_s = FIRST_REPORT_S

    def report_if_due(self) -> float:
        """Write a line if it is due; return the seconds until the next may be."""
        phase = self._activity.outermost
        if phase is None:
            return FIRST_REPORT_S
        if phase is not self._phase:
            self._phase, self._due_s = phase, FIRST_REPORT_S
        duration = self._activity.clock() - phase.since
        if duration >= self._due_s:
            self._write(str(self._activity))
            while self._due_s <= duration:
                self._due_s *= 2
        return self._due_s - duration

    @contextmanager
    def run_in_background(self) -> Iterator[None]:
        """Report from a thread, which sleeps until a line can be due.

        The main thread could not: its waits are many, and rank 0 of torchrun computes itself.
        """
        is_over = threading.Event()

        def run() -> None:
            while not is_over.wait(self.report_if_due()):
                pass

        thread = threading.Thread(target=run, name="slow-phases", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


class Stopwatch:
    """Seconds of named phases, as metrics "time/<phase>_s", and of everything since it was made.

    Each is a phase of `ACTIVITY`, in `step`, and a span of `TIMELINE`.
    """

    def __init__(self, step: int = 0) -> None:
        self._step = step
        self._start_s, self._cpu_start_s = time.perf_counter(), time.process_time()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            with ACTIVITY.enter_phase(phase, self._step), TIMELINE.record(DRIVER, phase):
                yield
        finally:
            name = f"time/{phase}_s"
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start_s

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self._start_s

    @property
    def driver(self) -> dict[str, float]:
        """CPU seconds of this process, of all its threads; and as a share of one core."""
        cpu_s = time.process_time() - self._cpu_start_s
        return {"driver/cpu_s": cpu_s, "driver/cpu_share": cpu_s / self.total_s}
