"""How a started job reports why it failed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RunFailed(RuntimeError):
    """A run failed; the message is one line that names the file with the traceback."""


@contextmanager
def summarize_failure(trace_file: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of these kinds into RunFailed and writes their traces, remote ones included."""
    try:
        yield
    except RunFailed:
        raise
    except kinds as error:
        reason = str(error).partition("\n")[0]
        try:
            trace_file.parent.mkdir(parents=True, exist_ok=True)
            aside = trace_file.with_name(f".{trace_file.name}.partial")
            aside.write_text("".join(traceback.format_exception(error)))
            aside.replace(trace_file)
        except OSError as full:
            raise RunFailed(f"{reason} (no disk space for the traceback: {full})") from error
        raise RunFailed(f"{reason} (traceback: {trace_file})") from error
