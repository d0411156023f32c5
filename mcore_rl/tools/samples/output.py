"""Output of trajectories: lists and pages on a terminal, in a pager, or a page as HTML.

The HTML file loads nothing and runs nothing.
"""

from __future__ import annotations

import base64
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import IO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mcore_rl.config.regular_file import read_regular
from mcore_rl.observability.console import escape_control
from mcore_rl.tools.samples.page import Page, PageMessage, Span, format_number
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
_MAX_IMAGE_BYTES = 256 << 20
_MOST_LISTED = 5  # marked tokens of a turn in words
_PAGER = {"LESS": "FRX"}  # quit where one screen is enough, pass colours, leave the text behind

_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c1c1c; background: #fff; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }}
dt {{ color: #666; }} dd {{ margin: 0; }}
section {{ border-left: 4px solid #999; padding: 0 0 0 .8rem; margin: 1rem 0; }}
section > h3 {{ font-size: .9rem; margin: 0; }}
.system {{ border-color: #a3a; }} .user {{ border-color: #08a; }}
.assistant {{ border-color: #2a2; }} .tool {{ border-color: #b80; }}
img {{ display: block; max-width: 100%; max-height: 24rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; color: #777; }}
.c {{ color: #000; background: #e9f7e9; }} .reasoning {{ font-style: italic; }}
.call {{ background: #fff3d6; }} .gap {{ background: #c22; color: #fff; }}
</style>
</head>
<body>
"""
_LEGEND = (
    '<p><span class="c">chosen by the policy</span> · <span>context</span> · '
    '<span class="c reasoning">reasoning</span> · <span class="c call">tool call</span> · '
    '<span class="gap">large log-prob gap</span>; a token under the pointer tells its numbers</p>'
)


@contextmanager
def open_output() -> Iterator[Console]:
    """Open the console to print on: a pager ($PAGER, or less) if standard output is a terminal.

    A reader that ends early is no error.
    """
    command = shlex.split(os.environ.get("PAGER") or (shutil.which("less") or ""))
    if not sys.stdout.isatty() or not command or not shutil.which(command[0]):
        if isinstance(sys.stdout, io.TextIOWrapper):  # of a locale that lacks some letters
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            yield _make_console(sys.stdout, sys.stdout.isatty())
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
            yield _make_console(process.stdin, True)
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()  # until the reader quits
        signal.signal(signal.SIGINT, before)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # the error that is handled: rich would end the process with status 1


def _make_console(file: IO[str], is_terminal: bool) -> Console:
    return _Console(
        file=file,
        force_terminal=is_terminal,
        width=shutil.get_terminal_size().columns,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=not is_terminal,
    )


def print_list(console: Console, summaries: Iterable[Summary]) -> None:
    """Print a line for each trajectory."""
    summaries = list(summaries)
    has_roles = any(summary.role for summary in summaries)
    columns: dict[str, Callable[[Summary], str]] = {
        "step": lambda s: str(s.step),
        "group": lambda s: str(s.group),
        "trajectory": lambda s: str(s.trajectory),
        **({"role": lambda s: escape_control(s.role)} if has_roles else {}),
        "segments": lambda s: str(len(s.rows)),
        "turns": lambda s: str(s.num_turns),
        "tokens": lambda s: str(s.num_tokens),
        "status": lambda s: s.status + (", replayed" if s.is_replayed else ""),
        "reward": lambda s: "none" if s.reward_error else format_number(s.reward),
        "max gap": lambda s: "" if s.max_gap is None else f"{s.max_gap:.4g}",
    }
    rows = [[*columns], *([cell(s) for cell in columns.values()] for s in summaries)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for index, row in enumerate(rows):
        cells = zip(columns, row, widths, strict=True)
        line = "  ".join(_pad(cell, width, name in _WORDS) for name, cell, width in cells)
        console.print(Text(line.rstrip(), "" if index else "bold"), soft_wrap=True)


def _pad(cell: str, width: int, is_word: bool) -> str:
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
    for content, style in _group_by_style(message.spans):
        text.append(content, style)
    text.rstrip()
    console.print(text)
    marked = [span for span in message.spans if span.gap is not None]
    for span in sorted(marked, key=lambda span: -(span.gap or 0))[:_MOST_LISTED]:
        numbers = span.about.replace("\n", "; ")
        console.print(
            Text(f"  gap {format_number(span.gap or 0)} at {span.text!r}: {numbers}", "red")
        )
    if len(marked) > _MOST_LISTED:
        console.print(Text(f"  and at {len(marked) - _MOST_LISTED} other places", "red"))


def _group_by_style(spans: Sequence[Span]) -> Iterator[tuple[str, str]]:
    """Yield texts and their styles; neighbours with the same style as one."""
    text, style = "", ""
    for span in spans:
        span_style = _get_style(span)
        if span_style != style:
            if text:
                yield text, style
            text, style = "", span_style
        text += span.text
    if text:
        yield text, style


def _get_style(span: Span) -> str:
    if span.gap is not None:
        return _MARKED
    return " ".join(filter(None, [_CHOSEN if span.is_chosen else _CONTEXT, _PARTS[span.part]]))


def format_html(page: Page) -> str:
    """Return a page as HTML, with all of its texts escaped."""
    return "\n".join(_list_html_lines(page))


def _list_html_lines(page: Page) -> Iterator[str]:
    title = escape(page.title)
    yield _HEAD.format(title=title)
    yield f"<h1>{title}</h1>\n<dl>"
    for name, value in page.facts:
        yield f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
    yield f"</dl>\n{_LEGEND}"
    for index, messages in enumerate(page.segments):
        if len(page.segments) > 1:
            yield f"<h2>segment {index}</h2>"
        yield from map(_format_message, messages)
    yield "</body>\n</html>\n"


def _format_message(message: PageMessage) -> str:
    turn = f", turn {message.turn} ({escape(message.facts)})" if message.turn >= 0 else ""
    spans = "".join(map(_format_span, message.spans))
    # A newline that follows <pre> at once is none of its text.
    return (
        f'<section class="{message.role}"><h3>{message.role}{turn}</h3>\n'
        f"<pre>\n{spans}</pre></section>"
    )


def _format_span(span: Span) -> str:
    text = escape(span.text)
    if span.image is not None:
        return _format_image(span.image, text)
    names = ["c"] * span.is_chosen + [span.part] * bool(span.part)
    names += ["gap"] * (span.gap is not None)
    if not names:
        return text
    title = f' title="{escape(span.about)}"' if span.about else ""
    return f'<span class="{" ".join(names)}"{title}>{text}</span>'


def _format_image(path: Path, text: str) -> str:
    """Return an image with its file inside the page; its text alone if there is no such file."""
    try:
        content = base64.b64encode(read_regular(path, _MAX_IMAGE_BYTES)).decode()
    except (OSError, ValueError):  # ValueError: a null byte
        return f"{text[:-1]}, not in {escape(str(path.parent))}]"
    return f'<img alt="{text}" title="{text}" src="data:image/png;base64,{content}">'
