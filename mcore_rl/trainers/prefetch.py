"""The samples of a step, generated in a thread while a trainer does something else."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, Future
from typing import Any

from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.batch_ops import from_arrays, lost_groups, to_arrays
from mcore_rl.data.batch import Samples
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.rollout.manager import RolloutPool, tell_lost
from mcore_rl.trainers.replay_buffer import ReplayBuffer
from mcore_rl.trainers.step_samples import samples_of_step

Found = tuple[Samples, dict[str, float]]  # samples and metrics


class SamplesAhead:
    """Of one step at a time: `begin` it, `wait` until no server answers, `take` what was found.

    While it generates nobody else may use the servers, the prompts or the buffer. Samples that have
    come and have not been taken are a state of a checkpoint: a run that goes on trains on them, so
    that it draws the prompts, and gets the samples, that it would have had. A step that has lost
    samples with a node is generated again, with the same prompts, the buffer as it was before, and
    the weights that servers have by then.
    """

    def __init__(
        self,
        config: RLConfig,
        rollout: RolloutPool,
        prompts: PromptBatches,
        replay: ReplayBuffer,
        thread: Executor,
    ) -> None:
        """`thread` has to outlive the servers, whose end ends what it waits for."""
        self._source, self._thread = (config, rollout, prompts, replay), thread
        self._call_s = config.timeouts.call_s
        # Prompts and buffer before the step; None if it cannot be lost.
        self._begun_from: tuple[dict[str, Any], Samples | None] | None = None
        self._step = 0  # of what is generated, or has been and was not taken
        self._pending: Future[Found] | None = None

    def start(self) -> None:
        """Before the first step; the servers have weights."""
        self.idle_s()  # what was before the run does not count

    def begin(self, step: int, version: int) -> None:
        """Returns at once; the servers have weights of this version.

        Raises:
            RuntimeError: samples of another step have not been taken.
        """
        if self._pending is not None:
            raise RuntimeError(f"step {step} was begun before step {self._step} was taken")
        _, _, prompts, replay = self._source
        self._step = step
        self._begun_from = prompts.state_dict(), replay.snapshot()
        age = step - 1 - version
        self._pending = self._thread.submit(samples_of_step, *self._source, step, age)

    def wait(self) -> None:
        """Returns when no server answers; immediately if nothing was begun.

        Each call of the servers has its own limit, timeouts.call_s, and there are no more than
        algorithm.filter.max_rounds of them.

        Raises:
            PolicyMismatchError, ConfigError, WorkerError: as samples_of_step.
        """
        if self._pending is not None:
            self._pending.result()

    def take(self, step: int, version: int) -> Found:
        """Samples and metrics of a step. They are generated now, of this version, if not before.

        Raises:
            RuntimeError: those of another step have been begun.
            PolicyMismatchError, ConfigError, WorkerError: as `wait`.
        """
        if self._pending is None:
            self.begin(step, version)
        if self._pending is None or self._step != step:
            raise RuntimeError(f"step {step} was asked for; begun was step {self._step}")
        found = self._found()
        self._pending = self._begun_from = None
        return found

    def _found(self) -> Found:
        """What was begun; if it is lost, it is generated again by servers as they are now."""
        assert self._pending is not None
        found = self._pending.result()
        while self._begun_from is not None and (lost := lost_groups([found[0]])):
            tell_lost(lost)
            _, rollout, prompts, replay = self._source
            prompts.load_state_dict(self._begun_from[0])
            replay.go_back(self._begun_from[1])
            age = self._step - 1 - rollout.servers.version
            found = samples_of_step(*self._source, self._step, age)
            self._pending = Future()
            self._pending.set_result(found)
        return found

    def idle_s(self) -> float:
        """As RolloutPool.idle_s, since the last call or the start; when no server answers."""
        return self._source[1].idle_s()

    def state_dict(self) -> dict[str, Any]:
        if self._pending is None:
            return {"step": 0, "metrics": {}, "samples": None}
        batch, metrics = self._found()
        what = f"a checkpoint needs the samples of step {self._step}"
        samples = to_arrays(batch, what, self._call_s)
        return {"step": self._step, "metrics": dict(metrics), "samples": samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._pending, self._begun_from = state["step"], None, None
        if state["samples"] is not None:
            self._pending = Future()
            self._pending.set_result((from_arrays(state["samples"]), dict(state["metrics"])))
