"""Our loops, and one from a file, in real runs of the conformance check; a fault is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.job
ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from mcore_rl.testing import check_trainer
from mcore_rl.trainers.base import load_trainer

if __name__ == "__main__":
    check_trainer(load_trainer(sys.argv[1]), sys.argv[2:])
"""
FAULT = """
from mcore_rl import SyncTrainer

class Stale(SyncTrainer):
    def train(self):
        self.devices.update_weights = lambda version: None
        super().train()
"""
RFT = "examples/rft.py:RejectionSampling"


def run_check(folder: Path, mode: str, *overrides: str) -> str:
    """Run the check in a process of its own; return its errors."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, script, mode, *overrides],
        capture_output=True, text=True, timeout=600, cwd=ROOT, check=False,
    )  # fmt: skip
    assert (ended.returncode == 0) == (not ended.stderr), ended.stderr[-3000:]
    return ended.stderr


@pytest.mark.nightly  # tests/unit/testing/test_trainer.py has the check, test_library.py a run
@pytest.mark.parametrize("mode", [RFT, "sync", "one_step_off", "fully_async"])
def test_a_loop_conforms(tmp_path, mode):
    overrides = ["algorithm.num_mini_batches=1"] if mode == RFT else []
    assert run_check(tmp_path, mode, *overrides) == ""


@pytest.mark.nightly
def test_a_loop_that_never_sends_weights_is_named(tmp_path):
    file = tmp_path / "stale.py"
    file.write_text(FAULT)
    errors = run_check(tmp_path, f"{file}:Stale")
    message = "AssertionError: Stale: at the end of step 1 the servers have weights of version 0; "
    assert message in errors
