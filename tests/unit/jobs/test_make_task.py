"""The files of built-in tasks, as mcore-rl data makes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mcore_rl.cli.compose import compose_config
from mcore_rl.config import allowed
from mcore_rl.config.schema import RLConfig
from mcore_rl.examples.tasks.registry import TASKS
from tests.unit.jobs.test_make_data import run


def test_the_built_in_task_is_made_and_not_over_another_folder(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = "last_digit", "--output", "task", "--seed", "3"
    status, out, err = run(monkeypatch, capsys, *words)
    assert (status, err) == (0, "")
    assert out.splitlines()[:2] == [
        "task/train.parquet: 10805 rows",
        "task/test.parquet: 1174 rows",
    ]
    assert json.loads(Path("task/task.json").read_text())["seed"] == 3
    before = Path("task/train.parquet").read_bytes()
    status, _, err = run(monkeypatch, capsys, *words[:-1], "4")
    assert (status, "--output='task' exists; allowed: a new or empty" in err) == (2, True)
    assert Path("task/train.parquet").read_bytes() == before
    status, _, err = run(monkeypatch, capsys, "last_digit", "--output", "x", "--worked-share", "2")
    assert (status, "--worked-share=2.0; allowed: 0 to 1" in err) == (2, True)
    assert os.listdir() == ["task"]


@pytest.mark.parametrize("name", ["toy_calculator", "toy_countdown", "toy_code"])
def test_a_task_of_several_turns_is_what_its_recipe_trains_on(monkeypatch, capsys, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    status, _, err = run(monkeypatch, capsys, name, "--output", "made")
    assert (status, err) == (0, "")
    task = compose_config(RLConfig, [f"recipe={name}"]).task
    expected = TASKS[task.name](tmp_path / "expected", 0, task.worked_share)
    for file in (expected.train_file, expected.test_file, expected.warm_start_file):
        assert (tmp_path / "made" / file.name).read_bytes() == file.read_bytes()


def test_the_setting_allows_every_task_and_the_command_makes_one_with_pictures(
    monkeypatch, capsys, tmp_path
):
    assert {*allowed.TASKS} == {*TASKS}
    status, out, err = run(monkeypatch, capsys, "pictures", "--output", tmp_path / "made")
    assert (status, err) == (0, "")
    rows = [line.rpartition(": ")[2] for line in out.splitlines()]
    assert rows == ["2411 rows", "289 rows", "5760 rows", "an untrained model and its tokenizer"]
    assert (tmp_path / "made/model/preprocessor_config.json").is_file()
