"""Serve an environment of verifiers 0.4 by lines of JSON on stdin; process.py is the client.

This program runs in an interpreter with verifiers, and imports nothing of mcore_rl. The first line
has the settings, and is answered with the version and the agent. Each later line is a request; its
answer has the same `id`:

{"id", "op": "run", "task", "base_url", "api_key", "model"}   a rollout; many at the same time
{"id", "op": "cancel", "run"}                                 ends the rollout with the id `run`
{"id", "op": "tasks", "skip", "num"}                          the next tasks; `skip` leaves out some
{"id", "op": "ping"}                                          answered at once

When stdin ends, so does the process, with all that it has started.
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


def load_environment(settings: dict[str, Any]) -> tuple[vf.Env, str]:
    """Return the environment, and the name of its agent that the policy plays."""
    name, args = settings["environment"], settings["args"]
    data = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
    kind = vf.env_config_type(name, data.get("id", ""))
    roles = {
        role: field.default
        for role, field in kind.model_fields.items()
        if isinstance(field.default, vf.AgentConfig)
    }
    defaults: dict[str, Any] = {
        "runtime": {"type": "subprocess"},
        "max_turns": settings["max_turns"],
    }
    if vf.default_harness_id(name) == "bash":  # the environment has none of its own
        defaults["harness"] = {"id": "mcore-rl-chat"}
    for role, default in roles.items():
        # Settings of the environment's author or its user come first.
        unset = {key: v for key, v in defaults.items() if key not in default.model_fields_set}
        data[role] = {**unset, **args.get(role, {})}
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
    """Answers requests about one environment."""

    def __init__(self, env: vf.Env, played: str, answers: TextIO) -> None:
        self._env, self._played, self._answers = env, played, answers
        self._running: dict[int, asyncio.Task[None]] = {}
        self._tasks: Iterator[vf.Task] | None = None

    def send(self, answer: dict[str, Any]) -> None:
        """Write an answer; one that is no JSON becomes an error."""
        try:
            text = json.dumps(answer, allow_nan=False)
        except ValueError as error:
            text = json.dumps({"id": answer["id"], "error": f"{type(error).__name__}: {error}"})
        print(text, file=self._answers, flush=True)

    def receive(self, line: str) -> None:
        """Start to answer a request."""
        request = json.loads(line)
        if request["op"] == "cancel":
            if (running := self._running.get(request["run"])) is not None:
                running.cancel()
            return
        task = asyncio.create_task(self._answer(request))
        self._running[request["id"]] = task
        task.add_done_callback(lambda _: self._running.pop(request["id"], None))

    async def _answer(self, request: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            if request["op"] == "run":
                answer |= self._summarize(await self._run(request))
            elif request["op"] == "tasks":
                answer["tasks"] = self._take_tasks(request["skip"], request["num"])
        except Exception as error:  # noqa: BLE001 (sent to the client)
            answer["error"] = f"{type(error).__name__}: {error}"
        self.send(answer)

    async def close(self) -> None:
        """Cancel all rollouts."""
        for task in [*self._running.values()]:
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, request: dict[str, Any]) -> vf.Episode:
        # verifiers reads keys from the environment, and keeps this one from programs by its name.
        variable = f"MCORE_RL_{request['id']}_API_KEY"
        os.environ[variable] = request["api_key"]
        try:
            client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
            context = vf.ModelContext(model=request["model"], client=client)
            [slot] = self._env.slots(self._build_task(request["task"]))
            return await self._env.run_slot(slot, context)
        finally:
            del os.environ[variable]

    def _build_task(self, text: str) -> vf.Task:
        """Build a task of its JSON, as verifiers' own server does (serve/server.py)."""
        kind = type(self._env.taskset).task_type()
        data = kind.data_type().model_validate_json(text)
        return kind(data, self._env.config.taskset.task)

    def _summarize(self, episode: vf.Episode) -> dict[str, Any]:
        """Return reward, metrics and turns of an episode, or its error."""
        traces = [trace for trace in episode.traces if trace.agent.name == self._played]
        failed = [*episode.errors, *(e for t in episode.traces if not t.ok for e in t.errors)]
        error = f"{failed[-1].type}: {failed[-1].message}" if failed and not episode.ok else None
        if len(traces) != 1:
            fault = f"the episode has {len(traces)} conversations of {self._played!r}; allowed: 1"
            return {"error": error or fault}
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

    def _take_tasks(self, skip: int, num: int) -> list[dict[str, Any]]:
        if self._tasks is None:
            self._tasks = iter(self._env.taskset.skip(skip))
        return [_to_row(task.data) for task in islice(self._tasks, num)]


def _to_row(data: vf.TaskData) -> dict[str, Any]:
    messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [message_to_wire(message) for message in data.prompt or ()]
    return {"messages": messages, "task": data.model_dump_json(exclude_none=True)}


def read_lines(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str]) -> None:
    """Read stdin to its end; kill the process group if it has not ended _END_S later."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(lines.put_nowait, line)
    loop.call_soon_threadsafe(lines.put_nowait, "")
    time.sleep(_END_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


async def main(answers: TextIO) -> None:
    """Load the environment, and answer requests until stdin ends."""
    settings = json.loads(sys.stdin.readline())
    try:
        env, played = load_environment(settings)
    except Exception as error:  # noqa: BLE001 (of a user's environment)
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    async with env.serving():
        # Rollouts get a proxy each: a shared one keeps a client for every key that it has seen.
        env._interception = None
        bridge = Bridge(env, played, answers)
        lines: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        threading.Thread(target=read_lines, args=(loop, lines), daemon=True).start()
        bridge.send({"version": verifiers.__version__, "agent": played})
        while line := await lines.get():
            bridge.receive(line)
        await bridge.close()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker ends this process
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the environment may print to stdout
    asyncio.run(main(answers))
