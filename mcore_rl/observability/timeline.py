"""Spans of a step: the work of each role with its times, and the file timeline.jsonl."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config.atomic_file import write_file
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_lines

TIMELINE_FILE = "timeline.jsonl"
PROFILES, TRACE_SUFFIX = "profiles", ".json.gz"  # folder and files of torch.profiler's traces
DRIVER = "driver"  # role of the process of the command
MAX_SPANS = 400  # of a step; beyond it, calls of the most frequent name are only counted
_EVERY_STEP, _EVERY = 100, 10  # steps up to the first are all written, then one of so many
_SAME_S = 0.05  # calls of a name that follow each other this closely are one span


@dataclass(slots=True)
class TimeSpan:
    """Something that a role did, by time.time()."""

    role: str
    name: str  # of a phase of the driver, or of a method of workers
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The spans that ended during a step, in the order of their ends."""

    phase: str
    step: int
    spans: Sequence[TimeSpan]
    num_left_out: int = 0


class Timeline:
    """The spans of this process since they were last taken. Safe to use from several threads."""

    def __init__(self, max_spans: int = MAX_SPANS) -> None:
        self._max_spans = max_spans
        self._lock = threading.Lock()
        self._spans: list[TimeSpan] = []
        self._latest: dict[tuple[str, str], TimeSpan] = {}
        self._counts = Counter[str]()  # spans by name
        self._num_left_out = 0

    def add(self, role: str, name: str, start_s: float, end_s: float) -> None:
        """Add a span; extend the last one of this name if it ended a moment before."""
        with self._lock:
            latest = self._latest.get((role, name))
            if latest is not None and start_s - latest.end_s <= _SAME_S:
                latest.start_s = min(latest.start_s, start_s)  # of calls at the same time
                latest.end_s = max(latest.end_s, end_s)
            elif len(self._spans) < self._max_spans or self._drop_frequent(name):
                span = TimeSpan(role, name, start_s, end_s)
                self._spans.append(span)
                self._latest[role, name] = span
                self._counts[name] += 1
            else:
                self._num_left_out += 1

    def _drop_frequent(self, name: str) -> bool:
        """Drop the last span of the most frequent name, if that is another; return whether so.

        Else the calls of many servers would leave none to the phases and the update after them.
        """
        [(frequent, count)] = self._counts.most_common(1)
        if self._counts[name] + 1 >= count:
            return False
        positions = reversed(range(len(self._spans)))
        index = next(i for i in positions if self._spans[i].name == frequent)
        span = self._spans.pop(index)
        if self._latest.get((span.role, frequent)) is span:
            del self._latest[span.role, frequent]
        self._counts[frequent] -= 1
        self._num_left_out += 1
        return True

    @contextmanager
    def record(self, role: str, name: str) -> Iterator[None]:
        """Add what happens inside as a span."""
        start_s = time.time()
        try:
            yield
        finally:
            self.add(role, name, start_s, time.time())

    def follow(self, role: str, name: str, replies: Sequence[Future[Any]]) -> None:
        """Add a call that begins now as a span, when the last of its replies has come."""
        start_s, num_left = time.time(), len(replies)

        def count(_: Future[Any]) -> None:
            nonlocal num_left
            with self._lock:
                num_left -= 1
                is_last = num_left == 0
            if is_last:
                self.add(role, name, start_s, time.time())

        for reply in replies:
            reply.add_done_callback(count)

    def take(self, phase: str, step: int) -> StepTimeline:
        """Return the spans since the last call, as those of a step."""
        with self._lock:
            taken = StepTimeline(phase, step, self._spans, self._num_left_out)
            self._spans, self._latest, self._num_left_out = [], {}, 0
            self._counts = Counter()
        return taken


TIMELINE = Timeline()


class TimelineWriter:
    """Writes timeline.jsonl in the folder of a run: all of the first steps, then one of ten."""

    def __init__(self, folder: Path, earlier: Sequence[StepTimeline] = ()) -> None:
        """Begin the file with the spans of `earlier` steps, in place of an earlier file."""
        self._file = folder / TIMELINE_FILE
        write_file(self._file, "".join(map(_format_row, earlier)))

    def write(self, timeline: StepTimeline) -> None:
        """Append a step, if its turn has come.

        Raises:
            OSError: The disk is full.
        """
        if timeline.spans and (timeline.step <= _EVERY_STEP or timeline.step % _EVERY == 0):
            with self._file.open("a") as file:
                file.write(_format_row(timeline))


def _format_row(timeline: StepTimeline) -> str:
    spans = [
        [span.role, span.name, round(span.start_s, 6), round(span.end_s, 6)]
        for span in timeline.spans
    ]
    row = {"phase": timeline.phase, "step": timeline.step, "spans": spans}
    return json.dumps(row | {"num_left_out": timeline.num_left_out}) + "\n"


def read_timeline(path: Path) -> list[StepTimeline]:
    """Return the steps of a timeline.jsonl, except a last one that was cut short.

    Raises:
        ConfigError: A row is no JSON object, or not of this form.
    """
    return [_parse_row(row, where) for where, row in read_json_lines(path)]


def _parse_row(row: dict[str, Any], where: str) -> StepTimeline:
    try:
        spans = [TimeSpan(str(r), str(n), float(a), float(b)) for r, n, a, b in row["spans"]]
        if not all(math.isfinite(span.start_s) and math.isfinite(span.end_s) for span in spans):
            raise ValueError("times that are not finite")
        if not spans:
            raise ValueError("no spans")
        return StepTimeline(str(row["phase"]), int(row["step"]), spans, int(row["num_left_out"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # int(inf) overflows
        raise ConfigError(f"{where}: no phase, step, spans and num_left_out ({error!r})") from error


def build_trace(timelines: Sequence[StepTimeline]) -> Mapping[str, Any]:
    """Return steps in the Trace Event Format, which Perfetto and chrome://tracing open.

    A role is a process. Spans of a role that overlap without one inside the other are on tracks of
    their own. Times are microseconds since the first span. Source of the format: "Trace Event
    Format", complete events (ph: X) and metadata events (ph: M).
    """
    spans = [(line.step, span) for line in timelines for span in line.spans]
    origin_s = min((span.start_s for _, span in spans), default=0.0)
    roles = list(dict.fromkeys(span.role for _, span in spans))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": role}}
        for pid, role in enumerate(roles)
    ]
    tracks: dict[str, list[list[float]]] = {role: [] for role in roles}
    for step, span in sorted(spans, key=lambda pair: (pair[1].start_s, -pair[1].end_s)):
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "pid": roles.index(span.role),
                "tid": assign_track(tracks[span.role], span),
                "ts": round((span.start_s - origin_s) * 1e6),
                "dur": round((span.end_s - span.start_s) * 1e6),
                "args": {"step": step},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def assign_track(tracks: list[list[float]], span: TimeSpan) -> int:
    """Return the first track on which a span is free or nested; the spans come by their start.

    Args:
        tracks: Ends of the open spans of each track; changed.
    """
    for number, ends in enumerate(tracks):
        while ends and ends[-1] <= span.start_s:
            ends.pop()
        if not ends or span.end_s <= ends[-1]:
            ends.append(span.end_s)
            return number
    tracks.append([span.end_s])
    return len(tracks) - 1
