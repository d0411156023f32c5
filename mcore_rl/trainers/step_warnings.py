"""Warnings of a run's steps: what repeats is told ever more seldom, and summed up at the end."""

from __future__ import annotations

from collections import Counter

from mcore_rl.trainers.checkpointing import tell


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
        """Count a warning; tell it in its first, second, fourth, eighth, ... step."""
        count = self.count(kind)
        if count & (count - 1) == 0:
            so_far = f" (so far in {count} steps)" if count > 1 else ""
            tell(f"step {step}: {text}{so_far}")

    def count(self, kind: str) -> int:
        """Count what the settings mean to happen, without a word; return in how many steps."""
        self._counts[kind] += 1
        return self._counts[kind]

    def summary(self) -> str:
        """Return one line on all kinds; empty if there was none."""
        kinds = [f"in {count} of {self._num_steps} {kind}" for kind, count in self._counts.items()]
        return f"steps: {'; '.join(kinds)}" if kinds else ""
