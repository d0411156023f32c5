"""Counts of the work that code does, which are the same on every machine."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Operations:
    """Bytecode instructions so far. What C functions do inside is not counted."""

    num = 0


@contextlib.contextmanager
def count_operations(thread: str = "") -> Iterator[Operations]:
    """Count instructions of this thread, or of those named `thread` that start meanwhile."""
    operations = Operations()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if thread and threading.current_thread().name != thread:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        operations.num += event == "opcode"
        return trace

    install = threading.settrace if thread else sys.settrace
    before = threading.gettrace() if thread else sys.gettrace()
    _request_instructions()
    install(trace)
    try:
        yield operations
    finally:
        install(before)  # type: ignore[arg-type]  # None is how it is taken off again


def _request_instructions() -> None:
    """Trace one call: CPython 3.12 traces instructions from the first `settrace` after that."""

    def trace(frame: FrameType, *_: Any) -> Any:
        frame.f_trace_opcodes = True
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        (lambda: None)()
    finally:
        sys.settrace(before)


def growth(run: Callable[[int], None], small: int, large: int) -> float:
    """Return the growth of operations per item: 1.0 is linear, `large / small` quadratic."""

    def count_per_item(size: int) -> float:
        with count_operations() as operations:
            run(size)
        return operations.num / size

    return count_per_item(large) / count_per_item(small)
