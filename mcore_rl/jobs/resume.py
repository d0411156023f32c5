"""Resuming a run: its checkpoint, and the settings and data that have to be unchanged."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from mcore_rl.checkpoint.files import ComputeChecksums, compute_checksums
from mcore_rl.checkpoint.run_checkpoints import (
    RunCheckpoint,
    find_newest_checkpoint,
    list_steps,
    read_checkpoint,
)
from mcore_rl.config.checks import check_exists
from mcore_rl.config.describe import SettingRenamer, flatten_settings
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.rules import list_test_files, list_train_files
from mcore_rl.config.schema import AnyData, RLConfig, TrainConfig
from mcore_rl.controller.pending_call import Timeout, WorkerError
from mcore_rl.controller.ray_nodes import create_checksum_reader
from mcore_rl.data.rows import ANSWER_COLUMNS, PROMPT_COLUMNS
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.jobs.output import STARTED, SUMMARY
from mcore_rl.jobs.preflight import prepare_task
from mcore_rl.jobs.run_plan import CRITIC, WARM_START, RunPlan
from mcore_rl.observability.warnings import warn
from mcore_rl.trainers.checkpointing import CHECKPOINTS, DATA

# Sections that decide the first weights, and the order of the prompts.
_FIXED_SECTIONS = ("seed", "task", "model", "data", WARM_START)
# Settings that decide the age of samples, and the format of checkpoints.
_FIXED_SETTINGS = (
    "trainer.mode",
    "trainer.staleness",
    "actor.backend",
    "critic.backend",
    "engine.backend",
)
_START_SETTINGS = ("output_dir", "resume")  # of a single start, not of the run
# Columns that are read where the setting is null and the source has them.
_USUAL_COLUMNS = {"data.prompt_column": PROMPT_COLUMNS[0], "data.answer_column": ANSWER_COLUMNS[0]}


class Digested(Protocol):
    """Rows of files, with the digest of each file."""

    @property
    def digests(self) -> list[str]: ...


def find_checkpoint_to_resume(
    config: RLConfig | TrainConfig, folder: Path, compute_sums: ComputeChecksums = compute_checksums
) -> RunCheckpoint | None:
    """Return the checkpoint that config.resume names, with all files read; None to start anew.

    Args:
        folder: Output folder of the run, which no other run uses.
        compute_sums: Reads the files of engines.

    Raises:
        ConfigError: No checkpoint is complete, or it is of a run with other settings.
    """
    if config.resume == "never":
        return None
    checkpoints = folder.absolute() / CHECKPOINTS
    if config.resume == "auto":
        checkpoint = find_newest_checkpoint(checkpoints, warn, compute_sums)
        checkpoint = checkpoint or _read_first_checkpoint(folder, compute_sums)
    else:
        check_exists("resume", config.resume)
        checkpoint = read_checkpoint(Path(config.resume), compute_sums)
        if checkpoint.path.parent == checkpoints and list_steps(checkpoints)[-1] > checkpoint.step:
            raise ConfigError(
                f"resume={config.resume!r}: output_dir has a newer one, of step "
                f"{list_steps(checkpoints)[-1]}; allowed: 'auto', or another output_dir"
            )
    if checkpoint is not None:
        checkpoint.check_fields()
        _check_settings(config, checkpoint)
    return checkpoint


def find_checkpoint_on_nodes(config: RLConfig | TrainConfig, folder: Path) -> RunCheckpoint | None:
    """Call find_checkpoint_to_resume with all nodes of the run's cluster reading the files.

    Raises:
        RunFailed: A node could not read them.
    """
    timeout = Timeout(config.timeouts.call_s, "timeouts.call_s")
    try:
        return find_checkpoint_to_resume(config, folder, create_checksum_reader(timeout))
    except WorkerError as error:
        raise RunFailed(str(error)) from error


def _read_first_checkpoint(folder: Path, compute_sums: ComputeChecksums) -> RunCheckpoint | None:
    """Read the checkpoint of another run that the run in `folder` started from, if any."""
    if not (folder / STARTED).is_file():
        return None
    resume = read_json_object(folder / STARTED).get("resume", "never")
    return None if resume in ("never", "auto") else read_checkpoint(Path(resume), compute_sums)


def prepare_settings(config: RLConfig, folder: Path, checkpoint: RunCheckpoint | None) -> RLConfig:
    """Return settings with the run's model and data: newly made, or those of the checkpoint."""
    if checkpoint is None:
        return prepare_task(config, folder)
    config = prepare_task(config, checkpoint.made_in, exists=True)
    if config.warm_start.num_steps:
        path = checkpoint.made_in / WARM_START
        if not path.is_dir():
            raise ConfigError(f"{path} is missing: {checkpoint.path} goes on with its tokenizer")
        config = use_warm_start(config, checkpoint.made_in)
    return config


def use_warm_start(config: RLConfig, folder: Path) -> RLConfig:
    """Return settings of a run whose warm start is over, and whose weights are in its folder."""
    warm, path = replace(config.warm_start, num_steps=0), str(folder / WARM_START)
    return replace(config, warm_start=warm, model=replace(config.model, path=path))


def remove_warm_start(folder: Path) -> None:
    """Remove the warm start of a run that ended before its first checkpoint."""
    shutil.rmtree(folder / WARM_START, ignore_errors=True)


def get_end_step(
    config: RLConfig | TrainConfig, checkpoint: RunCheckpoint | None, folder: Path
) -> int:
    """Return the last step of a run that has ended; 0 if steps are left.

    It is later than trainer.num_steps if the run trained more steps before.
    """
    has_summary = (folder / SUMMARY).exists()
    if checkpoint is None or checkpoint.run != folder.absolute() or not has_summary:
        return 0
    return checkpoint.step if checkpoint.step >= config.trainer.num_steps else 0


def check_critic(plan: RunPlan, checkpoint: RunCheckpoint | None, advantage: str) -> None:
    """Raise ConfigError if `advantage` needs a critic that the checkpoint does not have."""
    if checkpoint and CRITIC in plan and not (checkpoint.path / CRITIC).exists():
        raise ConfigError(
            f"{checkpoint.path} has no critic, which algorithm.advantage={advantage!r} needs; "
            "allowed: a checkpoint of a run with one"
        )


def is_same_setting(key: str, value: object, saved: object) -> bool:
    """Return whether two values of a setting mean the same run.

    A run that has named the usual column has read it, and without the name would have, too.
    """
    if value == saved:
        return True
    return key in _USUAL_COLUMNS and {value, saved} == {None, _USUAL_COLUMNS[key]}


def _check_settings(config: RLConfig | TrainConfig, checkpoint: RunCheckpoint) -> None:
    """Refuse changes of settings that make another run; print all other changes."""
    settings = dict(flatten_settings(asdict(config)))
    saved = dict(flatten_settings(SettingRenamer().rename_tree(checkpoint.state["settings"])))
    changed = [k for k in settings if not is_same_setting(k, settings[k], saved.get(k))]
    layout = f"{WARM_START}.layout."  # the warm start is over
    known = [key for key in changed if key in saved]  # an older version saved fewer settings
    refused = [k for k in known if k.split(".")[0] in _FIXED_SECTIONS and not k.startswith(layout)]
    refused += [k for k in known if k in _FIXED_SETTINGS]
    if refused:
        values = "; ".join(f"{key}={settings[key]!r}, there {saved.get(key)!r}" for key in refused)
        raise ConfigError(f"{checkpoint.path} is of another run: {values}; allowed: the same")
    print(f"going on after step {checkpoint.step}, from {checkpoint.path}")
    changes = [
        f"{key}={settings[key]} (was {saved.get(key)})"
        for key in changed
        if key not in _START_SETTINGS
    ]
    if changes:
        print(f"settings that differ: {', '.join(changes)}")


def check_data(
    checkpoint: RunCheckpoint | None, data: AnyData, train: Digested, tests: Iterable[Digested]
) -> dict[str, str]:
    """Return the digest of each source of `data`, by the setting that names it.

    Raises:
        ConfigError: A source has other rows than when the run saved the checkpoint.
    """
    files = list_train_files(data) | dict(list_test_files(data).values())
    digests = [*train.digests, *(digest for test in tests for digest in test.digests)]
    by_setting = dict(zip(files, digests, strict=True))
    saved = checkpoint.state.get(DATA, {}) if checkpoint else {}  # earlier versions saved none
    changed = [s for s, digest in by_setting.items() if saved.get(s, digest) != digest]
    if checkpoint and changed:
        sources = ", ".join(f"{setting}={files[setting]!r}" for setting in changed)
        raise ConfigError(
            f"{checkpoint.path} is of a run with other rows in {sources}; allowed: the rows that "
            "it was trained on, or a new output_dir with resume=never"
        )
    return by_setting
