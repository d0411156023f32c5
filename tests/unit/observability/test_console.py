import io
import os
import re
import subprocess
import time
from dataclasses import replace

import pytest
from rich.console import Console

from mcore_rl.observability.activity import ACTIVITY, Stopwatch
from mcore_rl.observability.console import (
    MeanWithError,
    StepProgress,
    StepReport,
    print_before_after,
    print_rows,
    show_commands,
    show_waiting,
)
from mcore_rl.observability.process import find_command

REPORT = StepReport(
    reward=0.4567,
    response_tokens=23.45,
    max_logprob_gap=0.01234,
    step_s=26.04,
    generate_s=12.1,
    train_s=13.4,
    sync_s=0.25,
    tokens_per_s=5123.0,
)
FIRST = "reward 0.457  length 23.4  gap 0.0123  26.0 s"
TEXT = f"{FIRST}  gen 12.1 train 13.4 sync 0.2  5,123 tok/s"


def console(*, terminal: bool, width: int = 80) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=terminal, width=width, color_system=None), written


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


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (200, TEXT),
        (80, FIRST),
        (95, TEXT.removesuffix("  5,123 tok/s")),
        (40, "reward 0.457  length 23.4"),
    ],
)
def test_on_a_terminal_a_step_keeps_its_line_of_the_fields_that_fit(columns, shown):
    to, written = console(terminal=True, width=columns)
    with StepProgress("grpo", 16, to) as progress:
        progress.update(16, REPORT)
    [line] = [line for line in written.getvalue().splitlines() if "grpo 16/16" in line]
    assert line.split("grpo 16/16")[-1].strip() == shown
    assert re.search(r"grpo ━+ 16/16", written.getvalue())  # the bar is beneath it


def test_a_step_without_compared_log_probs_shows_no_gap():
    assert str(replace(REPORT, max_logprob_gap=None)) == TEXT.replace("  gap 0.0123", "")


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


SETS = [f"data.sets.s{number}=f.jsonl" for number in range(9)]
TEXTS = ["reward.settings={digits: 3, text: 'a  b'}", "x" * 70, "y" * 71, "z" * 72]
HEADINGS, ROW = ("moment", "ranks", "weights", "all"), ("update: actor", "0-1, 4", "1.5", "31.5")


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (
            40,
            """\
moment         ranks   weights   all
update: actor  0-1, 4      1.5  31.5
[x]            0                 2.0
""",
        ),
        (
            33,
            """\
moment      ranks   weights   all
update:     0-1, 4      1.5  31.5
actor                            \n\
[x]         0                 2.0
""",
        ),
        (
            26,
            """\
update: actor
  ranks 0-1, 4,
  weights 1.5, all 31.5
[x]
  ranks 0, all 2.0
""",
        ),
    ],
)
def test_rows_are_a_table_or_where_its_words_do_not_fit_paragraphs(columns, shown):
    to, written = console(terminal=False, width=columns)
    print_rows(HEADINGS, [ROW, ("[x]", "0", "", "2.0")], to, num_texts=2)
    assert written.getvalue() == shown


COMMANDS = [
    ["mcore-rl", "samples", "outputs/it's mine"],
    ["mcore-rl", "eval", f"model.path=/{40 * 'long'}", *SETS, *TEXTS],
    ["mcore-rl", "chat", "outputs/$HOME", "*", "a\\b", "--tp", "2"],
]


@pytest.mark.parametrize("columns", [60, 80, 140])
@pytest.mark.parametrize("terminal", [False, True])
def test_printed_commands_have_the_same_arguments_in_a_shell_at_any_width(
    columns, terminal, tmp_path
):
    to, written = console(terminal=terminal, width=columns)
    show_commands("next:", COMMANDS, to)
    title, _, script = written.getvalue().partition("\n")
    assert title == "next:"
    short = [line for line in script.splitlines() if " " in line.strip(" \\")]
    assert max(map(len, short)) <= columns
    program = tmp_path / "mcore-rl"
    program.write_text("#!/bin/sh\nprintf '%s\\n' mcore-rl \"$@\"\n")
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-e"], input=script, env={"PATH": path}, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == [word for words in COMMANDS for word in words]


@pytest.mark.parametrize(
    ("started", "on_path", "words"),
    [
        (".venv/bin/mcore-rl", "", [".venv/bin/mcore-rl"]),
        (".venv/bin/mcore-rl", ".venv/bin", ["mcore-rl"]),
        (".venv/bin/mcore-rl", "other", [".venv/bin/mcore-rl"]),
        ("../apart/mcore-rl", "", ["{parent}/apart/mcore-rl"]),
        ("mcore_rl/cli/main.py", "", ["python/bin/mcore-rl"]),
    ],
)
def test_the_command_is_named_as_it_was_started(started, on_path, words, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    for place in (".venv/bin", "other", "../apart", "python/bin"):
        (folder / place).mkdir(parents=True)
        (folder / place / "mcore-rl").touch(mode=0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder / on_path) if on_path else "")
    monkeypatch.setattr("sys.executable", str(folder / "python/bin/python"))
    monkeypatch.setattr("sys.argv", [str(folder / started)])
    assert find_command() == [word.format(parent=tmp_path) for word in words]
    (folder / "python/bin/mcore-rl").unlink()
    if started.endswith("main.py"):
        python = str(folder / "python/bin/python")
        assert find_command() == [python, "-m", "mcore_rl.cli.main"]
