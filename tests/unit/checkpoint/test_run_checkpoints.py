"""A training checkpoint is whole or refused, by the name of the file that is wrong."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from mcore_rl.checkpoint.files import build_manifest, write_checkpoint_info
from mcore_rl.checkpoint.run_checkpoints import (
    ACTOR,
    CRITIC,
    RunCheckpoints,
    find_newest_checkpoint,
    list_steps,
    read_checkpoint,
)
from mcore_rl.config.errors import ConfigError


def save_checkpoint(checkpoints: RunCheckpoints, step: int) -> Path:
    """Publish a checkpoint with random bytes for the engine's files."""
    engine = checkpoints.begin(step) / ACTOR
    engine.mkdir()
    (engine / "__0_0.distcp").write_bytes(os.urandom(5000))
    (engine / ".metadata").write_bytes(os.urandom(100))
    write_checkpoint_info(engine, {"dtype": "float32"}, build_manifest(engine.iterdir()))
    return checkpoints.publish(step, {"weight_version": step})


@pytest.fixture
def checkpoints(tmp_path: Path) -> RunCheckpoints:
    return RunCheckpoints(tmp_path / "checkpoints")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def swap_digits(file: Path) -> None:
    """Change a digit, so that the text can still be parsed."""
    data = file.read_text()
    index = max(index for index, letter in enumerate(data) if letter.isdigit())
    file.write_text(data[:index] + str((int(data[index]) + 1) % 10) + data[index + 1 :])


DATA, STATE = f"{ACTOR}/__0_0.distcp", "state.json"
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "data cut": (DATA, lambda file: os.truncate(file, 4999), "has 4999 bytes instead of 5000"),
    "data flipped": (DATA, flip, "is damaged: its checksum differs"),
    "data missing": (DATA, Path.unlink, "is missing"),
    "metadata missing": (f"{ACTOR}/.metadata", Path.unlink, "is missing"),
    "foreign in the engine's": (f"{ACTOR}/__1_0.distcp", Path.touch, "does not belong to it"),
    "foreign": ("notes.txt", Path.touch, "does not belong to it"),
    "state cut": (STATE, lambda file: os.truncate(file, 9), "has 9 bytes instead of"),
    "state flipped": (STATE, flip, "is damaged"),
    "state missing": (STATE, Path.unlink, "is missing"),
    "info changed": (f"{ACTOR}/mcore_rl.json", swap_digits, "is damaged"),
    "state is a folder": (
        STATE,
        lambda file: (file.unlink(), file.mkdir()),
        "cannot be read|bytes",
    ),
    "info missing": (f"{ACTOR}/mcore_rl.json", Path.unlink, "is missing"),
    "manifest changed": ("manifest.json", swap_digits, "is damaged"),
    "manifest cut": ("manifest.json", lambda file: os.truncate(file, 5), "is not valid JSON"),
    "manifest missing": ("manifest.json", Path.unlink, "has no manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_used(checkpoints, damage):
    name, harm, message = DAMAGES[damage]
    save_checkpoint(checkpoints, 3)
    path = save_checkpoint(checkpoints, 12)
    assert read_checkpoint(path).state["weight_version"] == 12
    harm(path / name)
    with pytest.raises(ConfigError, match=message) as raised:
        read_checkpoint(path)
    wrong = path / (STATE if name == "manifest.json" and message == "is damaged" else name)
    assert str(wrong) in str(raised.value) or message == "has no manifest.json"
    warnings: list[str] = []
    newest = find_newest_checkpoint(checkpoints.folder, warnings.append)
    assert newest is not None
    assert (newest.step, newest.state["weight_version"]) == (3, 3)
    assert warnings == [f"{path} is left out: {raised.value}"]


def test_where_all_are_damaged_nothing_begins_anew(checkpoints):
    path = save_checkpoint(checkpoints, 3)
    flip(path / DATA)
    with pytest.raises(ConfigError, match=r"no training checkpoint in .* is whole: .*distcp"):
        find_newest_checkpoint(checkpoints.folder, lambda warning: None)


def test_without_any_there_is_none(checkpoints):
    assert find_newest_checkpoint(checkpoints.folder, pytest.fail) is None
    checkpoints.begin(3)
    assert find_newest_checkpoint(checkpoints.folder, pytest.fail) is None


def test_a_list_that_names_files_elsewhere_is_refused(checkpoints, tmp_path):
    path = save_checkpoint(checkpoints, 3)
    (path / "manifest.json").write_text(json.dumps({"../../secret": [0, 0]}))
    with pytest.raises(ConfigError, match="names one elsewhere"):
        read_checkpoint(path)


def test_the_last_ones_stay_and_the_best(checkpoints):
    for step in (1, 2, 3, 1_000_000):
        save_checkpoint(checkpoints, step)
    checkpoints.prune(1_000_000, 2, besides=[1])
    assert list_steps(checkpoints.folder) == [1, 3, 1_000_000]
    checkpoints.prune(1_000_000, 1)
    assert list_steps(checkpoints.folder) == [1_000_000]
    assert [entry.name for entry in checkpoints.folder.iterdir()] == ["step_1000000"]


def test_later_ones_are_damaged_and_do_not_count(checkpoints):
    for step in (5, 10, 15, 20):
        save_checkpoint(checkpoints, step)
    checkpoints.prune(15, 1, besides=[10])
    assert list_steps(checkpoints.folder) == [10, 15, 20]


def test_one_of_the_same_step_is_replaced(checkpoints):
    path = save_checkpoint(checkpoints, 2)
    before = (path / DATA).read_bytes()
    flip(path / DATA)
    save_checkpoint(checkpoints, 2)
    assert read_checkpoint(path).step == 2
    assert (path / DATA).read_bytes() != before
    assert [entry.name for entry in checkpoints.folder.iterdir()] == ["step_000002"]


def test_what_cannot_become_a_checkpoint_leaves_nothing(checkpoints):
    checkpoints.begin(2)
    checkpoints.discard(2)
    assert list(checkpoints.folder.iterdir()) == []


def test_a_critic_is_checked_as_the_actor_is(checkpoints):
    partial_path = checkpoints.begin(2)
    for engine in (ACTOR, CRITIC):
        (partial_path / engine).mkdir()
        (partial_path / engine / ".metadata").write_bytes(os.urandom(100))
        write_checkpoint_info(
            partial_path / engine, {}, build_manifest((partial_path / engine).iterdir())
        )
    path = checkpoints.publish(2, {})
    assert read_checkpoint(path).step == 2
    flip(path / CRITIC / ".metadata")
    with pytest.raises(ConfigError, match=r"critic/.metadata is damaged"):
        read_checkpoint(path)


def test_a_critic_that_a_checkpoint_was_not_written_with_is_foreign(checkpoints):
    path = save_checkpoint(checkpoints, 2)
    (path / CRITIC).mkdir()
    with pytest.raises(ConfigError, match=r"critic does not belong to it"):
        read_checkpoint(path)


def with_arrays(checkpoints: RunCheckpoints) -> Path:
    engine = checkpoints.begin(3) / ACTOR
    engine.mkdir()
    write_checkpoint_info(engine, {}, {})
    samples = {"reward/a.b": np.arange(6).reshape(2, 3).T, "none": np.zeros((0, 2), np.float32)}
    return checkpoints.publish(3, {"parts": {"replay": {"samples": samples, "seed": 1}}, "n": 2})


def test_arrays_of_a_state_come_back_where_they_were(checkpoints):
    path = with_arrays(checkpoints)
    parts = read_checkpoint(path).state["parts"]["replay"]
    assert parts["seed"] == 1 and "reward" not in (path / "state.json").read_text()
    assert parts["samples"]["reward/a.b"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert parts["samples"]["none"].shape == (0, 2)
    assert parts["samples"]["none"].dtype == np.float32


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_arrays_of_a_state_that_are_damaged_are_refused(checkpoints, damage):
    path = with_arrays(checkpoints)
    damage(path / "state.safetensors")
    with pytest.raises(ConfigError, match=r"state\.safetensors is (damaged|missing)"):
        read_checkpoint(path)


def test_arrays_that_do_not_fit_the_state_are_refused(checkpoints):
    path = with_arrays(checkpoints)
    file = path / "state.safetensors"
    file.write_bytes(safetensors.numpy.save({'["other", "x"]': np.ones(2)}))
    (path / "manifest.json").write_text(json.dumps(build_manifest([path / "state.json", file])))
    with pytest.raises(ConfigError, match=r"state\.safetensors does not fit state\.json"):
        read_checkpoint(path)


def record_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the names of synced and of renamed files."""
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noted(fd: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        sync(fd)

    def renamed(path: Path, target: Path) -> Path:
        events.append(f"-> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    return events


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(checkpoints, monkeypatch):
    events = record_syncs(monkeypatch)
    with_arrays(checkpoints)
    name = "step_000003"
    position = events.index(f"-> {name}")
    before, [after] = events[:position], events[position + 1 :]
    assert before[-1] == f".{name}.partial" and after == checkpoints.folder.name
    assert {"state.json", "state.safetensors", "manifest.json"} == {*before[:-1]}


@pytest.mark.parametrize("step", [5, -3, "3", True, 3.0, None, 10**30])
def test_a_step_that_is_not_that_of_its_folder_is_refused(checkpoints: RunCheckpoints, step):
    path = save_checkpoint(checkpoints, 3)
    state = json.loads((path / STATE).read_text()) | {"step": step}
    (path / STATE).write_text(json.dumps(state))
    (path / "manifest.json").write_text(json.dumps(build_manifest([path / STATE])))
    message = f"{path}/state.json: step is {step!r}; allowed: 3, as its folder is called"
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_checkpoint(path)


def test_a_folder_of_another_name_may_have_any_step(checkpoints: RunCheckpoints):
    path = save_checkpoint(checkpoints, 3)
    assert read_checkpoint(path.rename(path.with_name("best"))).step == 3
