"""Failure of a started job: one line for the terminal, tracebacks in a file.

Imports neither torch nor Ray: the command line and conversion workers import it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_rl.config.atomic_file import write_file
from mcore_rl.controller.process_cleanup import RunStopped, wait_if_ray_died


class RunFailed(RuntimeError):
    """A run failed; the message is one line that names the file with the tracebacks."""


@contextmanager
def summarize_failure(trace_file: Path, *untouched: type[Exception]) -> Iterator[None]:
    """Raise errors as RunFailed, in one line; write tracebacks, remote ones included, to a file.

    Args:
        untouched: Error types that pass unchanged. RunStopped always does; a RunFailed keeps its
            message, and its tracebacks are written.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (RunStopped, *untouched)):
            raise
        wait_if_ray_died()
        full = _write_traces(trace_file, error)
        if isinstance(error, RunFailed):
            raise
        note = f"no disk space for the traceback: {full}" if full else f"traceback: {trace_file}"
        raise RunFailed(f"{_summarize(error)} ({note})") from error


def _write_traces(trace_file: Path, error: Exception) -> OSError | None:
    """Return why the file cannot be written; None if it is."""
    try:
        trace_file.parent.mkdir(parents=True, exist_ok=True)
        write_file(trace_file, "".join(traceback.format_exception(error)))
    except OSError as full:
        return full
    return None


def _summarize(error: Exception) -> str:
    """Return the first line of an error's message, with its type unless the error is ours."""
    first, kind = str(error).strip().partition("\n")[0], type(error)
    is_ours = kind.__module__.startswith("mcore_rl.") or kind is RuntimeError
    return first if first and is_ours else f"{kind.__name__}: {first}".removesuffix(": ")
