"""What a run shows: a live bar on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class StepReport:
    """What is worth seeing of one reinforcement-learning step."""

    reward: float  # mean over the samples of the step
    response_tokens: float  # mean length of a response
    generate_s: float
    train_s: float
    sync_s: float  # moving the new weights to the servers
    tokens_per_s: float  # prompt and response tokens of the step over its whole duration

    def __str__(self) -> str:
        return (
            f"reward {self.reward:.3f}  length {self.response_tokens:.1f}  "
            f"gen {self.generate_s:.1f}s train {self.train_s:.1f}s sync {self.sync_s:.1f}s  "
            f"{self.tokens_per_s:,.0f} tok/s"
        )


class _Console(Console):
    """Goes on in silence when nobody reads any more, as after Ctrl-C on `... | tee`."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class StepProgress:
    """Shows each of `num_steps` steps of the phase `title`; use it as a context manager.

    >>> with StepProgress("warm start", 2, Console(width=80)) as progress:
    ...     progress.update(1, "loss 2.310")
    warm start 1/2  loss 2.310
    """

    def __init__(self, title: str, num_steps: int, console: Console | None = None) -> None:
        self._title = title
        self._num_steps = num_steps
        self._console = console or _Console()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task(title, total=num_steps)
        # The report has a line of its own under the bar: both fit in 80 columns.
        self._report = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._report), console=self._console)

    def update(self, step: int, report: StepReport | str) -> None:
        """Step `step`, counted from 1, is done."""
        if self._console.is_terminal:
            self._report.plain = str(report)
            self._bar.update(self._task, completed=step)
        else:
            line = f"{self._title} {step}/{self._num_steps}  {report}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> StepProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()


@contextmanager
def waiting(for_what: str, console: Console | None = None) -> Iterator[None]:
    """A spinner on a terminal while something without steps runs; nothing elsewhere."""
    console = console or _Console()
    if not console.is_terminal:
        yield
        return
    with console.status(f"{for_what} ..."):
        yield


def print_before_after(
    title: str, rows: Iterable[tuple[str, float, float]], console: Console | None = None
) -> None:
    """A table of shares in [0, 1] as (name, before, after), with the change in points."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for name, before, after in rows:
        change = f"{100 * (after - before):+.1f} points"
        table.add_row(name, f"{before:.1%}", f"{after:.1%}", change)
    (console or _Console()).print(table)
