"""The training checkpoints of a run: whole or not there, damaged ones refused, old ones removed.

checkpoints/step_000012/
    actor/           what the training engine has saved, with a list of its files
    critic/          the same of a value model, if there is one
    state.json       all else that a run goes on from
    state.safetensors  the arrays in it, if there are any
    manifest.json    size and checksum of these, of which state.json has those of the engines' lists
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

from mcore_rl.checkpoint.checkpoint_info import INFO_FILE, check_checkpoint
from mcore_rl.checkpoint.manifest import ReadSums, check_files, manifest_of, sums_read_here
from mcore_rl.checkpoint.raw_file import name_folder, size_and_checksum
from mcore_rl.config.checks import shorten
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.data.batch import Array
from mcore_rl.data.tasks.prepared import prepared

ACTOR, CRITIC = "actor", "critic"
MADE_IN = "made_in"  # in `state`, where it is not the folder of the run itself
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
    """One that has been found whole."""

    path: Path
    step: int
    state: Mapping[str, Any]  # what `publish` was given

    @property
    def run(self) -> Path:
        """The output folder of the run that has written it."""
        return self.path.parents[1]

    def check_fields(self) -> None:
        """Check that `state` has all that a run goes on from, each of its kind.

        Raises:
            ConfigError: a field is missing, or of another kind.
        """
        for name, kind in _FIELDS.items():
            if not isinstance(self.state.get(name), kind):
                found = shorten(self.state[name]) if name in self.state else "missing"
                raise ConfigError(
                    f"{self.path / _STATE}: {name} is {found}; allowed: {_KINDS[kind]}, as a run "
                    "writes it"
                )
        best = self.state.get("best")
        if best and (lacks := sorted({"metric", "step", "value"} - best.keys())):
            raise ConfigError(f"{self.path / _STATE}: best lacks {', '.join(lacks)}")

    @property
    def model(self) -> Path:
        """The Hugging Face folder that the run began with: given, or made before the first step."""
        settings = self.state["settings"]
        if settings.get("warm_start", {}).get("num_steps"):
            return self.made_in / "warm_start"
        if settings.get("task", {}).get("name"):
            return prepared(self.made_in / "task").model_dir
        return Path(settings["model"]["path"])

    @property
    def made_in(self) -> Path:
        """The output folder with what was made before the first step: a task, a warm start."""
        return Path(self.state.get(MADE_IN) or self.run)


def find_run_checkpoint(engine: Path) -> RunCheckpoint | None:
    """Return the training checkpoint with the weights in `engine`, by its state.json alone.

    None where they are of no run.
    """
    if engine.name != ACTOR or not (engine.parent / _MANIFEST).is_file():
        return None
    state = read_json_object(engine.parent / _STATE)
    return RunCheckpoint(engine.parent.absolute(), state["step"], state)


def find_actor(path: Path) -> Path:
    """Return the weights in a training checkpoint, or in the last one of a run; else the path."""
    if not (path / _MANIFEST).is_file() and (steps := steps_in(path / "checkpoints")):
        path = path / "checkpoints" / name_of(steps[-1])
    return path / ACTOR if (path / _MANIFEST).is_file() and (path / ACTOR).is_dir() else path


def read_checkpoint(path: Path, read_sums: ReadSums = sums_read_here) -> RunCheckpoint:
    """Read every file of a training checkpoint; `read_sums` reads those of the engines.

    Raises:
        ConfigError: it is none, or a file is missing, cut short, changed or not of it.
    """
    path = path.absolute()
    if not (path / _MANIFEST).is_file():
        raise ConfigError(f"{path} is no training checkpoint: it has no {_MANIFEST}")
    listed = read_json_object(path / _MANIFEST)
    check_files(path, listed, besides=(_MANIFEST, ACTOR, CRITIC))
    state = read_json_object(path / _STATE)
    _check_step(path, state)
    if (path / _ARRAYS).exists():
        _put_back(state, path / _ARRAYS)
    for engine in (ACTOR, CRITIC):
        if engine in state:
            _check_engine(path / engine, state[engine], read_sums)
        elif (path / engine).exists():
            raise ConfigError(f"{path / engine} does not belong to it")
    return RunCheckpoint(path, state["step"], state)


def _check_step(path: Path, state: Mapping[str, Any]) -> None:
    """Check that the state is of the step that its folder is named by."""
    step, named = state.get("step"), _NAME.fullmatch(path.name)
    expected = int(named[1]) if named else step
    if type(step) is not int or step != expected or step < 0:
        raise ConfigError(
            f"{path / _STATE}: step is {shorten(step)}; allowed: "
            f"{expected if named else 'a whole number'}, as its folder is called"
        )


def _check_engine(folder: Path, sums: Sequence[object], read_sums: ReadSums) -> None:
    info = folder / INFO_FILE
    if not info.is_file():
        raise ConfigError(f"{info} is missing")
    if list(size_and_checksum(info)) != sums:
        raise ConfigError(f"{info} is damaged: its checksum differs")
    check_checkpoint(folder, read_sums)


def newest_checkpoint(
    folder: Path, warn: Callable[[str], None], read_sums: ReadSums = sums_read_here
) -> RunCheckpoint | None:
    """The newest whole one; `warn` is told of each that is refused. None where there is none.

    Raises:
        ConfigError: all are damaged.
    """
    refused = []
    for step in reversed(steps_in(folder)):
        try:
            return read_checkpoint(folder / name_of(step), read_sums)
        except ConfigError as error:
            warn(f"{folder / name_of(step)} is left out: {error}")
            refused.append(str(error))
    if refused:
        raise ConfigError(f"no training checkpoint in {folder} is whole: {refused[0]}")
    return None


def name_of(step: int) -> str:
    return f"step_{step:06d}"


def steps_in(folder: Path) -> list[int]:
    """Of the checkpoints in a folder, whole or not, in order."""
    names = [_NAME.fullmatch(entry.name) for entry in folder.glob("step_*")]
    return sorted(int(name[1]) for name in names if name)


def _without_arrays(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Array]]:
    """The same without its arrays, and these by their place in it: a JSON list of keys."""
    rest: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for key, value in state.items():
        if isinstance(value, np.ndarray):
            arrays[json.dumps([key])] = np.ascontiguousarray(value)
        elif isinstance(value, Mapping):
            rest[key], inside = _without_arrays(value)
            arrays |= {json.dumps([key, *json.loads(place)]): a for place, a in inside.items()}
        else:
            rest[key] = value
    return rest, arrays


def _put_back(state: dict[str, Any], file: Path) -> None:
    try:
        for place, array in safetensors.numpy.load(file.read_bytes()).items():
            *path, name = json.loads(place)
            functools.reduce(dict.__getitem__, path, state)[name] = array
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} does not fit {_STATE}: {error}") from error


class RunCheckpoints:
    """The folder that a run writes its checkpoints into. Every method may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, step: int) -> Path:
        """A new folder, aside, that training engines save into as `ACTOR` and `CRITIC`."""
        aside = self._aside(step)
        shutil.rmtree(aside, ignore_errors=True)  # what a killed run left
        aside.mkdir(parents=True)
        return aside

    def publish(self, step: int, state: Mapping[str, Any]) -> Path:
        """The engines have saved: with `state` the checkpoint is whole, and gets its name.

        `state` is what JSON can hold, and arrays of numbers. One of the same step that was there
        is replaced.
        """
        aside, path = self._aside(step), self.folder / name_of(step)
        saved = [engine for engine in (ACTOR, CRITIC) if (aside / engine).exists()]
        sums = {engine: size_and_checksum(aside / engine / INFO_FILE) for engine in saved}
        rest, arrays = _without_arrays(state)
        (aside / _STATE).write_text(json.dumps({"step": step, **rest, **sums}, indent=1))
        files = [aside / _STATE]
        if arrays:
            files.append(aside / _ARRAYS)
            files[1].write_bytes(safetensors.numpy.save(arrays))
        (aside / _MANIFEST).write_text(json.dumps(manifest_of(files)))
        old = self._moved_aside(step) if path.exists() else None
        name_folder(aside, path, [*files, aside / _MANIFEST])
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        return path

    def discard(self, step: int) -> None:
        """What `begin` has made, where it cannot become a checkpoint."""
        shutil.rmtree(self._aside(step), ignore_errors=True)

    def prune(self, step: int, keep: int, besides: Collection[int] = ()) -> None:
        """Remove all but the last `keep` up to this step, and but those of the steps `besides`.

        Later ones are damaged: a run has gone on from before them.
        """
        for old in [s for s in steps_in(self.folder) if s <= step][:-keep]:
            if old not in besides:
                shutil.rmtree(self._moved_aside(old))

    def _moved_aside(self, step: int) -> Path:
        """What is removed is never half there under its name."""
        path = self.folder / name_of(step)
        aside = path.with_name(f".{path.name}.old.partial")
        shutil.rmtree(aside, ignore_errors=True)
        return path.rename(aside)

    def _aside(self, step: int) -> Path:
        return self.folder / f".{name_of(step)}.partial"
