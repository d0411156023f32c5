"""The loop `verifiers`: rollouts of an environment of verifiers 0.4, which the policy answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.agents.api_server.protocol import MODEL
from mcore_rl.agents.loops import Agent, Served, Task
from mcore_rl.agents.session import GenerationError
from mcore_rl.agents.trajectory import Turn
from mcore_rl.agents.verifiers.process import BridgeError, BridgeProcess, VerifiersSettings
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.sample import Sample, TrajectoryStatus

TASK = "task"  # the column with the data of a task, as JSON
METRICS = "metrics/"  # before the names of metrics, among those of rewards


class RolloutFailedError(RuntimeError):
    """An environment of verifiers, or its agent, has failed in a rollout."""


class RecordMismatchError(RuntimeError):
    """verifiers counts other turns than the endpoint has recorded."""


class VerifiersLoop:
    """One process has all rollouts of a server.

    One that has ended, or hangs, is started again max_restarts times. The rollouts that it had
    begin anew, with the same seeds. One more ends the run, and so does one that cannot load its
    environment at first.

    The reward is the environment's. A rollout that fails after a limit of the trajectory was
    reached is truncated, with the reward 0.
    """

    def __init__(self, agent: Agent, settings: VerifiersSettings) -> None:
        self._agent, self._settings = agent, settings
        self._process = BridgeProcess(settings, agent.max_turns)
        self._num_restarts, self._is_closed = 0, False

    @staticmethod
    def try_out(settings: VerifiersSettings, max_turns: int, fields: Mapping[str, Any]) -> None:
        """Loads the environment as a run does: some seconds.

        Raises:
            ConfigError: it cannot be loaded; or the row has no task.
        """
        _task_of(fields)

        async def started() -> None:
            process = BridgeProcess(settings, max_turns)
            try:
                await process.start()
            finally:
                await process.close()

        try:
            asyncio.run(started())
        except BridgeError as error:
            told = " ".join(str(error).split())
            raise ConfigError(f"agent.settings.environment: {told}") from error

    async def close(self) -> None:
        self._is_closed = True
        await self._process.close()

    async def run(self, task: Task) -> list[Sample]:
        while True:
            process = self._process
            try:
                async with self._agent.served(task) as served:
                    found = await process.ask(
                        "run",
                        task=_task_of(task.fields),
                        base_url=served.base_url,
                        api_key=served.api_key,
                        model=MODEL,
                    )
            except BridgeError as error:
                await self._replace(process, error)
                self._agent.begin_anew(task)
            else:
                return self._samples(task, served, found)

    async def _replace(self, process: BridgeProcess, error: BridgeError) -> None:
        """Once for all rollouts that a process had.

        Raises:
            GenerationError: no other is started.
        """
        if process is not self._process:
            return
        if self._is_closed or not (process.has_loaded or self._num_restarts):
            raise GenerationError(str(error)) from error
        limit = f"agent.settings.max_restarts={self._settings.max_restarts}"
        if self._num_restarts >= self._settings.max_restarts:
            last = BridgeError(f"{error}\n\n(It is not started again: {limit})")
            raise GenerationError(str(last)) from last  # whoever runs the loop raises the cause
        self._num_restarts += 1
        print(f"{str(error).splitlines()[0]}. It is started again: {self._num_restarts}, {limit}")
        self._process = BridgeProcess(self._settings, self._agent.max_turns)
        await process.close()

    def _samples(self, task: Task, served: Served, found: Mapping[str, Any]) -> list[Sample]:
        if found["error"] is not None:
            if served.is_cut_off and served.session.turns:
                return self._agent.rewarded(task, served.session, "truncated", 0.0)
            raise RolloutFailedError(found["error"])
        if not found["is_timeout"]:  # what a time limit has cut off is in one of them only
            check_record(served.session.turns, found["turns"], found["usage"])
        status: TrajectoryStatus = "finished"
        if found["is_timeout"]:
            status = "aborted"
        elif found["is_truncated"] or served.is_cut_off:
            status = "truncated"
        samples = self._agent.rewarded(task, served.session, status, found["reward"])
        parts = {METRICS + name: float(value) for name, value in found["metrics"].items()}
        parts |= {name: float(value) for name, value in found["rewards"].items()}
        for sample in samples:
            sample.reward_parts = parts
        return samples


def check_record(
    turns: Sequence[Turn],
    answers: Sequence[Mapping[str, Any]] | None,
    usage: Sequence[Sequence[int]],
) -> None:
    """What verifiers has seen of a trajectory, with what is trained of it.

    Args:
        answers: the number of tokens of each prompt and the token ids of each answer, where the
            harness has kept them.
        usage: tokens of prompt and answer of each call of the model.

    Raises:
        RecordMismatchError: they differ; it names both.
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


def _task_of(fields: Mapping[str, Any]) -> str:
    task = fields.get(TASK)
    if not isinstance(task, str):
        raise ConfigError(
            f"agent.loop='verifiers' needs the column {TASK!r}, which `mcore-rl data verifiers` "
            f"writes; the row has {', '.join(fields) or 'none'}"
        )
    return task
