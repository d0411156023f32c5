"""What a run goes on from: its checkpoint, and the settings that have to be those of before."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from mcore_rl.checkpoint.files import ComputeChecksums, compute_checksums
from mcore_rl.checkpoint.run_checkpoints import (
    CRITIC,
    RunCheckpoint,
    find_newest_checkpoint,
    list_steps,
    read_checkpoint,
)
from mcore_rl.config.checks import exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.schema import RLConfig
from mcore_rl.config.sources import AnyData, test_files, train_files
from mcore_rl.config.train_schema import TrainConfig
from mcore_rl.controller.cluster_reads import cluster_reads
from mcore_rl.controller.pending import Limit, WorkerError
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.jobs.output import STARTED, SUMMARY
from mcore_rl.jobs.placement import needs_critic
from mcore_rl.jobs.preflight import prepare_task
from mcore_rl.observability.warnings import warn
from mcore_rl.trainers.checkpointing import CHECKPOINTS, DATA

WARM_START = "warm_start"  # the folder with the weights that it ends with
# What makes a run the same one: the first weights, and which prompts come in which order.
_THE_SAME = ("seed", "task", "model", "data", WARM_START)
_THE_SAME_SETTINGS = ("trainer.mode", "trainer.staleness")  # which samples are ahead of a step
_ITS_OWN = ("output_dir", "resume")


class Digested(Protocol):
    """Rows of files, of which each has a digest."""

    @property
    def digests(self) -> list[str]: ...


def checkpoint_to_resume(
    config: RLConfig | TrainConfig, folder: Path, compute_sums: ComputeChecksums = compute_checksums
) -> RunCheckpoint | None:
    """What config.resume names, with all of its files read; None for a run that starts anew.

    `folder` is that of the run, which has it to itself. `compute_sums` reads the files of engines.

    Raises:
        ConfigError: there is none that is whole, or it is of a run with other settings.
    """
    if config.resume == "never":
        return None
    own = folder.absolute() / CHECKPOINTS
    if config.resume == "auto":
        found = find_newest_checkpoint(own, warn, compute_sums) or _begun_from(folder, compute_sums)
    else:
        exists("resume", config.resume)
        found = read_checkpoint(Path(config.resume), compute_sums)
        if found.path.parent == own and list_steps(own)[-1] > found.step:
            raise ConfigError(
                f"resume={config.resume!r}: output_dir has a newer one, of step "
                f"{list_steps(own)[-1]}; allowed: 'auto', or another output_dir"
            )
    if found is not None:
        found.check_fields()
        _check_settings(config, found)
    return found


def checkpoint_read_by_nodes(config: RLConfig | TrainConfig, folder: Path) -> RunCheckpoint | None:
    """The same, where all nodes of the cluster that a run joins read the files.

    Raises:
        RunFailed: one has not, and says why.
    """
    limit = Limit(config.timeouts.call_s, "timeouts.call_s")
    try:
        return checkpoint_to_resume(config, folder, cluster_reads(limit))
    except WorkerError as error:
        raise RunFailed(str(error)) from error


def _begun_from(folder: Path, compute_sums: ComputeChecksums) -> RunCheckpoint | None:
    """The checkpoint of another run that the run in `folder` began from and has not saved since."""
    if not (folder / STARTED).is_file():
        return None
    resume = read_json_object(folder / STARTED).get("resume", "never")
    return None if resume in ("never", "auto") else read_checkpoint(Path(resume), compute_sums)


def prepare(config: RLConfig, folder: Path, found: RunCheckpoint | None) -> RLConfig:
    """Settings with the model and the data of the run: made, or those that it goes on with."""
    if found is None:
        return prepare_task(config, folder)
    config = prepare_task(config, found.made_in, exists=True)
    if config.warm_start.num_steps:
        path = found.made_in / WARM_START
        if not path.is_dir():
            raise ConfigError(f"{path} is missing: {found.path} goes on with its tokenizer")
        warm = replace(config.warm_start, num_steps=0)
        config = replace(config, warm_start=warm, model=replace(config.model, path=str(path)))
    return config


def clear(folder: Path) -> None:
    """Remove what a run has left before its first checkpoint and another one does not replace."""
    shutil.rmtree(folder / WARM_START, ignore_errors=True)


def ended_after(config: RLConfig | TrainConfig, found: RunCheckpoint | None, folder: Path) -> int:
    """The last step of a run that has nothing left to do; 0 if something is left.

    That step is a later one than trainer.num_steps where fewer are asked for than were trained.
    """
    if found is None or found.run != folder.absolute() or not (folder / SUMMARY).exists():
        return 0
    return found.step if found.step >= config.trainer.num_steps else 0


def _check_critic(config: RLConfig, found: RunCheckpoint) -> None:
    if needs_critic(config) and not (found.path / CRITIC).exists():
        raise ConfigError(
            f"{found.path} has no critic, which algorithm.advantage={config.algorithm.advantage!r} "
            "needs; allowed: a checkpoint of a run with one"
        )


def _check_settings(config: RLConfig | TrainConfig, found: RunCheckpoint) -> None:
    if isinstance(config, RLConfig):
        _check_critic(config, found)
    mine, theirs = dict(flat(asdict(config))), dict(flat(found.state["settings"]))
    differ = [key for key in mine if mine[key] != theirs.get(key)]
    layout = f"{WARM_START}.layout."  # no ranks start for it any more
    known = [key for key in differ if key in theirs]  # others are newer than what wrote it
    refused = [k for k in known if k.split(".")[0] in _THE_SAME and not k.startswith(layout)]
    refused += [k for k in known if k in _THE_SAME_SETTINGS]
    if refused:
        told = "; ".join(f"{key}={mine[key]!r}, there {theirs.get(key)!r}" for key in refused)
        raise ConfigError(f"{found.path} is of another run: {told}; allowed: the same")
    print(f"going on after step {found.step}, from {found.path}")
    others = [f"{k}={mine[k]} (was {theirs.get(k)})" for k in differ if k not in _ITS_OWN]
    if others:
        print(f"settings that differ: {', '.join(others)}")


def check_data(
    found: RunCheckpoint | None, data: AnyData, train: Digested, tests: Iterable[Digested]
) -> dict[str, str]:
    """Return the digest of each source of `data`, by the setting that names it.

    Raises:
        ConfigError: a source has other rows than when the run saved the checkpoint.
    """
    files = train_files(data) | dict(test_files(data).values())
    digests = [*train.digests, *(digest for test in tests for digest in test.digests)]
    by_setting = dict(zip(files, digests, strict=True))
    saved = found.state.get(DATA, {}) if found else {}  # earlier versions saved none
    changed = [s for s, digest in by_setting.items() if saved.get(s, digest) != digest]
    if found and changed:
        sources = ", ".join(f"{setting}={files[setting]!r}" for setting in changed)
        raise ConfigError(
            f"{found.path} is of a run with other rows in {sources}; allowed: the rows that it "
            "was trained on, or a new output_dir with resume=never"
        )
    return by_setting


def flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their whole names."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", list(value) if isinstance(value, tuple) else value
