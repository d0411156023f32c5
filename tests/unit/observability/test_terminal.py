"""Output of a run on a real pseudo-terminal, as a person sees it at the end."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest

from tests.terminal import Screen, read_terminal, run_on_terminal

WIDTHS = (80, 140)
RUN = """
import os, sys, time
from mcore_rl.observability.activity import ACTIVITY, Stopwatch
from mcore_rl.observability.console import (
    MeanWithError, StepProgress, StepReport, print_before_after, show_line, show_waiting,
)
from mcore_rl.observability.warnings import warn

with show_waiting("starting"):
    print("1 node")
with StepProgress("training", 20) as progress:
    for step in range(1, 21):
        with Stopwatch(step)("generate"), ACTIVITY.count(8, "samples") as count:
            count(4)
            time.sleep(0.02)
        show_line(f"step {step}: sample, reward 1.000  " + "word " * 30 + "end")
        if step in (7, 20):
            warn(f"step {step}: half of the responses are empty")
        if step == 10:
            with show_waiting("evaluating"):
                time.sleep(0.3)
        if step == 12:
            print("a line of a library")
        progress.update(step, StepReport(step / 20, 23.45, 0.01, 3.1, 1.0, 2.0, 0.1, 5e3))
with show_waiting("exporting"):
    time.sleep(0.3)
print_before_after("Held out", [("reward", None, MeanWithError(0.5, 0.1, False))])
"""


@pytest.mark.parametrize("columns", WIDTHS)
def test_after_twenty_steps_a_person_sees_a_line_of_each_and_the_last_bar(columns):
    status, lines = read_terminal([sys.executable, "-c", RUN], columns)
    assert status == 0, lines
    expected = ["1 node", "starting: S s"]
    for step in range(1, 21):
        sample = f"step {step}: sample, reward 1.000  " + "word " * 30 + "end"
        expected += textwrap.wrap(sample, columns)
        if step in (7, 20):
            expected += [f"mcore-rl: warning: step {step}: half of the responses are empty"]
        expected += ["evaluating: S s"] * (step == 10) + ["a line of a library"] * (step == 12)
        expected += [f"training {step}/20  reward {step / 20:.3f}  length 23.4  gap 0.0100  3.1 s"]
        expected[-1] += "  gen 1.0 train 2.0 sync 0.1  5,000 tok/s" * (columns > 80)
    expected += ["training BAR 20/20 0:00:00", "exporting: S s", "Held out"]
    shown = [re.sub(r"━+", "BAR", re.sub(r": [0-9.]+ s$", ": S s", line)) for line in lines]
    assert shown[: len(expected)] == expected
    assert max(map(len, lines)) <= columns


def test_a_path_that_is_longer_than_a_line_stays_whole():
    path = f"/{'long/' * 20}end"
    program = f"""
from mcore_rl.observability.console import StepProgress, show_line
with StepProgress("training", 1):
    show_line("the run in {path} has ended")
"""
    status, sent = run_on_terminal([sys.executable, "-c", program])
    assert status == 0 and path in sent


HOSTILE = 'show_line("step 1: sample \\x1b[2J\\x1b[31mred\\x07\\u202e")'


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_response_does_nothing_to_the_terminal(columns):
    program = f"""
from mcore_rl.observability.console import StepProgress, show_line
with StepProgress("training", 1) as progress:
    {HOSTILE}
    progress.update(1, "reward 1.0")
"""
    _, lines = read_terminal([sys.executable, "-c", program], columns)
    assert lines[0] == r"step 1: sample \x1b[2J\x1b[31mred\x07\u202e"
    assert len(lines) == 3


STEPS = """
import sys
from mcore_rl.observability.console import StepProgress, show_waiting
with show_waiting("starting"):
    pass
with StepProgress("training", 2) as progress:
    for step in (1, 2):
        progress.update(step, f"reward {step}.0")
        print(f"warning {step}", file=sys.stderr)
"""
PLAIN = ["starting ...", "starting: 0.0 s", "training 1/2  reward 1.0", "training 2/2  reward 2.0"]


def test_a_terminal_that_cannot_redraw_gets_a_line_for_each_step():
    _, lines = read_terminal([sys.executable, "-c", STEPS], 80, {"TERM": "dumb"})
    lines = [re.sub(r"starting: \d\.\d s", "starting: 0.0 s", line) for line in lines]
    assert [line for line in lines if "warning" not in line] == PLAIN


def test_a_file_gets_plain_lines_where_colours_are_forced():
    ended = subprocess.run(
        [sys.executable, "-c", STEPS],
        capture_output=True,
        text=True,
        env={"FORCE_COLOR": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert re.sub(r"starting: \d\.\d s", "starting: 0.0 s", ended.stdout).splitlines() == PLAIN


def test_warnings_reach_a_file_beside_a_live_display(tmp_path):
    file = tmp_path / "warnings"
    program = f"import sys; sys.stderr = open({str(file)!r}, 'w')\n{STEPS}"
    _, lines = read_terminal([sys.executable, "-c", program], 80)
    assert file.read_text() == "warning 1\nwarning 2\n"
    assert not any("warning" in line for line in lines)


def test_the_screen_wraps_scrolls_and_erases_as_a_terminal_does():
    screen = Screen(4, rows=2)
    screen.feed("abcdef\r\n1\r\n2\x1b[9A\r\x1b[2K\x1b[1mnew\x1b[0m")
    assert screen.lines == ["abcd", "ef", "new", "2"]
    with pytest.raises(ValueError, match=r"ESC \[ 2J"):
        screen.feed("\x1b[2J")
