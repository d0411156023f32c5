"""The first seconds of a job: told at once, and counted from when its command began."""

import re
import time

import pytest

from mcore_rl.cli.job import report_start
from mcore_rl.observability import process


@pytest.fixture(autouse=True)
def nothing_has_begun(monkeypatch):
    monkeypatch.setattr(process, "_start_time", None)


def test_imports_count_from_the_beginning_of_the_command(monkeypatch, capsys):
    monkeypatch.setattr(process, "_start_time", time.monotonic() - 20)
    with report_start():
        assert capsys.readouterr().out == "starting ...\n"  # before them
    assert re.fullmatch(r"starting: [2-9]\d\.\d s\n", capsys.readouterr().out)


@pytest.mark.parametrize(("rank", "lines"), [("0", 2), ("1", 0)])
def test_of_the_ranks_of_torchrun_one_says_so(monkeypatch, capsys, rank, lines):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", rank)
    with report_start():
        pass
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_a_job_that_no_command_has_started_begins_when_it_is_asked():
    before = time.monotonic()
    assert before <= process.get_start_time() <= time.monotonic()
    process.record_start()
    told = process.get_start_time()
    assert process.get_start_time() == told
