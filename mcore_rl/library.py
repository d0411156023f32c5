"""A run from a script or a notebook: the functions that `import mcore_rl` offers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.cli.compose import compose_config, compose_recorded, explain_unknown
from mcore_rl.config.describe import list_setting_names
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.object_settings import name_objects
from mcore_rl.config.schema import RLConfig
from mcore_rl.jobs.early_checks import check_early
from mcore_rl.jobs.output import CHECKPOINT, SUMMARY
from mcore_rl.observability.metrics import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure

Function = Callable[..., Any]
Rows = Iterable[Mapping[str, Any]]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


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

    def to_pandas(self) -> pandas.DataFrame:
        """Return the metrics as a data frame, a row for each training step.

        Raises:
            ModuleNotFoundError: pandas, which this package does not need, is not installed.
        """
        import pandas

        return pandas.DataFrame(self.metrics).set_index("step")

    def plot(self, *names: str) -> Figure:
        """Return an interactive plot of metrics along the steps, which notebooks show.

        Args:
            names: Metrics, such as "reward" (the default) or "actor/entropy".

        Raises:
            ConfigError: The run has no such metric.
        """
        from plotly.graph_objects import Figure

        figure = Figure(layout={"xaxis_title": "step", "template": "plotly_white"})
        for name in names or ("reward",):
            rows = [row for row in self.metrics if name in row]
            if not rows:
                known = sorted({key for row in self.metrics for key in row} - {"step", "phase"})
                raise ConfigError(f"{self.folder} has no metric {name!r}; it has: {known}")
            values = [row[name] for row in rows]
            figure.add_scatter(x=[row["step"] for row in rows], y=values, name=name)
        return figure


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

    Where a setting takes an import path, it may be a function or class instead, also a lambda or
    one of a notebook's cell; where it takes a file of rows, a list of dicts or a Dataset.

    Raises:
        ConfigError: A setting or an input is wrong; nothing has been started, nothing is left.
        RunFailed: The run had to stop (mcore_rl.jobs.failure).
        RunStopped: A signal has ended it, and it can be resumed.
    """
    if not isinstance(config, RLConfig):
        raise ConfigError(f"config is a {type(config).__name__}; allowed: an mcore_rl.RLConfig")
    with name_objects(config) as named:
        checked = compose_recorded(RLConfig, asdict(named))
        check_early(checked)
        from mcore_rl.jobs import rl  # imports torch, Ray and vLLM: after the checks

        rl.run(checked)
    return load_run(config.output_dir)


def grpo(
    model: str | Path,
    reward: str | Function | Mapping[str, str | Function],
    data: str | Path | Rows | Function,
    *,
    test_data: str | Path | Rows | Function | None = None,
    output_dir: str | Path | None = None,
    recipe: str = "",
    settings: Mapping[str, Any] | None = None,
) -> RunResult:
    """Train a model with GRPO, from Python objects; return the results of the run.

        mcore_rl.grpo(
            "Qwen/Qwen3-0.6B",
            reward=lambda text, fields: float(fields["answer"] in text),
            data=[{"prompt": "2 + 3?", "answer": "5"}],
            settings={"trainer.num_steps": 20},
        )

    Args:
        model: A folder with a Hugging Face checkpoint, or the name of one on the Hugging Face Hub.
        reward: A function of the text of a response and its row (mcore_rl.rewards.registry), or the
            name of a reward. Several by name are added up.
        data: Rows to train on: dicts, a Dataset of `datasets`, a file (docs/data.md), or a function
            that returns rows.
        test_data: Held-out rows.
        output_dir: Folder of the run, which must be new or empty. None: outputs/grpo-DATE-TIME.
        recipe: Settings to start from, as for `load_recipe`.
        settings: More settings by their full names (docs/configuration.md). Values may be Python
            objects, as for `run`.

    Raises:
        ConfigError, RunFailed, RunStopped: As `run`.
    """
    name = str(model)
    if not Path(name).exists() and _HUB_NAME.fullmatch(name):
        name = f"hf:{name}"
    folder = output_dir or time.strftime("outputs/grpo-%Y%m%d-%H%M%S")
    config = load_recipe(recipe, f"model.path={name}", f"output_dir={folder}")
    values: dict[str, Any] = {"data.train_file": data}
    if test_data is not None:
        values["data.test_file"] = test_data
    if isinstance(reward, Mapping):
        values["reward.terms"] = {name: {"name": term} for name, term in reward.items()}
    else:
        values["reward.name"] = reward
    for key, value in {**values, **(settings or {})}.items():
        _set_value(config, key, value)
    return run(config)


def _set_value(config: RLConfig, key: str, value: Any) -> None:
    """Set a setting by its full name; ConfigError if there is none."""
    known = list_setting_names(RLConfig)
    outer, _, name = key.rpartition(".")
    if key not in known and outer not in known:  # a mapping may have keys of its own
        raise ConfigError(explain_unknown(key, known))
    target: Any = config
    for part in outer.split(".") if outer else ():
        target = target[part] if isinstance(target, dict) else getattr(target, part)
    if isinstance(target, dict):
        target[name] = value
    else:
        setattr(target, name, value)


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
