"""Limits on the time and the output of chat templates, programs that come with a model.

Jinja's sandbox, in which transformers renders them, keeps them from the machine, but limits neither
their time nor their output.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
CPU_S = 5.0  # of a render; a thousand turns take a tenth of a second
# Characters of a render besides the conversation: instructions and the texts around messages.
OWN_CHARACTERS = 1_000_000
_TIMES_WRITTEN = 16  # how often a template may write each character of a conversation
_LATE_SHARE = 0.02  # of the time, for later renders of a template that has exceeded it
_LOOK_S = 0.1
_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError)


class _TimeIsUp(BaseException):
    """Raised in a thread whose render has exceeded its time; passes `except Exception`."""


def limit_chat_templates() -> None:
    """Limit each render of a chat template in this process, for all tokenizers.

    A template that exceeds a limit, recurses without end or fails otherwise raises jinja2's
    TemplateRuntimeError, as one that refuses a conversation does.
    """
    from transformers import tokenization_utils_base as base  # slow to import

    if not isinstance(base.render_jinja_template, LimitedRender):
        base.render_jinja_template = LimitedRender(base.render_jinja_template)


@dataclass(frozen=True, slots=True)
class LimitedRender:
    """Wrapper with limits around the function of transformers that renders chats."""

    render: Callable[..., tuple[list[str], Any]]
    cpu_s: float = CPU_S
    own_characters: int = OWN_CHARACTERS
    late: set[str] = field(default_factory=set)  # templates that have exceeded the time before

    def __call__(self, conversations: Any, **options: Any) -> tuple[list[str], Any]:
        """Render conversations as transformers does.

        Raises:
            TemplateError: the template refuses one, or exceeds a limit.
        """
        from jinja2.exceptions import TemplateRuntimeError  # comes with transformers

        template = str(options.get("chat_template"))
        cpu_s = self.cpu_s * (_LATE_SHARE if template in self.late else 1)
        try:
            rendered = _WATCH.run(lambda: self.render(conversations, **options), cpu_s)
        except _TimeIsUp:
            self.late.add(template)
            raise TemplateRuntimeError(f"it has not ended after {cpu_s:g} s of CPU time") from None
        except RecursionError:
            raise TemplateRuntimeError(
                "it calls itself without end, or is nested too deep"
            ) from None
        except _ERRORS as error:
            raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
        given = _TIMES_WRITTEN * _count_characters([conversations, options.get("tools")])
        for text in rendered[0]:
            if len(text) > self.own_characters + given:
                raise TemplateRuntimeError(
                    f"it writes {len(text)} characters; allowed: {self.own_characters}, and "
                    f"{_TIMES_WRITTEN} times what the messages have"
                )
        return rendered


def _count_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(str(key)) + _count_characters(entry) for key, entry in value.items())
    return sum(map(_count_characters, value)) if isinstance(value, list | tuple) else 8


@dataclass(slots=True, eq=False)
class _Job:
    thread_id: int
    clock: int  # of the CPU time of its thread
    until: float
    is_late: bool = False


class _Watch:
    """Watchdog that raises an exception in a thread that exceeds its CPU time.

    A template is Python code, and Python cannot stop a thread otherwise.
    """

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)  # a child has no thread, maybe a held lock

    def reset(self) -> None:
        """Forget all jobs and the watching thread."""
        self._lock = threading.Lock()
        self._jobs: set[_Job] = set()
        self._has_jobs = threading.Event()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], T], cpu_s: float) -> T:
        """Call a function; raise _TimeIsUp in it after `cpu_s` of CPU time."""
        thread_id = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread_id)
        job = _Job(thread_id, clock, time.clock_gettime(clock) + cpu_s)
        with self._lock:
            self._jobs.add(job)
            self._has_jobs.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="templates", daemon=True)
                self._thread.start()
        try:
            return function()
        finally:
            with self._lock:
                self._jobs.discard(job)
            if job.is_late and not isinstance(sys.exception(), _TimeIsUp):
                # The function ended just before the exception: let it be raised here. Withdrawing
                # it would leave an interpreter flag set (CPython 3.11, ceval.c: only a raised
                # exception clears it), and a later trace of this thread would wait forever.
                for _ in range(1000):
                    pass

    def _watch(self) -> None:
        while self._has_jobs.wait():
            time.sleep(_LOOK_S)
            with self._lock:
                for job in [*self._jobs]:
                    if time.clock_gettime(job.clock) > job.until:
                        job.is_late = True
                        self._jobs.discard(job)
                        _raise_in(job.thread_id)
                if not self._jobs:
                    self._has_jobs.clear()


def _raise_in(thread_id: int) -> None:
    """Raise _TimeIsUp in a thread at its next Python instruction."""
    exception = ctypes.py_object(_TimeIsUp)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), exception)


_WATCH = _Watch()
