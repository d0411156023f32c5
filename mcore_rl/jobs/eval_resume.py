"""What an evaluation goes on from: the sets whose samples are there, made by the same settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.eval_schema import EvalConfig
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.schema import RLConfig
from mcore_rl.jobs.eval_report import SetSamples
from mcore_rl.jobs.output import LOGS, STARTED
from mcore_rl.jobs.resume import flat
from mcore_rl.observability.warnings import warn

SAMPLES = "samples"  # the folder with a parquet file a set
EVALUATED = "evaluated"  # in config.json: the model that was found, dtype, date, digests of rows
# What changes no response, or is counted anew.
_FREE = (
    "output_dir", "resume", "timeouts", "scoring.ks", "rollout.num_servers", "rollout.max_restarts",
    "rollout.max_num_seqs", "rollout.max_num_batched_tokens", "rollout.kv_cache_bytes",
    "rollout.cores", "rollout.load_format",
)  # fmt: skip


def check_content(folder: Path, held: set[str], output_dir: str, resume: str) -> None:
    """Raises ConfigError when no evaluation may begin, or go on, in a folder that holds this."""
    begun = STARTED in held and EVALUATED in read_json_object(folder / STARTED)
    others = {name for name in held if not name.endswith(".partial")} - {LOGS}
    if resume == "never" and held:
        hint = ", or resume=auto to go on with the evaluation in it" if begun else ""
        raise ConfigError(f"output_dir={output_dir!r} is not empty; allowed: a new folder{hint}")
    if others and not begun:
        raise ConfigError(
            f"output_dir={output_dir!r} is not empty and holds no evaluation; allowed: a new folder"
        )


def settings_of(config: EvalConfig, run: RLConfig, digests: Mapping[str, str]) -> dict[str, Any]:
    """What config.json has: the settings, and what `run` has found by them.

    `digests` are of the rows of each set.
    """
    model = run.model
    resolved = {"model": model.path, "dtype": model.dtype, "chat_date": model.chat_date}
    return asdict(config) | {EVALUATED: {**resolved, "rows": dict(digests)}}


def done_before(
    config: EvalConfig,
    run: RLConfig,
    folder: Path,
    num_prompts: Mapping[str, int],
    digests: Mapping[str, str],
) -> dict[str, SetSamples]:
    """The sets of which all samples are in the folder, which is that of this evaluation.

    Raises:
        ConfigError: it is of another model, of other settings, or of other rows.
    """
    if not (folder / STARTED).is_file():
        return {}
    _check_settings(settings_of(config, run, digests), read_json_object(folder / STARTED), folder)
    found = {}
    for name, num in num_prompts.items():
        samples = _read(folder / SAMPLES / f"{name}.parquet", config.rollout.n, num)
        if samples is not None:
            found[name] = samples
    return found


def _check_settings(mine: Mapping[str, Any], theirs: Mapping[str, Any], folder: Path) -> None:
    own, before = dict(flat(mine)), dict(flat(theirs))
    differ = [key for key in own if key in before and own[key] != before[key]]
    refused = [key for key in differ if not _is_one_of(key, _FREE)]
    if refused:
        told = "; ".join(f"{key}={own[key]!r}, there {before[key]!r}" for key in refused)
        raise ConfigError(
            f"{folder} is of another evaluation: {told}; allowed: the same, or another output_dir"
        )


def _is_one_of(key: str, settings: Sequence[str]) -> bool:
    return any(key == setting or key.startswith(f"{setting}.") for setting in settings)


def _read(path: Path, n: int, num_prompts: int) -> SetSamples | None:
    """None where they are not all there: they are sampled again."""
    if not path.is_file():
        return None
    try:
        samples = SetSamples.read(path, n)
    except (OSError, pa.ArrowException) as error:
        warn(f"{path} cannot be read, its set is sampled again: {error}")
        return None
    return samples if len(samples.columns["row"]) == n * num_prompts else None
