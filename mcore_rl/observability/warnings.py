"""Warnings of a run, on stderr; those that repeat in steps are shown ever more seldom."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter


def warn(text: str) -> None:
    """Print a warning on stderr, if it can still be read."""
    with contextlib.suppress(OSError):
        print(f"mcore-rl: warning: {text}", file=sys.stderr)


class StepWarnings:
    """Counts the steps with each kind of warning.

    A kind is a sentence of the past, which `summary` puts after the number of its steps.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._counts: Counter[str] = Counter()

    def begin_step(self) -> None:
        """Count a step of the run."""
        self._num_steps += 1

    def add(self, kind: str, step: int, text: str) -> None:
        """Count a warning; show it in its first, second, fourth, eighth, ... step."""
        count = self.count(kind)
        if count & (count - 1) == 0:
            so_far = f" (so far in {count} steps)" if count > 1 else ""
            warn(f"step {step}: {text}{so_far}")

    def count(self, kind: str) -> int:
        """Count a step with this kind, without showing it; return how many there have been."""
        self._counts[kind] += 1
        return self._counts[kind]

    def summary(self) -> str:
        """Return one line on all kinds; empty if there was none."""
        kinds = [f"in {count} of {self._num_steps} {kind}" for kind, count in self._counts.items()]
        return f"steps: {'; '.join(kinds)}" if kinds else ""
