"""The launch scripts: their syntax, what they ask SLURM for, and what --dry-run prints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli.compose import compose_config
from mcore_rl.config.resolve import for_lane
from mcore_rl.config.schema import RLConfig
from mcore_rl.jobs.placement import num_devices, pool_plans
from tests.pages import of_kind

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
JOBS = [path for path in SCRIPTS if path.name.startswith("run_")]


def asked(script: Path, option: str) -> str:
    found = re.search(rf"^#SBATCH --{option}=(\S+)$", script.read_text(), re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_of_bash_and_shellcheck_has_nothing_to_say(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", script], check=True, cwd=ROOT)


@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_a_job_asks_for_as_many_devices_as_its_recipe_needs(script):
    recipe = re.search(r"run_job recipe=(\w+)", script.read_text())
    assert recipe, script
    config = for_lane(compose_config(RLConfig, [f"recipe={recipe[1]}"]), "cpu")
    devices = int(asked(script, "nodes")) * int(asked(script, "gpus-per-node") or 1)
    assert devices == num_devices(pool_plans(config))
    assert config.trainer.save_every or "trainer.save_every=" in script.read_text()
    assert asked(script, "signal").startswith("B:USR1@")
    assert "#SBATCH --requeue\n" in script.read_text()


def test_a_dry_run_prints_every_command_and_starts_nothing(tmp_path):
    (command,) = [c.text for c in of_kind("launch plan")]
    environment = os.environ | {"MCORE_RL_PYTHON": sys.executable, "SLURM_JOB_NODELIST": ""}
    done = subprocess.run(
        [*command.split(), f"output_dir={tmp_path / 'out'}", "warm_start.num_steps=1",
         "warm_start.optimizer.warmup_steps=0"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    order = [
        "nodes: node0 node1", "mcore_rl.cli.main doctor", "mcore_rl.controller.node address",
        "mcore_rl.controller.node hold", "mcore_rl.cli.main rl", "mcore_rl.controller.node sweep",
        "actor: 2 ranks", "rollout: 2 ranks",
    ]  # fmt: skip
    places = [done.stdout.index(word) for word in order]
    assert places == sorted(places)
    assert "resume=auto" in done.stdout
    assert not (tmp_path / "out").exists()
