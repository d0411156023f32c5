"""Training checkpoints of a run: published when complete, verified when read, pruned.

checkpoints/step_000012/
    actor/             checkpoint of the training engine, with a manifest
    critic/            checkpoint of the value model, if any
    state.json         state of the run, and checksums of the manifests of actor and critic
    state.safetensors  arrays of the state, if any
    manifest.json      size and checksum of state.json and state.safetensors
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from mcore_rl.checkpoint.files import (
    INFO_FILE,
    ComputeChecksums,
    build_manifest,
    check_checkpoint,
    check_files,
    compute_checksum,
    compute_checksums,
    publish_folder,
)
from mcore_rl.config.atomic_file import create_folder
from mcore_rl.config.checks import shorten
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.data.batch import Array
from mcore_rl.data.prepared_task import get_task_paths

ACTOR, CRITIC = "actor", "critic"
MADE_IN = "made_in"  # in `state`, unless it is the folder of the run
_STATE, _ARRAYS, _MANIFEST = "state.json", "state.safetensors", "manifest.json"
_FIELDS: dict[str, Any] = {
    "weight_version": int,
    "settings": dict,
    "results": dict,
    "parts": dict,
    "best": dict | None,
}
_KINDS = {int: "a whole number", dict: "an object", dict | None: "an object or null"}
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A complete training checkpoint."""

    path: Path
    step: int
    state: Mapping[str, Any]  # see RunCheckpoints.publish

    @property
    def run(self) -> Path:
        """Output folder of the run that wrote it."""
        return self.path.parents[1]

    def check_fields(self) -> None:
        """Check that `state` has all fields that resuming needs.

        Raises:
            ConfigError: A field is missing or has another type.
        """
        for name, kind in _FIELDS.items():
            if not isinstance(self.state.get(name), kind):
                value = shorten(self.state[name]) if name in self.state else "missing"
                raise ConfigError(
                    f"{self.path / _STATE}: {name} is {value}; allowed: {_KINDS[kind]}, as a run "
                    "writes it"
                )
        best = self.state.get("best")
        if best and (missing := sorted({"metric", "step", "value"} - best.keys())):
            raise ConfigError(f"{self.path / _STATE}: best lacks {', '.join(missing)}")

    @property
    def model(self) -> Path:
        """Hugging Face folder of the initial model: given, or created before the first step."""
        settings = self.state["settings"]
        if settings.get("warm_start", {}).get("num_steps"):
            return self.made_in / "warm_start"
        if settings.get("task", {}).get("name"):
            return get_task_paths(self.made_in / "task").model_dir
        return Path(settings["model"]["path"])

    @property
    def made_in(self) -> Path:
        """Output folder with the files created before the first step: task, warm start."""
        return Path(self.state.get(MADE_IN) or self.run)


def find_run_checkpoint(engine: Path) -> RunCheckpoint | None:
    """Return the training checkpoint that contains the engine's folder, or None.

    Only its state.json is read.
    """
    if engine.name != ACTOR or not (engine.parent / _MANIFEST).is_file():
        return None
    state = read_json_object(engine.parent / _STATE)
    return RunCheckpoint(engine.parent.absolute(), state["step"], state)


def find_actor(path: Path) -> Path:
    """Return the actor's folder of a training checkpoint, or a run's last one; else the path."""
    if not (path / _MANIFEST).is_file() and (steps := list_steps(path / "checkpoints")):
        path = path / "checkpoints" / format_name(steps[-1])
    return path / ACTOR if (path / _MANIFEST).is_file() and (path / ACTOR).is_dir() else path


def read_checkpoint(
    path: Path, compute_sums: ComputeChecksums = compute_checksums
) -> RunCheckpoint:
    """Read a training checkpoint and verify all of its files.

    Args:
        compute_sums: Computes the checksums of the engines' files.

    Raises:
        ConfigError: It is no training checkpoint, or a file is missing, truncated, changed or
            unexpected.
    """
    path = path.absolute()
    if not (path / _MANIFEST).is_file():
        raise ConfigError(f"{path} is no training checkpoint: it has no {_MANIFEST}")
    listed = read_json_object(path / _MANIFEST)
    check_files(path, listed, ignored=(_MANIFEST, ACTOR, CRITIC))
    state = read_json_object(path / _STATE)
    _check_step(path, state)
    if (path / _ARRAYS).exists():
        _restore_arrays(state, path / _ARRAYS)
    for engine in (ACTOR, CRITIC):
        if engine in state:
            _check_engine(path / engine, state[engine], compute_sums)
        elif (path / engine).exists():
            raise ConfigError(f"{path / engine} does not belong to it")
    return RunCheckpoint(path, state["step"], state)


def _check_step(path: Path, state: Mapping[str, Any]) -> None:
    """Check that state and folder name have the same step."""
    step, named = state.get("step"), _NAME.fullmatch(path.name)
    expected = int(named[1]) if named else step
    if type(step) is not int or step != expected or step < 0:
        raise ConfigError(
            f"{path / _STATE}: step is {shorten(step)}; allowed: "
            f"{expected if named else 'a whole number'}, as its folder is called"
        )


def _check_engine(folder: Path, sums: Sequence[object], compute_sums: ComputeChecksums) -> None:
    """Check an engine's folder by its manifest, and the manifest by its checksum in the state."""
    info = folder / INFO_FILE
    if not info.is_file():
        raise ConfigError(f"{info} is missing")
    if list(compute_checksum(info)) != sums:
        raise ConfigError(f"{info} is damaged: its checksum differs")
    check_checkpoint(folder, compute_sums)


def find_newest_checkpoint(
    folder: Path, warn: Callable[[str], None], compute_sums: ComputeChecksums = compute_checksums
) -> RunCheckpoint | None:
    """Return the newest complete checkpoint, or None; call `warn` with each damaged one.

    Raises:
        ConfigError: All are damaged.
    """
    refused = []
    for step in reversed(list_steps(folder)):
        try:
            return read_checkpoint(folder / format_name(step), compute_sums)
        except ConfigError as error:
            warn(f"{folder / format_name(step)} is left out: {error}")
            refused.append(str(error))
    if refused:
        raise ConfigError(f"no training checkpoint in {folder} is whole: {refused[0]}")
    return None


def format_name(step: int) -> str:
    """Return the folder name of a step."""
    return f"step_{step:06d}"


def list_steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in a folder, complete or not, in order."""
    names = [_NAME.fullmatch(entry.name) for entry in folder.glob("step_*")]
    return sorted(int(name[1]) for name in names if name)


def _split_arrays(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Split arrays off a state.

    Returns:
        The state without arrays, and the arrays by their path in it, a JSON list of keys.
    """
    rest: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for key, value in state.items():
        if isinstance(value, np.ndarray):
            arrays[json.dumps([key])] = np.ascontiguousarray(value)
        elif isinstance(value, Mapping):
            rest[key], inner = _split_arrays(value)
            arrays |= {json.dumps([key, *json.loads(path)]): a for path, a in inner.items()}
        else:
            rest[key] = value
    return rest, arrays


def _restore_arrays(state: dict[str, Any], file: Path) -> None:
    """Put the arrays that `_split_arrays` took out back into the state."""
    try:
        for path, array in safetensors.numpy.load(file.read_bytes()).items():
            *parents, name = json.loads(path)
            functools.reduce(dict.__getitem__, parents, state)[name] = array
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} does not fit {_STATE}: {error}") from error


class RunCheckpoints:
    """The folder of a run's training checkpoints. Every method may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, step: int) -> Path:
        """Create a temporary folder; engines save into `ACTOR` and `CRITIC` in it."""
        partial_path = self._get_temporary(step)
        create_folder(partial_path)
        return partial_path

    def publish(self, step: int, state: Mapping[str, Any]) -> Path:
        """Complete a checkpoint that the engines have saved into, and rename it.

        An existing checkpoint of the step is replaced.

        Args:
            state: Values that JSON supports, and NumPy arrays.
        """
        partial_path, path = self._get_temporary(step), self.folder / format_name(step)
        saved = [engine for engine in (ACTOR, CRITIC) if (partial_path / engine).exists()]
        sums = {engine: compute_checksum(partial_path / engine / INFO_FILE) for engine in saved}
        rest, arrays = _split_arrays(state)
        (partial_path / _STATE).write_text(json.dumps({"step": step, **rest, **sums}, indent=1))
        files = [partial_path / _STATE]
        if arrays:
            files.append(partial_path / _ARRAYS)
            files[1].write_bytes(safetensors.numpy.save(arrays))
        (partial_path / _MANIFEST).write_text(json.dumps(build_manifest(files)))
        old = self._move_aside(step) if path.exists() else None
        publish_folder(partial_path, path, [*files, partial_path / _MANIFEST])
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        return path

    def discard(self, step: int) -> None:
        """Remove the folder of `begin` after a failure."""
        shutil.rmtree(self._get_temporary(step), ignore_errors=True)

    def prune(self, step: int, keep: int, besides: Collection[int] = ()) -> None:
        """Remove checkpoints up to `step`, except the last `keep` and those of the steps `besides`.

        Later checkpoints are damaged, since the run has resumed before them.
        """
        for old in [s for s in list_steps(self.folder) if s <= step][:-keep]:
            if old not in besides:
                shutil.rmtree(self._move_aside(old))

    def _move_aside(self, step: int) -> Path:
        """Rename a checkpoint before it is removed, so that no partial one has its name."""
        path = self.folder / format_name(step)
        partial_path = path.with_name(f".{path.name}.old.partial")
        shutil.rmtree(partial_path, ignore_errors=True)
        return path.rename(partial_path)

    def _get_temporary(self, step: int) -> Path:
        return self.folder / f".{format_name(step)}.partial"
