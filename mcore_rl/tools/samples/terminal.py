"""Lists and pages of trajectories as text: with colours and in a pager where it is a terminal."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mcore_rl.observability.console import escape_control
from mcore_rl.tools.samples.page import Page, PageMessage, Span, number
from mcore_rl.tools.samples.tables import Summary

ROLE_STYLES = {
    "system": "bold magenta",
    "user": "bold cyan",
    "assistant": "bold green",
    "tool": "bold yellow",
    "context": "bold",
}
_CONTEXT, _CHOSEN, _MARKED = "dim", "", "bold white on red"
_PARTS = {"": "", "reasoning": "italic", "call": "yellow"}
_WORDS = ("role", "status")  # columns of a list that are no numbers
_MOST_LISTED = 5  # marked tokens of a turn in words
_PAGER = {"LESS": "FRX"}  # quit where one screen is enough, pass colours, leave the text behind


@contextmanager
def output() -> Iterator[Console]:
    """Where to print: a pager ($PAGER, or less) if standard output is a terminal.

    Ends without a word when the reader has seen enough.
    """
    command = shlex.split(os.environ.get("PAGER") or (shutil.which("less") or ""))
    if not sys.stdout.isatty() or not command or not shutil.which(command[0]):
        if isinstance(sys.stdout, io.TextIOWrapper):  # of a locale that lacks some letters
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            yield _console(sys.stdout, sys.stdout.isatty())
            sys.stdout.flush()
        except BrokenPipeError:  # Python would complain about the rest at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, text=True, env={**_PAGER, **os.environ}, errors="replace"
    )
    assert process.stdin is not None
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pager's
    try:
        with suppress(BrokenPipeError):
            yield _console(process.stdin, True)
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()  # for whoever reads
        signal.signal(signal.SIGINT, before)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # what is being handled: rich itself would end the process with status 1


def _console(file: IO[str], is_terminal: bool) -> Console:
    return _Console(
        file=file,
        force_terminal=is_terminal,
        width=shutil.get_terminal_size().columns,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=not is_terminal,
    )


def print_list(console: Console, found: Iterable[Summary]) -> None:
    """A line a trajectory."""
    found = list(found)
    has_roles = any(one.role for one in found)
    columns: dict[str, Callable[[Summary], str]] = {
        "step": lambda one: str(one.step),
        "group": lambda one: str(one.group),
        "trajectory": lambda one: str(one.trajectory),
        **({"role": lambda one: escape_control(one.role)} if has_roles else {}),
        "segments": lambda one: str(len(one.rows)),
        "turns": lambda one: str(one.num_turns),
        "tokens": lambda one: str(one.num_tokens),
        "status": lambda one: one.status + (", replayed" if one.is_replayed else ""),
        "reward": lambda one: "none" if one.reward_error else number(one.reward),
        "max gap": lambda one: "" if one.max_gap is None else f"{one.max_gap:.4g}",
    }
    rows = [[*columns], *([cell(one) for cell in columns.values()] for one in found)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for index, row in enumerate(rows):
        cells = zip(columns, row, widths, strict=True)
        line = "  ".join(_padded(cell, width, name in _WORDS) for name, cell, width in cells)
        console.print(Text(line.rstrip(), "" if index else "bold"), soft_wrap=True)


def _padded(cell: str, width: int, is_word: bool) -> str:
    blanks = " " * (width - cell_len(cell))
    return cell + blanks if is_word else blanks + cell


def print_page(console: Console, page: Page) -> None:
    console.print(Text(page.title, "bold"))
    for name, value in page.facts:
        console.print(Text.assemble((f"  {name}: ", "dim"), value))
    for index, messages in enumerate(page.segments):
        if len(page.segments) > 1:
            console.print(Text(f"\nsegment {index}", "bold underline"))
        for message in messages:
            _print_message(console, message)
    console.print()


def _print_message(console: Console, message: PageMessage) -> None:
    turn = f", turn {message.turn} ({message.facts})" if message.turn >= 0 else ""
    console.print(Text(f"\n[{message.role}{turn}]", ROLE_STYLES[message.role]))
    text = Text()
    for content, style in _runs(message.spans):
        text.append(content, style)
    text.rstrip()
    console.print(text)
    marked = [span for span in message.spans if span.gap is not None]
    for span in sorted(marked, key=lambda span: -(span.gap or 0))[:_MOST_LISTED]:
        told = span.about.replace("\n", "; ")
        console.print(Text(f"  gap {number(span.gap or 0)} at {span.text!r}: {told}", "red"))
    if len(marked) > _MOST_LISTED:
        console.print(Text(f"  and at {len(marked) - _MOST_LISTED} other places", "red"))


def _runs(spans: Sequence[Span]) -> Iterator[tuple[str, str]]:
    """Text and its style; neighbours of one style together."""
    text, style = "", ""
    for span in spans:
        own = _style(span)
        if own != style:
            if text:
                yield text, style
            text, style = "", own
        text += span.text
    if text:
        yield text, style


def _style(span: Span) -> str:
    if span.gap is not None:
        return _MARKED
    return " ".join(filter(None, [_CHOSEN if span.is_chosen else _CONTEXT, _PARTS[span.part]]))
