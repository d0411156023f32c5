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


@pytest.mark.parametrize("end", ["NaN", "Infinity", '"noon"'])
def test_timeline_with_a_time_that_is_no_number_is_refused_by_its_row(tmp_path, end):
    path = tmp_path / "timeline.jsonl"
    spans = f'[["actor", "update", 0.0, {end}]]'
    path.write_text(f'{{"phase": "training", "step": 1, "spans": {spans}, "num_left_out": 0}}\n')
    with pytest.raises(ConfigError, match="row 0: no phase, step, spans"):
        read_timeline(path)
