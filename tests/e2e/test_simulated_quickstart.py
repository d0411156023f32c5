"""The quickstart as its simulation predicts it, after this machine is calibrated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, select_commands

pytestmark = [pytest.mark.job, pytest.mark.nightly]
SHORT = ["warm_start.num_steps=60", "trainer.eval_samples=16"]  # responses keep to the format
PROGRAMS = {
    "mcore-rl": [str(Path(sys.executable).with_name("mcore-rl"))],
    "python": [sys.executable],
}


def run_command(text: str, folder: Path, *arguments: str) -> str:
    program, *words = text.split()
    words = [str(ROOT / word) if word.startswith("benchmarks/") else word for word in words]
    line = [*PROGRAMS[program], *words, *arguments]
    return subprocess.run(line, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_commands_of_the_page_predict_the_order_of_events_and_the_time_of_a_step(tmp_path: Path):
    calibrate, simulate, benchmark = (command.text for command in select_commands("calibration"))
    run_command(calibrate, tmp_path, *SHORT)
    simulated = json.loads(run_command(simulate, tmp_path, "trainer.num_steps=2", "--json"))
    assert 0.1 < simulated["sync"]["step_s"] < 600
    comparison = json.loads(run_command(benchmark, tmp_path, *SHORT))
    assert comparison["has_same_events"], (comparison["events"], comparison["events_of_run"])
    assert comparison["events"]["driver"] == ["generate", "log_probs", "update", "weight_sync"]
    assert 0.75 < comparison["seconds"]["step"]["simulated/run"] < 1.25
