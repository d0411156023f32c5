"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from mcore_rl.observability.activity import ACTIVITY


class Stopwatch:
    """Seconds of named phases, as metrics "time/<phase>_s", and of everything since it was made.

    Who shows this process (`ACTIVITY`) hears of the phases, as those of `step`.
    """

    def __init__(self, step: int = 0) -> None:
        self._step = step
        self._started, self._cpu_started_s = time.perf_counter(), time.process_time()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with ACTIVITY.phase(phase, self._step):
                yield
        finally:
            name = f"time/{phase}_s"
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self._started

    @property
    def driver(self) -> dict[str, float]:
        """CPU seconds of this process, of all its threads; and as a share of one core."""
        cpu_s = time.process_time() - self._cpu_started_s
        return {"driver/cpu_s": cpu_s, "driver/cpu_share": cpu_s / self.total_s}
