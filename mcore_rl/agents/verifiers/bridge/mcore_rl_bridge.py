"""Runs an environment of verifiers 0.4, asked by lines of JSON; process.py has the other side.

Runs in an interpreter with verifiers, and imports nothing of mcore_rl. The first line is the
settings, answered by what the environment is. Then each line has an `id`, which is the answer's:

{"id", "op": "run", "task", "base_url", "api_key", "model"}   a rollout; many at the same time
{"id", "op": "cancel", "run"}                                 ends the rollout with the id `run`
{"id", "op": "tasks", "skip", "num"}                          the next tasks, without the first ones
{"id", "op": "ping"}                                          answered at once

The end of the lines ends the process, with all that it has started.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, TextIO

import verifiers
import verifiers.v1 as vf
from mcore_rl_chat import TURNS
from verifiers.v1.dialects.chat import message_to_wire

_END_S = 15.0  # for rollouts and servers to end, after the last line


def made(settings: dict[str, Any]) -> tuple[vf.Env, str]:
    """The environment, and the name of its agent that the policy plays."""
    name, args = settings["environment"], settings["args"]
    data = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
    kind = vf.env_config_type(name, data.get("id", ""))
    roles = {
        role: field.default
        for role, field in kind.model_fields.items()
        if isinstance(field.default, vf.AgentConfig)
    }
    ours: dict[str, Any] = {"runtime": {"type": "subprocess"}, "max_turns": settings["max_turns"]}
    if vf.default_harness_id(name) == "bash":  # the environment has none of its own
        ours["harness"] = {"id": "mcore-rl-chat"}
    for role, default in roles.items():
        # What the environment's author or its user says is kept.
        unsaid = {key: value for key, value in ours.items() if key not in default.model_fields_set}
        data[role] = {**unsaid, **args.get(role, {})}
    env = vf.load_environment(vf.resolve_env_config(data))
    played = [role for role in roles if getattr(env.config, role).client is None]
    if len(played) != 1:
        raise ValueError(
            f"{name!r} has the agents {', '.join(roles)}, of which the policy plays "
            f"{', '.join(played) or 'none'}; allowed: one. The others need a client of their own"
        )
    data_type = type(env.taskset).task_type().data_type()
    hidden = [key for key, field in data_type.model_fields.items() if field.exclude]
    if hidden:
        raise ValueError(f"tasks of {name!r} do not write {', '.join(hidden)}, which is needed")
    return env, played[0]


class Bridge:
    def __init__(self, env: vf.Env, played: str, answers: TextIO) -> None:
        self._env, self._played, self._answers = env, played, answers
        self._running: dict[int, asyncio.Task[None]] = {}
        self._tasks: Iterator[vf.Task] | None = None

    def say(self, answer: dict[str, Any]) -> None:
        try:
            text = json.dumps(answer, allow_nan=False)
        except ValueError as error:
            text = json.dumps({"id": answer["id"], "error": f"{type(error).__name__}: {error}"})
        print(text, file=self._answers, flush=True)

    def take(self, line: str) -> None:
        asked = json.loads(line)
        if asked["op"] == "cancel":
            if (running := self._running.get(asked["run"])) is not None:
                running.cancel()
            return
        task = asyncio.create_task(self._answer(asked))
        self._running[asked["id"]] = task
        task.add_done_callback(lambda _: self._running.pop(asked["id"], None))

    async def _answer(self, asked: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": asked["id"]}
        try:
            if asked["op"] == "run":
                answer |= self._outcome(await self._run(asked))
            elif asked["op"] == "tasks":
                answer["tasks"] = self._next_tasks(asked["skip"], asked["num"])
        except Exception as error:  # noqa: BLE001 (who asked is to hear of it)
            answer["error"] = f"{type(error).__name__}: {error}"
        self.say(answer)

    async def end(self) -> None:
        for task in [*self._running.values()]:
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, asked: dict[str, Any]) -> vf.Episode:
        # verifiers reads keys from the environment, and keeps this one from programs by its name.
        variable = f"MCORE_RL_{asked['id']}_API_KEY"
        os.environ[variable] = asked["api_key"]
        try:
            client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
            context = vf.ModelContext(model=asked["model"], client=client)
            [slot] = self._env.slots(self._task(asked["task"]))
            return await self._env.run_slot(slot, context)
        finally:
            del os.environ[variable]

    def _task(self, text: str) -> vf.Task:
        """As verifiers' own server builds it (serve/server.py, _build_task)."""
        kind = type(self._env.taskset).task_type()
        data = kind.data_type().model_validate_json(text)
        return kind(data, self._env.config.taskset.task)

    def _outcome(self, episode: vf.Episode) -> dict[str, Any]:
        traces = [trace for trace in episode.traces if trace.agent.name == self._played]
        failed = [*episode.errors, *(e for t in episode.traces if not t.ok for e in t.errors)]
        error = f"{failed[-1].type}: {failed[-1].message}" if failed and not episode.ok else None
        if len(traces) != 1:
            told = f"the episode has {len(traces)} conversations of {self._played!r}; allowed: 1"
            return {"error": error or told}
        [trace] = traces
        calls = [call.usage for call in trace.calls if call.usage is not None]
        return {
            "error": error,
            "reward": trace.reward,
            "rewards": {k: r.value for k, r in trace.rewards.items() if r is not None},
            "metrics": {k: v for k, v in trace.metrics.items() if v is not None},
            "turns": trace.info.get(TURNS),
            "usage": [[usage.input_tokens, usage.completion_tokens] for usage in calls],
            "is_truncated": trace.is_truncated,
            "is_timeout": episode.is_timeout or trace.is_timeout,
        }

    def _next_tasks(self, skip: int, num: int) -> list[dict[str, Any]]:
        if self._tasks is None:
            self._tasks = iter(self._env.taskset.skip(skip))
        return [_row(task.data) for task in islice(self._tasks, num)]


def _row(data: vf.TaskData) -> dict[str, Any]:
    messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [message_to_wire(message) for message in data.prompt or ()]
    return {"messages": messages, "task": data.model_dump_json(exclude_none=True)}


def read_lines(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str]) -> None:
    """Ends the process where its work does not end by itself."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(lines.put_nowait, line)
    loop.call_soon_threadsafe(lines.put_nowait, "")
    time.sleep(_END_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


async def main(answers: TextIO) -> None:
    settings = json.loads(sys.stdin.readline())
    try:
        env, played = made(settings)
    except Exception as error:  # noqa: BLE001 (of an environment that is not ours)
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    async with env.serving():
        # Rollouts get a proxy each. A shared one keeps a client for every key that there was.
        env._interception = None
        bridge = Bridge(env, played, answers)
        lines: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        threading.Thread(target=read_lines, args=(loop, lines), daemon=True).start()
        bridge.say({"version": verifiers.__version__, "agent": played})
        while line := await lines.get():
            bridge.take(line)
        await bridge.end()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker ends this process
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints is no answer
    asyncio.run(main(own))
