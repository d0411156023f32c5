"""The loop `verifiers`: the policy acts in rollouts of an environment of verifiers 0.4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.agents.api_server.protocol import MODEL
from mcore_rl.agents.loops import Agent, ApiSession, Task
from mcore_rl.agents.session import GenerationError, Turn
from mcore_rl.agents.verifiers.process import BridgeError, BridgeProcess, VerifiersSettings
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.event_loop import run_coroutine
from mcore_rl.data.sample import Sample, TrajectoryStatus

TASK = "task"  # column with the data of a task, as JSON
METRICS = "metrics/"  # prefix of metrics among the parts of a reward


class RolloutFailedError(RuntimeError):
    """A rollout failed in an environment of verifiers or in its agent."""


class RecordMismatchError(RuntimeError):
    """verifiers counted other turns than the API server recorded."""


class VerifiersLoop:
    """Runs all rollouts of a server in one process.

    If the process ends or hangs, it is restarted, up to max_restarts times, and its rollouts begin
    again with the same seeds. One more failure ends the run, and so does a first process that
    cannot load its environment.

    The reward is the environment's. A rollout that fails after a limit of the trajectory was
    reached is truncated, with the reward 0.
    """

    def __init__(self, agent: Agent, settings: VerifiersSettings) -> None:
        self._agent, self._settings = agent, settings
        self._process = BridgeProcess(settings, agent.max_turns)
        self._num_restarts, self._is_closed = 0, False

    @staticmethod
    def try_out(settings: VerifiersSettings, max_turns: int, fields: Mapping[str, Any]) -> None:
        """Load the environment as a run does, which takes seconds.

        Raises:
            ConfigError: It cannot be loaded, or the row has no task.
        """
        _get_task(fields)

        async def start() -> None:
            process = BridgeProcess(settings, max_turns)
            try:
                await process.start()
            finally:
                await process.close()

        try:
            run_coroutine(start())
        except BridgeError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"agent.settings.environment: {reason}") from error

    async def close(self) -> None:
        """End the process."""
        self._is_closed = True
        await self._process.close()

    async def run(self, task: Task) -> list[Sample]:
        """Return the samples of one rollout."""
        while True:
            process = self._process
            try:
                async with self._agent.open_api_session(task) as api:
                    result = await process.ask(
                        "run",
                        task=_get_task(task.fields),
                        base_url=api.base_url,
                        api_key=api.api_key,
                        model=MODEL,
                    )
            except BridgeError as error:
                await self._replace(process, error)
                self._agent.restart(task)
            else:
                return self._build_samples(task, api, result)

    async def _replace(self, process: BridgeProcess, error: BridgeError) -> None:
        """Start another process, once for all rollouts of the failed one.

        Raises:
            GenerationError: None may be started any more.
        """
        if process is not self._process:
            return
        if self._is_closed or not (process.has_loaded or self._num_restarts):
            raise GenerationError(str(error)) from error
        limit = f"agent.settings.max_restarts={self._settings.max_restarts}"
        if self._num_restarts >= self._settings.max_restarts:
            last = BridgeError(f"{error}\n\n(It is not started again: {limit})")
            raise GenerationError(str(last)) from last  # AgentRunner raises the cause
        self._num_restarts += 1
        print(f"{str(error).splitlines()[0]}. It is started again: {self._num_restarts}, {limit}")
        self._process = BridgeProcess(self._settings, self._agent.max_turns)
        await process.close()

    def _build_samples(
        self, task: Task, api: ApiSession, result: Mapping[str, Any]
    ) -> list[Sample]:
        if result["error"] is not None:
            if api.is_cut_off and api.session.turns:
                return self._agent.build_samples(task, api.session, "truncated", 0.0)
            raise RolloutFailedError(result["error"])
        if not result["is_timeout"]:  # a turn that a timeout cut off is in one of them only
            check_record(api.session.turns, result["turns"], result["usage"])
        status: TrajectoryStatus = "finished"
        if result["is_timeout"]:
            status = "aborted"
        elif result["is_truncated"] or api.is_cut_off:
            status = "truncated"
        samples = self._agent.build_samples(task, api.session, status, result["reward"])
        parts = {METRICS + name: float(value) for name, value in result["metrics"].items()}
        parts |= {name: float(value) for name, value in result["rewards"].items()}
        for sample in samples:
            sample.reward_parts = parts
        return samples


def check_record(
    turns: Sequence[Turn],
    answers: Sequence[Mapping[str, Any]] | None,
    usage: Sequence[Sequence[int]],
) -> None:
    """Compare the turns that verifiers saw with those that are trained.

    Args:
        answers: Number of tokens of each prompt and token ids of each answer; None if the harness
            does not record them.
        usage: Numbers of tokens of prompt and answer of each call of the model.

    Raises:
        RecordMismatchError: They differ; it names both.
    """
    recorded = sorted((len(turn.prompt_ids), len(turn.token_ids)) for turn in turns)
    counted = sorted((prompt, new) for prompt, new in usage)
    if counted != recorded:
        raise RecordMismatchError(
            f"verifiers counts {len(counted)} turns with the tokens (prompt, answer) {counted}; "
            f"the endpoint has recorded {len(recorded)}: {recorded}"
        )
    if answers is None:
        return
    seen = sorted((answer["prompt"], tuple(answer["token_ids"])) for answer in answers)
    trained = sorted((len(turn.prompt_ids), turn.token_ids) for turn in turns)
    if seen != trained:
        raise RecordMismatchError(
            "verifiers was answered other tokens than the endpoint has recorded, as (tokens of the "
            f"prompt, token ids): {seen}; recorded: {trained}"
        )


def _get_task(fields: Mapping[str, Any]) -> str:
    task = fields.get(TASK)
    if not isinstance(task, str):
        raise ConfigError(
            f"agent.loop='verifiers' needs the column {TASK!r}, which `mcore-rl data verifiers` "
            f"writes; the row has {', '.join(fields) or 'none'}"
        )
    return task
