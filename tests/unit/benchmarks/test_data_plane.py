"""The benchmark of batches between groups: what it refuses, and one small run."""

from __future__ import annotations

import json
import sys

import pytest

from mcore_rl.cli import main as cli
from mcore_rl.cli.bench import main
from mcore_rl.config.errors import ConfigError
from tests.pages import select_commands


@pytest.mark.parametrize("name", ["ranks", "samples", "tokens", "repetitions", "steps"])
def test_sizes_below_one_are_refused_before_a_rank_starts(name: str):
    with pytest.raises(ConfigError, match=f"--{name}"):
        main(["data-plane", f"--{name}", "0"])


@pytest.mark.nightly  # tests/unit/controller/test_data_plane.py has batches and their memory
def test_a_small_run_reports_times_and_memory(monkeypatch, capsys):
    """Run the command of the page with less to move; each value is checked on its way."""
    [command] = select_commands("data plane")
    smaller = ["--samples", "16", "--tokens", "100", "--repetitions", "2", "--steps", "100"]
    monkeypatch.setattr(sys, "argv", [*command.text.split(), *smaller])
    assert cli.main() == 0
    report = json.loads(capsys.readouterr().out)
    names = {"by reference", "by value", "by value, inputs come back", "bare Ray, numpy"}
    assert names <= set(report["round_trips"])
    assert bool(report["missing"]) == ("TransferQueue" not in report["round_trips"])
    for timing in report["round_trips"].values():
        assert 0 < timing["fastest_s"] <= timing["median_s"]
    assert report["batch_bytes"] == pytest.approx(16 * (100 * 37 + 64 * 8), rel=0.05)
    before, after = report["memory_before"], report["memory_after"]
    assert after["object_store"] < before["object_store"] + (4 << 20)
    assert after["ranks_rss"] < before["ranks_rss"] + (32 << 20)
