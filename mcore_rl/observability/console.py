"""Output of a run: a plain line per step, and on a terminal a live bar beneath the lines."""

from __future__ import annotations

import functools
import os
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from mcore_rl.observability.activity import ACTIVITY, SlowPhaseReporter
from mcore_rl.observability.process import wrap_command

_JOINERS = "\u200c\u200d"  # without which Persian, Hindi and emoji are other text
_FIELD_GAP = "  "  # between the fields of a step's line
_UNSAFE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")  # control, format, no characters, line separators


@dataclass(frozen=True, slots=True)
class StepReport:
    """Summary of a reinforcement-learning step."""

    reward: float  # mean over the samples of the step
    response_tokens: float  # mean length of a response
    max_logprob_gap: float | None  # None: the step takes the servers' log-probs
    step_s: float
    generate_s: float
    train_s: float
    sync_s: float  # moving the new weights to the servers
    tokens_per_s: float  # prompt and response tokens of the step over its whole duration

    def __str__(self) -> str:
        gap = [] if self.max_logprob_gap is None else [f"gap {self.max_logprob_gap:.4f}"]
        fields = [
            f"reward {self.reward:.3f}",
            f"length {self.response_tokens:.1f}",
            *gap,
            f"{self.step_s:.1f} s",
            f"gen {self.generate_s:.1f} train {self.train_s:.1f} sync {self.sync_s:.1f}",
            f"{self.tokens_per_s:,.0f} tok/s",
        ]
        return _FIELD_GAP.join(fields)


class _Console(Console):
    """Console that falls silent when its pipe breaks, as after Ctrl-C on `... | tee`."""

    @property
    def is_terminal(self) -> bool:
        """True on a terminal alone, even with FORCE_COLOR, which many CI systems set."""
        return self.file.isatty() and super().is_terminal

    def on_broken_pipe(self) -> None:
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@functools.cache
def get_stdout_console() -> Console:
    """Return the console of this process's standard output.

    There is one. A line of another console would not know of a live display, and leave a copy of it
    above the line.
    """
    return _Console()


class _StatusLine:
    """A line that is read whenever it is drawn, and is none while its text is empty."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if text := self._read():
            yield Text(text, no_wrap=True, overflow="ellipsis")


def _read_activity() -> str:
    return str(ACTIVITY)


class StepProgress:
    """Shows each of `num_steps` steps of the phase `title`; use it as a context manager.

    Each step has a line that stays. Within a step it shows the activity: on a terminal all the
    time, under a bar, elsewhere as a line where a phase takes long.

    >>> with StepProgress("warm start", 2, Console(width=80)) as progress:
    ...     progress.update(1, "loss 2.310")
    warm start 1/2  loss 2.310
    """

    def __init__(self, title: str, num_steps: int, console: Console | None = None) -> None:
        self._title = title
        self._num_steps = num_steps
        self._console = console or get_stdout_console()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task(title, total=num_steps)
        self._drawn = ""
        # It has a line of its own under the bar: both fit in 80 columns.
        drawn = _StatusLine(lambda: self._drawn)
        self._live = _make_live(Group(self._bar, drawn, _StatusLine(_read_activity)), self._console)
        self._stack = ExitStack()

    def update(self, step: int, report: StepReport | str) -> None:
        """Show that `step`, counted from 1, is done.

        On a terminal the last fields of its line are left out where the line would wrap.
        """
        line = _FIELD_GAP.join([f"{self._title} {step}/{self._num_steps}", str(report)])
        if self._console.is_interactive:
            self._bar.update(self._task, completed=step)
            while len(line) > self._console.width and _FIELD_GAP in line:
                line = line.rpartition(_FIELD_GAP)[0]
        show_line(line, self._console)

    def draw(self, step: int, report: str) -> None:
        """Show a step under the bar of a terminal alone, for steps too many to read as lines."""
        self._drawn = report
        self._bar.update(self._task, completed=step)

    def __enter__(self) -> StepProgress:
        if self._console.is_interactive:
            self._stack.enter_context(self._live)
        else:
            self._stack.enter_context(_report_slow_phases(self._console))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextmanager
def show_waiting(
    title: str,
    console: Console | None = None,
    *,
    has_lines: bool = True,
    since: float | None = None,
) -> Iterator[None]:
    """Show a spinner on a terminal while something without steps runs; elsewhere a line.

    Elsewhere more lines follow where it takes long. At its end comes a line with its seconds.
    Without `has_lines` there is only the spinner. `since` is when it began, if before.
    """
    console = console or get_stdout_console()
    start = time.monotonic() if since is None else since
    with ExitStack() as stack:
        stack.enter_context(ACTIVITY.enter_phase(title, since=start))
        if console.is_interactive:
            stack.enter_context(
                _make_live(Spinner("dots", _StatusLine(_read_activity)), console, transient=True)
            )
        elif has_lines:
            show_line(f"{title} ...", console)
            stack.enter_context(_report_slow_phases(console))
        yield
    if has_lines:
        show_line(f"{title}: {time.monotonic() - start:.1f} s", console)


def _report_slow_phases(console: Console) -> AbstractContextManager[None]:
    return SlowPhaseReporter(lambda line: show_line(line, console)).run_in_background()


def _make_live(content: RenderableType, console: Console, *, transient: bool = False) -> Live:
    """Return a live display, through which standard error passes if it is on the terminal, too."""
    is_shared = sys.stderr.isatty()
    return Live(content, console=console, transient=transient, redirect_stderr=is_shared)


def show_line(line: str, console: Console | None = None) -> None:
    """Print a plain line, above a live display if there is one.

    On a terminal it is wrapped between words; a word that is too long is not split, to be copied.
    """
    console = console or get_stdout_console()
    lines = [escape_control(line)]
    if console.is_interactive:
        wrapper = textwrap.TextWrapper(
            console.width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
        )
        lines = wrapper.wrap(lines[0]) or [""]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def print_rows(
    headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console, *, num_texts: int
) -> None:
    """Print a table whose first `num_texts` columns are texts, and the others numbers.

    Texts are wrapped between words. Where the screen is too narrow for the table even so, each row
    is a paragraph instead, under its first text.
    """
    table = Table(box=None, pad_edge=False)
    for index, (heading, *texts) in enumerate(zip(headings, *rows, strict=True)):
        longest = max((len(word) for text in (heading, *texts) for word in text.split()), default=0)
        table.add_column(
            heading, justify="left" if index < num_texts else "right", min_width=longest
        )
    for row in rows:
        table.add_row(*map(escape, row))
    unlimited = console.options.update(max_width=10_000)
    if Measurement.get(console, unlimited, table).minimum <= console.width:
        console.print(table, highlight=False)
        return
    for name, *texts in rows:
        facts = zip(headings[1:], texts, strict=True)
        show_paragraph(name, [f"{heading} {text}" for heading, text in facts if text], console)


def show_paragraph(heading: str, parts: Sequence[str], console: Console) -> None:
    """Print a heading, and beneath it parts that are wrapped between them where possible."""
    joined = [" ".join(part.split()).replace(" ", "\0") for part in parts]
    lines = textwrap.wrap(
        ", ".join(joined),
        console.width,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    show_line(heading, console)
    for line in lines:
        show_line(line.replace("\0", " "), console)


def show_commands(
    title: str, commands: Iterable[Sequence[str]], console: Console | None = None
) -> None:
    """Print commands, given as words, to paste into a shell whatever the width of the screen."""
    console = console or get_stdout_console()
    lines = [line for words in commands for line in wrap_command(words, "  ", console.width)]
    text = "\n".join([title, *map(escape_control, lines)])
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def escape_control(text: str) -> str:
    r"""Escape characters that a terminal obeys or that reorder what stands around them.

    Newlines and tabs stay.

    >>> print(escape_control("\x1b[2Jred\u202e"))
    \x1b[2Jred\u202e
    """
    return "".join(c if _is_safe(c) else c.encode("unicode_escape").decode() for c in text)


def _is_safe(character: str) -> bool:
    if character in "\n\t" or character in _JOINERS:
        return True
    return unicodedata.category(character) not in _UNSAFE


@dataclass(frozen=True, slots=True)
class MeanWithError:
    """A mean with its standard error."""

    value: float
    error: float
    is_share: bool  # in [0, 1], shown in percent

    def __str__(self) -> str:
        if self.is_share:
            return f"{self.value:.1%} ± {100 * self.error:.1f}"
        return f"{self.value:.3f} ± {self.error:.3f}"


def print_before_after(
    title: str,
    rows: Iterable[tuple[str, MeanWithError | None, MeanWithError]],
    console: Console | None = None,
) -> None:
    """Print a table of (name, before, after), with the change; None: not measured before."""
    rows = list(rows)
    headings = ("before", "after", "change") if any(row[1] for row in rows) else ("after",)
    table = Table(title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, before, after in rows:
        if before is None:
            table.add_row(name, *[""] * (len(headings) == 3), str(after))
            continue
        change = after.value - before.value
        change_text = f"{100 * change:+.1f} points" if after.is_share else f"{change:+.3f}"
        table.add_row(name, str(before), str(after), change_text)
    (console or get_stdout_console()).print(table)
