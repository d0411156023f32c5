"""A run from a script or a notebook: the functions that `import mcore_rl` offers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.cli.compose import compose_config
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.jobs import rl
from mcore_rl.jobs.output import CHECKPOINT, SUMMARY
from mcore_rl.observability.metrics import METRICS_FILE, read_metrics


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run that has ended, read from its folder."""

    folder: Path
    summary: dict[str, Any]  # summary.json: evaluations before and after, memory, seconds
    metrics: list[dict[str, Any]]  # a row for each training step
    warm_start: list[dict[str, Any]]  # a row for each step of the warm start

    @property
    def checkpoint(self) -> Path:
        """The exported Hugging Face checkpoint."""
        return self.folder / CHECKPOINT


def load_recipe(name: str = "", *overrides: str) -> RLConfig:
    """Return the settings of a recipe, with overrides as on the command line.

    Args:
        name: A recipe of this package, or the path of a YAML file; empty: the defaults.
        overrides: key=value, as in "trainer.num_steps=40".

    Raises:
        ConfigError: An unknown recipe, setting or value.
    """
    recipe = [f"recipe={name}"] if name else []
    return compose_config(RLConfig, [*recipe, *overrides])


def run(config: RLConfig) -> RunResult:
    """Run reinforcement learning as `mcore-rl rl` does; return its results.

    Raises:
        ConfigError: A setting or an input is wrong; nothing has been started, nothing is left.
        RunFailed: The run had to stop (mcore_rl.jobs.failure).
        RunStopped: A signal has ended it, and it can be resumed.
    """
    rl.run(config)
    return load_run(config.output_dir)


def load_run(folder: str | Path) -> RunResult:
    """Return the result of a run that has ended.

    Raises:
        ConfigError: The folder has no summary.json of a run.
    """
    folder = Path(folder)
    try:
        summary = json.loads((folder / SUMMARY).read_text())
        rows = read_metrics(folder / METRICS_FILE)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no run has ended here: {error}") from error
    training = [row for row in rows if row.get("phase") == "training" and row["step"]]
    warm_start = [row for row in rows if row.get("phase") == "warm_start"]
    return RunResult(folder, summary, training, warm_start)
