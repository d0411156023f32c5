"""Training checkpoints of a run: when one is due, what is in it, and how a run resumes."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from mcore_rl.checkpoint.run_checkpoints import (
    ACTOR,
    CRITIC,
    MADE_IN,
    RunCheckpoint,
    RunCheckpoints,
    format_name,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig, TrainConfig
from mcore_rl.controller.dispatch import RankGroup
from mcore_rl.controller.process_cleanup import RunStopped, StopSignals, catch_stop_signals
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.observability.warnings import warn
from mcore_rl.trainers.device_sharing import DeviceSharing, ExclusiveDevices

CHECKPOINTS, HF = "checkpoints", "hf"  # folders in output_dir
DATA = "data"  # in the state of a checkpoint: the digest of each source, by setting


class NotSavedError(RuntimeError):
    """A run that has to end has no checkpoint of its last step."""


class Stateful(Protocol):
    """A part of a run with a state of its own: what JSON can hold, and arrays of numbers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class CheckpointManager:
    """Saves training checkpoints and exports while a loop goes on:

        for step in range(checkpoints.next_step, num_steps + 1):
            ...                              # generate, update
            if checkpoints.is_due(step):
                checkpoints.save(step)
            ...                              # update the servers' weights, report the metrics
            checkpoints.finish_step(step, metrics)

    A checkpoint is published in `finish_step`, so that the metrics up to its step are on disk. One
    that the disk does not take costs a warning, not the run.
    """

    def __init__(
        self,
        config: RLConfig | TrainConfig,
        output_dir: Path,
        devices: DeviceSharing | ExclusiveDevices,
        states: Mapping[str, Stateful],
        results: Callable[[], Mapping[str, Any]],
        stop: StopSignals,
        hf_bytes: int,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare.

        Args:
            states: The parts of the loop that a resumed run needs besides weights, by name.
            results: Returns the results so far, for the summary.
            hf_bytes: Size of an export.
            digests: Digests of the data, by setting.
        """
        self._config, self._devices, self._states = config, devices, states
        self._results, self._stop, self._hf_bytes = results, stop, hf_bytes
        self._digests = dict(digests or {})
        self._output_dir, self._hf_folder = output_dir.absolute(), output_dir / HF
        self._made_in: str | None = None  # the run whose task and warm start this one goes on with
        self._written = RunCheckpoints(output_dir / CHECKPOINTS)
        self._saving: int | None = None  # the step whose checkpoint has no name yet
        self._state: dict[str, Any] = {}  # of that step
        self._best: dict[str, Any] | None = None  # step, metric and value
        self._last = 0  # step of the newest checkpoint
        self.next_step = 1

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Restore models, servers and all parts as they were after the step of a checkpoint.

        Raises:
            ConfigError: An earlier version of this program has written it, without a part.
        """
        if missing := sorted(self._states.keys() - checkpoint.state["parts"].keys()):
            raise ConfigError(
                f"{checkpoint.path} has no state of {', '.join(missing)}, which this run needs: an "
                "earlier version wrote it; go on with that version, or begin a new run from "
                f"its weights (mcore-rl convert mcore-to-hf --checkpoint {checkpoint.path / ACTOR})"
            )
        self._devices.offload_rollout()
        self._devices.use("actor")
        self._devices.actor.call(ModelWorker.load_checkpoint, str(checkpoint.path / ACTOR))
        if (critic := self._devices.critic) is not None:
            self._devices.use("critic")
            critic.call(ModelWorker.load_checkpoint, str(checkpoint.path / CRITIC))
        self._devices.update_weights(version=checkpoint.state["weight_version"])
        for name, part in self._states.items():
            try:
                part.load_state_dict(checkpoint.state["parts"][name])
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"{checkpoint.path}: the state of {name} is not what this version writes: "
                    f"{type(error).__name__}: {error}"
                ) from error
        self._restore_best(checkpoint)
        self._last, self.next_step = checkpoint.step, checkpoint.step + 1
        if checkpoint.made_in != self._output_dir:
            self._made_in = str(checkpoint.made_in)

    def _restore_best(self, checkpoint: RunCheckpoint) -> None:
        """Restore the best checkpoint so far, if it is the best by the same metric."""
        best, name = checkpoint.state["best"], self._config.checkpoint.keep_best
        if best is None or best["metric"] == name:
            self._best = best
            return
        compared = f"; only steps after {checkpoint.step} are compared" if name else ""
        warn(
            f"checkpoint.keep_best={name!r} (was {best['metric']!r}): {format_name(best['step'])}, "
            f"the best so far, is no longer kept as the best{compared}"
        )

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint or an export of this step has to be saved."""
        return self._is_checkpoint_due(step) or self._is_export_due(step)

    def save(self, step: int) -> None:
        """Save the checkpoint and export that are due; the actor has the weights of this step."""
        if self._is_checkpoint_due(step):
            self._begin(step)
        if self._is_export_due(step):
            self._export(step)

    def finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Publish a checkpoint that is written; its metrics are on disk, servers have its weights.

        Raises:
            RunStopped: A signal has ended the run; the step is saved.
        """
        is_stopping = bool(self._stop.requested)  # from here on, a signal is for the next step
        if is_stopping and self._saving != step:
            self._devices.offload_rollout()
            self._begin(step)
        if self._saving == step:
            self._state = self._build_state(step, metrics)
        if self._saving is not None:
            is_last = step == self._config.trainer.num_steps
            if (
                is_last
                or is_stopping
                or all(all(group.call(ModelWorker.is_saved)) for group in self._trained)
            ):
                self._finish()
        if is_stopping:
            self._raise_stopped(step)

    def _is_checkpoint_due(self, step: int) -> bool:
        every = self._config.trainer.save_every
        if not every:
            return False
        is_last = step == self._config.trainer.num_steps
        return is_last or step % every == 0 or bool(self._stop.requested)

    def _is_export_due(self, step: int) -> bool:
        every = self._config.checkpoint.hf_every
        return bool(every) and step % every == 0

    def _begin(self, step: int) -> None:
        """Copy the state to the host and, unless checkpoint.async_save, write it."""
        self._finish()
        try:
            path = self._written.begin(step)
        except OSError as error:
            self._warn(step, str(error))
            return
        in_background = self._config.checkpoint.async_save
        self._devices.use("actor")
        save = ModelWorker.save_checkpoint
        reason = self._devices.actor.call(save, str(path / ACTOR), in_background=in_background)[0]
        if (critic := self._devices.critic) is not None and not reason:
            self._devices.use("critic")
            reason = critic.call(
                ModelWorker.save_checkpoint, str(path / CRITIC), in_background=in_background
            )[0]
        if reason:
            self._end_saves()
            self._warn(step, reason)
            self._written.discard(step)
        else:
            self._saving = step

    @property
    def _trained(self) -> list[RankGroup]:
        """Workers of the models that are trained."""
        critic = self._devices.critic
        return [self._devices.actor] + ([critic] if critic is not None else [])

    def _end_saves(self) -> str:
        """Wait for saves in the background; return why one failed, or ""."""
        return next(
            filter(None, [group.call(ModelWorker.finish_save)[0] for group in self._trained]), ""
        )

    def _build_state(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return the state of a checkpoint (RunCheckpoints.publish)."""
        return {
            "weight_version": step,
            "parts": {name: part.state_dict() for name, part in self._states.items()},
            "best": self._find_best(step, metrics),
            "results": dict(self._results()),
            "settings": asdict(self._config),
            DATA: self._digests,
            MADE_IN: self._made_in,
        }

    def _find_best(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any] | None:
        """Return step, metric and value of the best checkpoint, this step included."""
        name, best = self._config.checkpoint.keep_best, self._best
        if not name:
            return None
        value = metrics.get(name.removeprefix("-"))
        if value is None or not math.isfinite(value):
            why = f"it has {', '.join(sorted(metrics))}" if value is None else f"it is {value}"
            warn(f"checkpoint.keep_best={name!r}: no such metric in step {step}; {why}")
            return best
        sign = -1 if name.startswith("-") else 1
        if best is not None and sign * value <= sign * best["value"]:
            return best
        return {"metric": name, "step": step, "value": value}

    def _finish(self) -> None:
        """Publish the checkpoint that is being written, and remove old ones."""
        if self._saving is None:
            return
        step, self._saving = self._saving, None
        reason = self._end_saves()
        try:
            if reason:
                raise OSError(reason)
            self._written.publish(step, self._state)
        except OSError as error:
            self._warn(step, str(error))
            self._written.discard(step)
            return
        self._last, self._best = step, self._state["best"]
        besides = [self._best["step"]] if self._best is not None else []
        try:
            self._written.prune(step, self._config.checkpoint.keep, besides)
        except OSError as error:
            warn(f"step {step}: an old checkpoint cannot be removed: {error}; the run goes on")

    def _export(self, step: int) -> None:
        """Export the actor to hf/step_NNNNNN; warn if it cannot be written."""
        path = self._hf_folder / format_name(step)
        try:
            self._hf_folder.mkdir(exist_ok=True)
            if path.exists():  # of a run that went on from an earlier step
                shutil.rmtree(path)
            self._devices.use("actor")
            reason = self._devices.actor.call(ModelWorker.export, str(path), self._hf_bytes)[0]
        except OSError as error:
            reason = str(error)
        if reason:
            warn(f"step {step}: no export to {path}: {reason}; the run goes on")

    def _warn(self, step: int, reason: str) -> None:
        newest = f"that of step {self._last} stays" if self._last else "there is none yet"
        warn(f"step {step}: no checkpoint: {reason}; {newest}, and the run goes on")

    def _raise_stopped(self, step: int) -> None:
        """Raise RunStopped, or NotSavedError if the checkpoint of the step cannot be written."""
        stopped, hint = f"{self._stop.requested}: step {step}", _describe_resume(self._config)
        if self._last != step:
            raise NotSavedError(f"{stopped} could not be saved; {hint}")
        raise RunStopped(f"{stopped} is saved; {hint}")


def _describe_resume(config: RLConfig | TrainConfig) -> str:
    """Return a sentence with the command that resumes a run."""
    return f"to go on: the same command with resume=auto output_dir={config.output_dir}"


def handle_stop_signals(config: RLConfig | TrainConfig) -> AbstractContextManager[StopSignals]:
    """Let a signal end the step first; without checkpoints it ends the run at once."""
    if not config.trainer.save_every:
        return contextlib.nullcontext(StopSignals())
    return catch_stop_signals(_describe_resume(config))
