"""Saves of a run and what is kept, with an actor that writes a few bytes for its engine."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.checkpoint.files import build_manifest, write_checkpoint_info
from mcore_rl.checkpoint.run_checkpoints import find_newest_checkpoint, list_steps, read_checkpoint
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import CheckpointConfig, RLConfig, TrainerConfig
from mcore_rl.controller.process_cleanup import RunStopped, StopSignals
from mcore_rl.trainers.checkpointing import CheckpointManager, NotSavedError
from tests.fakes import LocalGroup


class Actor(LocalGroup):
    """A worker group of one rank. In the background it writes when `finish_save` comes."""

    def __init__(self):
        self.is_full, self.pending, self.loaded, self.exports = False, None, "", []

    def save_checkpoint(self, path, *, in_background):
        if in_background:
            assert self.pending is None
            self.pending = path
            return [""]
        return [self._write(path)]

    def is_saved(self):
        return [self.pending is None]

    def finish_save(self):
        path, self.pending = self.pending, None
        return [self._write(path) if path else ""]

    def export(self, path, num_bytes):
        assert not Path(path).exists()
        self.exports.append(Path(path).name)
        return ["No space left on device: x" if self.is_full else ""]

    def load_checkpoint(self, path):
        self.loaded = path

    def _write(self, path):
        if self.is_full:
            return f"{path} cannot be written: No space left on device"
        Path(path).mkdir()
        (Path(path) / "data").write_text(path)
        write_checkpoint_info(Path(path), {}, build_manifest([Path(path) / "data"]))
        return ""


class Devices:
    """Records which role uses the devices, in the order of calls."""

    def __init__(self):
        self.actor, self.critic, self.calls = Actor(), None, []

    def use(self, role):
        self.calls.append(role)

    def offload_rollout(self):
        self.calls.append("offload rollout")

    def update_weights(self, version):
        self.calls.append(version)


class Prompts:
    def __init__(self):
        self.drawn = 0

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


class Run:
    """A trainer's loop."""

    def __init__(self, folder: Path, num_steps=6, save_every=2, **checkpoint):
        self.config = RLConfig(
            trainer=TrainerConfig(num_steps=num_steps, save_every=save_every),
            checkpoint=CheckpointConfig(**checkpoint),
            output_dir=str(folder),
        )
        self.folder = folder / "checkpoints"
        self.devices, self.prompts, self.stop = Devices(), Prompts(), StopSignals()
        self.checkpoints = CheckpointManager(
            self.config, folder, self.devices, {"prompts": self.prompts}, dict, self.stop, 0,
            {"data.train_file": "5f"},
        )  # fmt: skip

    def steps(self, numbers, metrics=lambda step: {}):
        for step in numbers:
            self.prompts.drawn += 1
            if self.checkpoints.is_due(step):
                self.checkpoints.save(step)
            self.checkpoints.finish_step(step, metrics(step))


@pytest.mark.parametrize("in_background", [False, True])
def test_the_last_steps_stay_and_one_after_the_last_step(tmp_path, in_background):
    run = Run(tmp_path, num_steps=7, keep=2, async_save=in_background)
    run.steps(range(1, 8))
    assert list_steps(run.folder) == [6, 7]
    assert sorted(p.name for p in run.folder.iterdir()) == ["step_000006", "step_000007"]


def test_what_is_saved_in_the_background_gets_its_name_when_it_is_written(tmp_path):
    run = Run(tmp_path, async_save=True)
    run.steps([1, 2, 3])
    assert list_steps(run.folder) == []
    run.steps([4])  # waits for the one under way
    assert list_steps(run.folder) == [2]
    assert read_checkpoint(run.folder / "step_000002").state["parts"] == {"prompts": {"drawn": 2}}


def test_a_checkpoint_without_a_part_of_the_run_is_refused_before_anything_is_loaded(tmp_path):
    before = Run(tmp_path)
    before.steps([1, 2])
    after = Run(tmp_path / "after")
    parts = {"prompts": after.prompts, "coefficients": Prompts()}
    resumed = CheckpointManager(after.config, tmp_path, after.devices, parts, dict, after.stop, 0)
    path = before.folder / "step_000002"
    with pytest.raises(
        ConfigError, match=f"{path} has no state of coefficients, .*new run"
    ) as raised:
        resumed.restore(read_checkpoint(path))
    assert "\n" not in str(raised.value)
    assert (after.devices.calls, after.devices.actor.loaded) == ([], "")


@pytest.mark.parametrize("state", [{}, [], None, 7, {"drawn": {}}], ids=repr)
def test_a_part_that_cannot_take_its_state_is_named(tmp_path, state):
    class Drawn(Prompts):
        def load_state_dict(self, state):
            self.drawn = 1 + state["drawn"]

    run = Run(tmp_path)
    run.steps([1, 2])
    checkpoint = read_checkpoint(run.folder / "step_000002")
    damaged = replace(checkpoint, state={**checkpoint.state, "parts": {"prompts": state}})
    parts = {"prompts": Drawn()}
    resumed = CheckpointManager(run.config, tmp_path, run.devices, parts, dict, run.stop, 0)
    message = (
        f"^{checkpoint.path}: the state of prompts is not what this version writes: (Key|Type)Error"
    )
    with pytest.raises(ConfigError, match=message):
        resumed.restore(damaged)


def test_a_run_without_checkpoints_has_none(tmp_path):
    run = Run(tmp_path, save_every=0)
    run.steps(range(1, 7))
    assert not run.folder.exists()


@pytest.mark.parametrize(("name", "best"), [("reward", 4), ("-reward", 2)])
def test_the_best_stays_beside_the_last(tmp_path, name, best):
    rewards = {2: 0.25, 4: 0.75, 6: 0.5, 8: 0.75, 10: 0.5}
    run = Run(tmp_path, num_steps=10, keep=1, keep_best=name)
    run.steps(range(1, 11), lambda step: {"reward": rewards.get(step, 9.0 * step)})
    assert list_steps(run.folder) == [best, 10]
    newest = read_checkpoint(run.folder / "step_000010")
    assert newest.state["best"] == {"metric": name, "step": best, "value": rewards[best]}
    again = Run(tmp_path, num_steps=12, keep=1, keep_best=name)
    again.checkpoints.restore(newest)
    again.steps([11, 12], lambda step: {"reward": 0.5})
    assert list_steps(run.folder) == [best, 12]


@pytest.mark.parametrize(
    ("metric", "best", "reason"),
    [
        (
            "-reward",
            8,
            "; only steps after 6 are compared",
        ),  # the same numbers, of which the lowest
        ("accuracy", 12, "; only steps after 6 are compared"),
        ("", None, ""),
    ],
)
def test_a_run_that_goes_on_with_another_metric_starts_over_with_its_best_and_says_so(
    tmp_path, capsys, metric, best, reason
):
    """0.1 is the lowest reward of all, of step 2, and 0.9 of step 4 the highest."""
    rewards = {2: 0.1, 4: 0.9, 6: 0.5, 8: 0.3, 10: 0.4, 12: 0.4}

    def metrics(step):
        return {"reward": rewards.get(step, 0.0), "accuracy": step / 100}

    run = Run(tmp_path, keep=1, keep_best="reward")
    run.steps(range(1, 7), metrics)
    assert list_steps(run.folder) == [4, 6]
    again = Run(tmp_path, num_steps=12, keep=1, keep_best=metric)
    again.checkpoints.restore(read_checkpoint(run.folder / "step_000006"))
    assert capsys.readouterr().err == (
        f"mcore-rl: warning: checkpoint.keep_best={metric!r} (was 'reward'): step_000004, the best "
        f"so far, is no longer kept as the best{reason}\n"
    )
    again.steps(range(7, 13), metrics)
    assert list_steps(run.folder) == sorted({best or 12, 12})
    record = read_checkpoint(run.folder / "step_000012").state["best"]
    assert (record and (record["metric"], record["step"])) == (best and (metric, best))


def test_what_is_no_number_is_never_the_best(tmp_path, capsys):
    run = Run(tmp_path, num_steps=6, keep=1, keep_best="reward")
    rewards = {2: 0.5, 4: float("nan"), 6: 0.25}
    run.steps(range(1, 7), lambda step: {"reward": rewards.get(step, 0.0)})
    assert list_steps(run.folder) == [2, 6]
    assert "no such metric in step 4; it is nan" in capsys.readouterr().err


def test_an_unknown_metric_is_reported_with_those_that_there_are(tmp_path, capsys):
    run = Run(tmp_path, keep_best="rewards")
    run.steps([1, 2], lambda step: {"reward": 1.0})
    assert "checkpoint.keep_best='rewards': no such metric in step 2; it has reward" in (
        capsys.readouterr().err
    )
    assert list_steps(run.folder) == [2]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run_nor_the_one_before(
    tmp_path, capsys, in_background
):
    run = Run(tmp_path, keep=1, async_save=in_background)
    run.steps([1, 2, 3])
    run.checkpoints._finish()
    run.devices.actor.is_full = True
    run.steps([4, 5])
    run.checkpoints._finish()
    assert [path.name for path in run.folder.iterdir()] == ["step_000002"]
    message = capsys.readouterr().err
    assert message.startswith("mcore-rl: warning: step 4: no checkpoint: ")
    assert message.endswith("that of step 2 stays, and the run goes on\n")
    run.devices.actor.is_full = False
    run.steps([6])
    assert list_steps(run.folder) == [6]


def test_a_disk_that_takes_the_weights_and_not_the_rest_costs_the_checkpoint(
    tmp_path, capsys, monkeypatch
):
    run = Run(tmp_path)
    run.steps([1, 2])
    write = Path.write_text

    def full(path, text, *args):
        if path.name == "manifest.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text, *args)

    monkeypatch.setattr(Path, "write_text", full)
    run.steps([3, 4])
    assert [path.name for path in run.folder.iterdir()] == ["step_000002"]
    assert "step 4: no checkpoint: [Errno 28]" in capsys.readouterr().err


def test_a_run_goes_on_with_its_weights_version_parts_and_step(tmp_path):
    run = Run(tmp_path)
    run.steps([1, 2, 3, 4, 5])
    checkpoint = find_newest_checkpoint(run.folder, pytest.fail)
    again = Run(tmp_path)
    again.checkpoints.restore(checkpoint)
    assert again.devices.actor.loaded == str(run.folder / "step_000004" / "actor")
    assert again.devices.calls == ["offload rollout", "actor", 4]
    assert (again.prompts.drawn, again.checkpoints.next_step) == (4, 5)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_critic_is_saved_and_goes_on_with_the_actor(tmp_path, in_background):
    run, again = (Run(tmp_path, async_save=in_background) for _ in range(2))
    run.devices.critic, again.devices.critic = Actor(), Actor()
    run.steps(range(1, 7))
    again.checkpoints.restore(find_newest_checkpoint(run.folder, pytest.fail))
    assert again.devices.critic.loaded == str(run.folder / "step_000006" / "critic")
    assert again.devices.calls == ["offload rollout", "actor", "critic", 6]


def test_a_critic_that_the_disk_does_not_take_costs_the_checkpoint(tmp_path, capsys):
    run = Run(tmp_path)
    run.devices.critic = Actor()
    run.steps([1, 2])
    run.devices.critic.is_full = True
    run.steps([3, 4])
    assert list_steps(run.folder) == [2]
    assert "step 4: no checkpoint: " in capsys.readouterr().err
    assert not list(run.folder.glob(".step_000004*"))


@pytest.mark.parametrize("in_background", [False, True])
def test_a_signal_in_a_step_saves_it_also_where_the_actor_has_left_its_devices(
    tmp_path, in_background
):
    run = Run(tmp_path, num_steps=9, save_every=5, async_save=in_background)
    run.steps([1, 2])
    message = r"SIGUSR1: step 3 is saved; to go on: .* resume=auto output_dir="
    with pytest.raises(RunStopped, match=message), run.stop.defer_to_step_end():
        run.stop.receive(10)  # before the step is over, and after `is_due`
        run.checkpoints.finish_step(3, {})
    assert list_steps(run.folder) == [3]
    assert run.devices.calls == ["offload rollout", "actor"]


def test_a_signal_before_the_weights_leave_saves_once(tmp_path):
    run = Run(tmp_path, num_steps=9, save_every=5)
    with pytest.raises(RunStopped, match="is saved"), run.stop.defer_to_step_end():
        run.stop.receive(15)
        run.steps([1])
    assert list_steps(run.folder) == [1]
    assert run.devices.calls == ["actor"]


def test_a_signal_while_a_step_is_being_closed_is_for_the_next(tmp_path):
    run = Run(tmp_path, num_steps=9, save_every=2, async_save=True)
    run.steps([1, 2])

    def is_saved():
        run.stop.requested = "SIGTERM"
        return [False]

    run.devices.actor.is_saved = is_saved
    run.steps([3])
    with pytest.raises(RunStopped, match="SIGTERM: step 4 is saved"):
        run.steps([4])
    assert list_steps(run.folder) == [2, 4]


def test_a_run_that_has_to_end_and_cannot_be_saved_says_so(tmp_path):
    run = Run(tmp_path)
    run.devices.actor.is_full = True
    message = "SIGTERM: step 1 could not be saved"
    with pytest.raises(NotSavedError, match=message), run.stop.defer_to_step_end():
        run.stop.receive(15)
        run.steps([1])


def test_exports_come_every_so_many_steps_and_replace_those_of_a_step_that_is_repeated(
    tmp_path, capsys
):
    run = Run(tmp_path, save_every=0, hf_every=2)
    (tmp_path / "hf" / "step_000002").mkdir(parents=True)
    run.steps([1, 2, 3, 4])
    assert run.devices.actor.exports == ["step_000002", "step_000004"]
    run.devices.actor.is_full = True
    run.steps([5, 6])
    assert "step 6: no export to " in capsys.readouterr().err


def test_what_a_checkpoint_says_of_its_run_is_json(tmp_path):
    run = Run(tmp_path)
    run.steps([1, 2])
    state = json.loads((run.folder / "step_000002" / "state.json").read_text())
    assert (state["step"], state["weight_version"], state["best"]) == (2, 2, None)
    assert state["settings"]["trainer"]["num_steps"] == 6
    assert state["data"] == {"data.train_file": "5f"}
