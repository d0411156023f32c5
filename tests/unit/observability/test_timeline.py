"""The timeline of a step has a span for each call, and its file the steps that a report shows."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.observability.timeline import (
    StepTimeline,
    Timeline,
    TimelineWriter,
    TimeSpan,
    build_trace,
    read_timeline,
)


def test_timeline_joins_calls_that_follow_each_other_and_bounds_their_number():
    timeline = Timeline(max_spans=2)
    timeline.add("rollout", "collect", 1.0, 2.0)
    timeline.add("rollout", "collect", 2.01, 3.0)
    timeline.add("rollout", "collect", 4.0, 5.0)
    timeline.add("rollout", "collect", 6.0, 7.0)
    taken = timeline.take("training", 1)
    assert taken.spans == [
        TimeSpan("rollout", "collect", 1.0, 3.0),
        TimeSpan("rollout", "collect", 4, 5),
    ]
    assert taken.num_left_out == 1
    assert not timeline.take("training", 2).spans


def test_timeline_joins_calls_at_the_same_time_from_the_first_start():
    timeline = Timeline()
    timeline.add("server", "collect", 2.0, 3.0)
    timeline.add("server", "collect", 1.0, 4.0)
    assert timeline.take("training", 1).spans == [TimeSpan("server", "collect", 1.0, 4.0)]


def test_timeline_joins_only_calls_of_one_role_and_name_that_are_close():
    """A twentieth of a second and less is close; binary fractions are exact."""
    timeline = Timeline()
    calls = [
        ("actor", "update", 1.0, 2.0),
        ("critic", "update", 2.0, 2.5),
        ("actor", "score", 2.0, 2.25),
        ("actor", "update", 2.046875, 3.0),
        ("actor", "update", 3.0625, 4.0),
    ]
    for call in calls:
        timeline.add(*call)
    assert timeline.take("training", 1).spans == [
        TimeSpan("actor", "update", 1.0, 3.0),
        TimeSpan("critic", "update", 2.0, 2.5),
        TimeSpan("actor", "score", 2.0, 2.25),
        TimeSpan("actor", "update", 3.0625, 4.0),
    ]


def test_timeline_of_a_step_has_nothing_of_the_step_before():
    timeline = Timeline(max_spans=2)
    for start_s in (0.0, 1.0, 2.0):
        timeline.add("server", "collect", start_s, start_s + 0.5)
    first = timeline.take("training", 1)
    assert ([span.start_s for span in first.spans], first.num_left_out) == ([0.0, 1.0], 1)
    timeline.add("server", "collect", 2.5, 3.0)
    timeline.add("driver", "update", 3.0, 4.0)
    second = timeline.take("warm_start", 2)
    assert second == StepTimeline(
        "warm_start",
        2,
        [TimeSpan("server", "collect", 2.5, 3.0), TimeSpan("driver", "update", 3.0, 4.0)],
    )


def test_call_that_is_dropped_is_not_extended():
    """The last of the frequent calls gives its place to the update."""
    timeline = Timeline(max_spans=3)
    for start_s in (0.0, 1.0, 2.0):
        timeline.add("server", "collect", start_s, start_s + 0.5)
    timeline.add("actor", "update", 2.5, 3.0)
    timeline.add("server", "collect", 2.5, 3.5)
    taken = timeline.take("training", 1)
    assert [(span.role, span.start_s, span.end_s) for span in taken.spans] == [
        ("server", 0.0, 0.5),
        ("server", 1.0, 1.5),
        ("actor", 2.5, 3.0),
    ]
    assert taken.num_left_out == 2


def test_phase_that_fails_has_a_span():
    timeline = Timeline()
    with pytest.raises(ZeroDivisionError), timeline.record("driver", "update"):
        raise ZeroDivisionError
    [span] = timeline.take("training", 1).spans
    assert (span.role, span.name) == ("driver", "update") and span.end_s >= span.start_s


def test_timeline_file_has_earlier_steps_and_all_of_a_row(tmp_path):
    earlier = StepTimeline("training", 3, [TimeSpan("actor", "update", 0.125, 1.0)], 7)
    later = StepTimeline("warm_start", 110, [TimeSpan("driver", "save", 2.0, 3.0000004)], 2)
    writer = TimelineWriter(tmp_path, [earlier])
    writer.write(StepTimeline("training", 4, []))
    writer.write(later)
    assert read_timeline(tmp_path / "timeline.jsonl") == [
        earlier,
        StepTimeline("warm_start", 110, [TimeSpan("driver", "save", 2.0, 3.0)], 2),
    ]


def test_timeline_keeps_phase_and_update_after_calls_of_many_servers():
    timeline = Timeline(max_spans=10)
    for number in range(50):
        timeline.add(f"server {number}", "collect", 0.0, 1.0)
    timeline.add("driver", "generate", 0.0, 1.0)
    timeline.add("actor", "update", 1.0, 2.0)
    timeline.add("server 9", "collect", 1.0, 2.0)
    taken = timeline.take("training", 1)
    roles = [span.role for span in taken.spans]
    assert roles == [*(f"server {number}" for number in range(8)), "driver", "actor"]
    assert taken.num_left_out == 43


def test_call_ends_with_its_last_reply():
    timeline, replies = Timeline(), [Future(), Future()]
    timeline.follow("actor", "update", replies)
    replies[1].set_result(None)
    assert not timeline.take("training", 1).spans
    replies[0].set_exception(ValueError())
    [span] = timeline.take("training", 2).spans
    assert (span.role, span.name) == ("actor", "update") and span.start_s <= span.end_s


def test_timeline_file_has_all_first_steps_and_then_every_tenth(tmp_path):
    writer = TimelineWriter(tmp_path)
    for step in range(1, 125):
        writer.write(StepTimeline("training", step, [TimeSpan("driver", "update", 0.0, 1.0)]))
    with (tmp_path / "timeline.jsonl").open("a") as file:
        file.write('{"phase": "training"')  # cut short
    steps = [line.step for line in read_timeline(tmp_path / "timeline.jsonl")]
    assert steps == [*range(1, 101), 110, 120]


def test_trace_has_the_step_and_microseconds_of_each_call():
    """A call that begins where another ends is on its track; roles are processes of their own."""
    first = StepTimeline("training", 1, [TimeSpan("actor", "update", 5.0, 6.0)])
    spans = [TimeSpan("actor", "score", 6.0, 6.5), TimeSpan("driver", "update", 4.5, 6.5)]
    trace = build_trace([first, StepTimeline("training", 2, spans)])
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"], e["args"]) for e in events] == [
        ("update", 1, 0, 0, 2_000_000, {"step": 2}),
        ("update", 0, 0, 500_000, 1_000_000, {"step": 1}),
        ("score", 0, 0, 1_500_000, 500_000, {"step": 2}),
    ]
    assert build_trace([])["traceEvents"] == []


def test_call_that_ends_with_the_one_around_it_is_on_its_track():
    """The third overlaps the first without being inside it."""
    spans = [(0.0, 4.0), (3.0, 4.0), (3.5, 5.0)]
    calls = [TimeSpan("actor", "update", start_s, end_s) for start_s, end_s in spans]
    events = build_trace([StepTimeline("training", 1, calls)])["traceEvents"]
    assert [event["tid"] for event in events if event["ph"] == "X"] == [0, 0, 1]


@pytest.mark.parametrize("end", ["NaN", "Infinity", '"noon"'])
def test_timeline_with_a_time_that_is_no_number_is_refused_by_its_row(tmp_path, end):
    path = tmp_path / "timeline.jsonl"
    spans = f'[["actor", "update", 0.0, {end}]]'
    path.write_text(f'{{"phase": "training", "step": 1, "spans": {spans}, "num_left_out": 0}}\n')
    with pytest.raises(ConfigError, match="row 0: no phase, step, spans"):
        read_timeline(path)
