"""How a started job reports why it failed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_rl.controller.process_cleanup import RunStopped, wait_if_ray_died


class RunFailed(RuntimeError):
    """A run failed; the message is one line that names the file with the traceback."""


@contextmanager
def summarize_failure(trace_file: Path, *untouched: type[Exception]) -> Iterator[None]:
    """Turn an error into RunFailed, one line; write its traces, remote ones included, to a file.

    Every error but those `untouched`: a defect of ours ends a run that has started as a dead rank
    does. Of a RunFailed, which has its line, the traces are written as far as that is possible.
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
        told = f"no disk space for the traceback: {full}" if full else f"traceback: {trace_file}"
        raise RunFailed(f"{_summarize(error)} ({told})") from error


def _write_traces(trace_file: Path, error: Exception) -> OSError | None:
    """Return why the file cannot be written; None where it is there."""
    try:
        trace_file.parent.mkdir(parents=True, exist_ok=True)
        aside = trace_file.with_name(f".{trace_file.name}.partial")
        aside.write_text("".join(traceback.format_exception(error)))
        aside.replace(trace_file)
    except OSError as full:
        return full
    return None


def _summarize(error: Exception) -> str:
    """The first line of what an error says; with its type where it is not an error of ours."""
    first, kind = str(error).strip().partition("\n")[0], type(error)
    is_ours = kind.__module__.startswith("mcore_rl.") or kind is RuntimeError
    return first if first and is_ours else f"{kind.__name__}: {first}".removesuffix(": ")
