import io
import re
import time

from rich.console import Console

from mcore_rl.observability.activity import ACTIVITY, Stopwatch
from mcore_rl.observability.console import (
    MeanWithError,
    StepProgress,
    StepReport,
    print_before_after,
    show_waiting,
)

REPORT = StepReport(
    reward=0.4567,
    response_tokens=23.45,
    generate_s=12.1,
    train_s=13.4,
    sync_s=0.25,
    tokens_per_s=5123.0,
)
TEXT = "reward 0.457  length 23.4  gen 12.1s train 13.4s sync 0.2s  5,123 tok/s"


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=terminal, width=80, color_system=None), written


def test_without_a_terminal_each_step_is_one_plain_line():
    to, written = console(terminal=False)
    with StepProgress("grpo", 2, to) as progress:
        progress.update(1, REPORT)
        assert written.getvalue() == f"grpo 1/2  {TEXT}\n"  # at once, not at the end
        progress.update(2, "done [1] " + 100 * "x")
    assert written.getvalue().splitlines() == [
        f"grpo 1/2  {TEXT}",
        f"grpo 2/2  done [1] {100 * 'x'}",
    ]


def test_on_a_terminal_bar_and_report_fit_in_80_columns():
    to, written = console(terminal=True)
    with StepProgress("grpo", 16, to) as progress:
        progress.update(16, REPORT)
    assert "16/16" in written.getvalue()
    assert TEXT in written.getvalue()
    assert len(TEXT) <= 80


def test_on_a_terminal_the_cursor_comes_back_when_the_run_fails():
    to, written = console(terminal=True)
    try:
        with StepProgress("grpo", 16, to):
            raise RuntimeError("diverged")
    except RuntimeError:
        pass
    assert written.getvalue().endswith("\x1b[?25h")


def test_the_table_shows_before_after_and_the_change_in_points():
    to, written = console(terminal=False)
    lines = [
        ("right", MeanWithError(0.354, 0.021, True), MeanWithError(0.953, 0.009, True)),
        ("reward", MeanWithError(0.5, 0.1, False), MeanWithError(-0.25, 0.05, False)),
    ]
    print_before_after("Held out", lines, to)
    rows = [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        for line in written.getvalue().splitlines()
        if "±" in line
    ]
    assert rows == [
        ["right", "35.4% ± 2.1", "95.3% ± 0.9", "+59.9 points"],
        ["reward", "0.500 ± 0.100", "-0.250 ± 0.050", "-0.750"],
    ]


def test_a_table_without_values_before_has_no_such_column():
    to, written = console(terminal=False)
    print_before_after("Held out", [("reward", None, MeanWithError(0.5, 0.1, False))], to)
    assert "before" not in written.getvalue() and "0.500 ± 0.100" in written.getvalue()


def test_a_phase_has_a_line_when_it_begins_and_its_seconds_when_it_has_ended():
    to, written = console(terminal=False)
    with show_waiting("loading", to):
        assert written.getvalue() == "loading ...\n"
    assert re.fullmatch(r"loading \.\.\.\nloading: 0\.\d s\n", written.getvalue())


def test_on_a_terminal_a_step_shows_what_it_does_and_how_much_has_come():
    to, written = console(terminal=True)
    with (
        StepProgress("grpo", 16, to),
        Stopwatch(12)("generate"),
        ACTIVITY.count(512, "samples") as update,
    ):
        update(190)
        deadline = time.monotonic() + 60  # rich draws in a thread, four times a second
        while "190/512" not in written.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert re.search(r"step 12: generate 190/512 samples, \d+ s", written.getvalue())


def test_what_is_drawn_is_no_line_elsewhere():
    to, written = console(terminal=False)
    with StepProgress("math", 8, to) as progress:
        progress.draw(3, "reward 1.0")
    assert written.getvalue() == ""


def test_on_a_terminal_a_wait_shows_its_seconds():
    to, written = console(terminal=True)
    with show_waiting("loading", to):
        pass
    assert re.search(r"loading, \d+ s", written.getvalue())
