"""How a started job reports why it failed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_rl.controller.stop_signals import RunStopped


class RunFailed(RuntimeError):
    """A run failed; the message is one line that names the file with the traceback."""


@contextmanager
def summarize_failure(trace_file: Path, *untouched: type[Exception]) -> Iterator[None]:
    """Turn an error into RunFailed, one line; write its traces, remote ones included, to a file.

    Every error but those `untouched`: a defect of ours ends a run that has started as a dead rank
    does.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (RunFailed, RunStopped, *untouched)):
            raise
        reason = _summarize(error)
        try:
            trace_file.parent.mkdir(parents=True, exist_ok=True)
            aside = trace_file.with_name(f".{trace_file.name}.partial")
            aside.write_text("".join(traceback.format_exception(error)))
            aside.replace(trace_file)
        except OSError as full:
            raise RunFailed(f"{reason} (no disk space for the traceback: {full})") from error
        raise RunFailed(f"{reason} (traceback: {trace_file})") from error


def _summarize(error: Exception) -> str:
    """The first line of what an error says; with its type where it is not an error of ours."""
    first, kind = str(error).strip().partition("\n")[0], type(error)
    is_ours = kind.__module__.startswith("mcore_rl.") or kind is RuntimeError
    return first if first and is_ours else f"{kind.__name__}: {first}".removesuffix(": ")
