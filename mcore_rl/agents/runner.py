"""Trajectories of many prompts at once, by the loop that agent.loop names."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mcore_rl.agents.choose import CodecKind, codec_for
from mcore_rl.agents.closing import close_or_tell
from mcore_rl.agents.codec import ChatTokenizer
from mcore_rl.agents.codec_proof import Proved
from mcore_rl.agents.coding import Coding
from mcore_rl.agents.countdown import Countdown
from mcore_rl.agents.endpoint.client_session import ClientSession, Limits
from mcore_rl.agents.endpoint.endpoint import Endpoint, new_key
from mcore_rl.agents.endpoint.refusal import RefusalError
from mcore_rl.agents.environment import Environment
from mcore_rl.agents.guessing import Guessing
from mcore_rl.agents.loops import AgentLoop, EnvironmentLoop, Served, Task, ToolLoop
from mcore_rl.agents.messages import encodable, messages_of
from mcore_rl.agents.openenv import OpenEnv
from mcore_rl.agents.program import ProgramLoop
from mcore_rl.agents.remote import FrozenModel
from mcore_rl.agents.session import ChatSession, GenerationError, session_seed
from mcore_rl.agents.single_turn import Group, Prompt, Reward, samples_of_all
from mcore_rl.agents.time_limit import TimeLimit
from mcore_rl.agents.tool_sources import end_sources, tool_sources, try_mcp_servers
from mcore_rl.agents.tools.base import ToolSet
from mcore_rl.agents.trajectory import MASKED_VERSION, Turn, pay, samples_of
from mcore_rl.agents.user_loop import UserLoop
from mcore_rl.agents.verifiers.loop import VerifiersLoop
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AgentConfig
from mcore_rl.data.sample import Sample, TrajectoryStatus
from mcore_rl.inference.protocol import Gate, Generator, SamplingParams
from mcore_rl.rewards.base import RewardError

LOOPS: Registry[Callable[..., Any]] = Registry("agent.loop", ("agent",), "agent.settings")
LOOPS.register("tools")(ToolLoop)
LOOPS.register("environment")(EnvironmentLoop)
LOOPS.register("program")(ProgramLoop)
LOOPS.register("user")(UserLoop)
LOOPS.register("verifiers")(VerifiersLoop)
ENVIRONMENTS: Registry[Callable[..., Any]] = Registry("agent.environment", ("fields",))
ENVIRONMENTS.register("code")(Coding)
ENVIRONMENTS.register("countdown")(Countdown)
ENVIRONMENTS.register("guessing")(Guessing)
ENVIRONMENTS.register("openenv")(OpenEnv)
MAX_ROLES = 64  # sessions that a program may open in a trajectory


def check_agent(
    config: AgentConfig,
    tokenizer: ChatTokenizer,
    models: Collection[str] = (),
    stop_ids: Sequence[int] = (),
    max_context: int | None = None,
) -> tuple[Proved, list[object]]:
    """The codec and the tools of a run; no tool is set up. `models` are the frozen ones by name.

    `stop_ids`: as `data.tokenizer.stop_ids_of` the checkpoint. `max_context`: tokens that a prompt
    may have.

    Raises:
        ConfigError: the chat template, a tool, the loop or its environment cannot be used.
    """
    kind = cast(CodecKind, config.codec)
    codec = codec_for(tokenizer, kind, stop_ids=stop_ids, max_tokens=max_context)
    sources = tool_sources(config)
    if sources and codec.tool_refusal:
        raise ConfigError(f"agent.tools: the codec {codec.name} takes none: {codec.tool_refusal}")
    settings = LOOPS.settings(config.loop, config.settings)
    if (model := getattr(settings, "model", None)) is not None and model not in models:
        raise ConfigError(
            f"agent.settings.model={model!r} is none of models; allowed: "
            f"{', '.join(models) or 'none, as models is empty'}"
        )
    if config.environment:
        its = ENVIRONMENTS.settings(config.environment, config.environment_settings)
        if check := getattr(ENVIRONMENTS[config.environment], "check", None):
            check(its)
    return codec, sources


def try_out(config: AgentConfig, fields: Mapping[str, Any]) -> None:
    """What takes a loop seconds to check, with the columns of a row: once before a run.

    Raises:
        ConfigError: the loop cannot work, or a server of agent.mcp_servers.
    """
    asyncio.run(try_mcp_servers(config))
    if check := getattr(LOOPS[config.loop], "try_out", None):
        check(LOOPS.settings(config.loop, config.settings), config.max_turns, fields)


@dataclass(slots=True)
class _Open:
    """A trajectory that is being made."""

    group_size: int  # trajectories of the prompt
    limit: TimeLimit
    sessions: list[ChatSession] = field(default_factory=list)  # with the policy
    num_sessions: int = 0  # with any model


class AgentRunner:
    """Runs loops against a server, and is the `Agent` that they get."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: ChatTokenizer,
        reward: Reward,
        config: AgentConfig,
        max_context: int,
        *,
        stops_on_error: bool,
        models: Collection[str] = (),
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Raises ConfigError where the chat template, a tool or the loop cannot be used.

        Args:
            models: the names of those that will be in `self.models` when loops run.
            stop_ids: tokens at which the server ends a turn (`data.tokenizer.stop_ids_of`).
        """
        self._generator, self._reward, self._config = generator, reward, config
        self._tokenizer = tokenizer
        self.max_context, self._stops_on_error = max_context, stops_on_error
        self.codec, self._sources = check_agent(config, tokenizer, models, stop_ids, max_context)
        self.models: dict[str, FrozenModel] = {}
        self.max_turns = config.max_turns
        self._open: dict[tuple[int, int], _Open] = {}
        self.gate = Gate()  # for requests from outside, and for trajectories that have yet to begin
        self._endpoint = Endpoint(max_context)
        self._loop: AgentLoop = LOOPS.bound(config.loop, config.settings)(self)

    async def close(self) -> None:
        """Ends what the loop has started, MCP servers, and the HTTP server of programs."""
        if close := getattr(self._loop, "close", None):
            await close()
        await end_sources(self._sources)
        await self._endpoint.close()

    def hold(self, reason: str) -> None:
        """Until `release` requests from outside wait, and of no trajectory's time any passes."""
        if self.gate.is_open:
            for one in self._open.values():
                one.limit.stop()
        self.gate.hold(reason)

    def release(self, reason: str) -> None:
        was_open = self.gate.is_open
        self.gate.release(reason)
        if self.gate.is_open and not was_open:
            for one in self._open.values():
                one.limit.go_on()

    async def run_all(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Sample]:
        """`sampling.n` trajectories of each prompt, in order. The first failure cancels the rest.

        The seed of a trajectory is that of the response in its place: see SingleTurnLoop.
        """
        return await samples_of_all(self.start(prompts, sampling))

    def start(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Group]:
        """A group for each prompt. Call it in an event loop."""
        return [asyncio.create_task(self._run_group(prompt, sampling)) for prompt in prompts]

    async def _run_group(self, prompt: Prompt, sampling: SamplingParams) -> list[Sample]:
        tasks = [self._task(prompt, number, sampling) for number in range(sampling.n)]
        asked = [asyncio.create_task(self._run(task, sampling.n)) for task in tasks]
        return await samples_of_all(asked)

    def _task(self, prompt: Prompt, number: int, sampling: SamplingParams) -> Task:
        seed = sampling.seed
        if seed is not None:
            seed += prompt.group_id * sampling.n + number
        tokens = self._config.max_turn_tokens or sampling.max_tokens
        own = replace(sampling, n=1, seed=seed, max_tokens=min(tokens, sampling.max_tokens))
        messages = messages_of(prompt.messages)
        at = prompt.group_id, number, prompt.row
        return Task(messages, prompt.fields, *at, own, sampling.max_tokens)

    async def _run(self, task: Task, group_size: int) -> list[Sample]:
        await self.gate.wait_open()
        key, limit = (task.group_id, task.trajectory), TimeLimit(self._config.timeout_s)
        self._open[key] = _Open(group_size, limit)
        try:
            async with limit.timeout:
                samples = _checked(await self._loop.run(task))
        except TimeoutError as error:
            samples = (
                self._cut_off(task, "aborted")
                if limit.timeout.expired()
                else self._failed(task, error)
            )
        except RewardError:
            raise
        except GenerationError as error:
            raise error.__cause__ or error from None
        except Exception as error:  # noqa: BLE001 (of a loop or an environment that is not ours)
            samples = self._failed(task, error)
        finally:
            del self._open[key]
        segments: Counter[int] = Counter()
        for sample in samples:
            sample.group_id = task.group_id
            sample.trajectory = sample.trajectory if sample.role else task.trajectory
            sample.segment = segments[sample.trajectory]
            segments[sample.trajectory] += 1
        return samples

    def _cut_off(self, task: Task, status: TrajectoryStatus) -> list[Sample]:
        """What all conversations of a trajectory have so far, with a reward of 0."""
        sessions = self._open[task.group_id, task.trajectory].sessions
        asked = [session for session in sessions if session.turns]
        return [s for session in asked for s in self.rewarded(task, session, status, 0.0)]

    def _failed(self, task: Task, error: Exception) -> list[Sample]:
        told = encodable(f"agent.loop={self._config.loop!r} raised {type(error).__name__}: {error}")
        if self._stops_on_error:
            where = f"row {task.row} of the data (group {task.group_id})"
            raise RewardError(f"{told}; it was asked about {where}") from error
        samples = self._cut_off(task, "failed")
        for sample in samples:
            sample.reward_error = told
        return samples

    # What loops get, as `loops.Agent` says.

    def session(self, task: Task, *, model: str = "", role: str = "") -> ChatSession:
        made = self._open[task.group_id, task.trajectory]
        name = f"{task.group_id}/{task.trajectory}/{made.num_sessions}"
        seed = session_seed(task.sampling.seed, made.num_sessions)
        if model and (role or model not in self.models):
            raise ConfigError(
                f"agent.session(model={model!r}, role={role!r}); allowed: one of models "
                f"({', '.join(self.models) or 'there is none'}), without a role"
            )
        made.num_sessions += 1
        if model:
            frozen = self.models[model]
            sampling = replace(frozen.sampling, seed=seed)
            context = frozen.max_context
            return ChatSession(name, frozen.generator, frozen.codec, sampling, context, model=model)
        number = task.trajectory
        if role:  # behind the numbers of those without
            number += made.group_size * (1 + len(made.sessions))
        sampling, context = replace(task.sampling, seed=seed), self.max_context
        session = ChatSession(
            name, self._generator, self.codec, sampling, context, role=role, trajectory=number
        )
        made.sessions.append(session)
        return session

    def begin_anew(self, task: Task) -> None:
        made = self._open[task.group_id, task.trajectory]
        made.sessions.clear()
        made.num_sessions = 0
        made.limit.begin_anew()

    @asynccontextmanager
    async def served(self, task: Task) -> AsyncIterator[Served]:
        url, made = await self._endpoint.url(), list[ClientSession]()

        def opened(role: str) -> Served:
            served = Served(url, new_key(), self.session(task, role=role))
            limits = Limits(self.max_turns, self.max_context)
            client = ClientSession(
                served, self.codec, self._tokenizer, limits, self.gate, opened_role
            )
            self._endpoint.add(served.api_key, client)
            made.append(client)
            return served

        def opened_role(role: str) -> Served:
            if len(made) > MAX_ROLES:
                told = f"the trajectory has {MAX_ROLES} sessions of roles; no more are allowed"
                raise RefusalError(429, "too_many_sessions", told)
            served = opened(role)
            made[0].served.roles.append(served)
            return served

        try:
            yield opened("")
        finally:
            for client in made:
                await self._endpoint.remove(client.served.api_key)
            for client in made:
                if client.failure is not None:
                    raise client.failure

    def tools(self) -> AbstractAsyncContextManager[ToolSet]:
        return ToolSet(self._sources, self._config.tool_timeout_s)

    @asynccontextmanager
    async def environment(self, task: Task) -> AsyncIterator[Environment]:
        make = ENVIRONMENTS.bound(self._config.environment, self._config.environment_settings)
        environment: Environment = make(task.fields)
        try:
            yield environment
        finally:
            name = f"agent.environment={self._config.environment!r}, for row {task.row},"
            await close_or_tell(name, environment.close)

    async def judged(
        self,
        task: Task,
        session: ChatSession,
        status: TrajectoryStatus,
        text: str,
        helpers: Sequence[ChatSession] = (),
    ) -> list[Sample]:
        own = self.rewarded(task, session, status, 0.0)
        asked = [one for one in helpers if one.turns]
        samples = [s for one in asked for s in self.rewarded(task, one, status, 0.0)] + own
        where = f"row {task.row} of the data (group {task.group_id})"
        last = samples[-1:]
        for sample in last:
            sample.messages = [message.as_dict() for message in task.messages]
            sample.turn_texts = [self._text(turn) for turn in session.turns]
            sample.turn_token_ids = [list(turn.token_ids) for turn in session.turns]
        # A reward has a limit of its own.
        with self._open[task.group_id, task.trajectory].limit.stopped():
            await self._reward(last, [text], task.max_tokens, where)
        for sample in samples[:-1]:
            sample.reward, sample.reward_parts = last[0].reward, last[0].reward_parts
            sample.reward_error = last[0].reward_error
        if last:
            pay(own, session.turns, last[0].turn_rewards, last[0].token_rewards)
        return samples

    def _text(self, turn: Turn) -> str:
        """What was said, with calls and reasoning, without the token that ends it."""
        ids = turn.token_ids
        if turn.finish_reason == "stop" and ids[-1] in self.codec.stop_ids:  # else by a stop text
            ids = ids[:-1]
        return self._tokenizer.decode([*ids], skip_special_tokens=False)

    def rewarded(
        self,
        task: Task,
        session: ChatSession,
        status: TrajectoryStatus,
        reward: float,
        turn_rewards: Sequence[float] = (),
        token_rewards: Sequence[Sequence[float]] = (),
    ) -> list[Sample]:
        if session.model:
            raise ValueError(f"a session with models.{session.model} is not trained")
        if not session.turns:
            raise ValueError(
                "a session without a turn has no samples: the policy was never asked, or its first "
                f"prompt has no room in {self.max_context} tokens"
            )
        samples = samples_of(
            session.turns,
            trajectory=session.trajectory,
            group_id=task.group_id,
            reward=reward,
            status=status,
        )
        for sample in samples:
            sample.fields, sample.role = dict(task.fields), session.role
            if status == "truncated":
                sample.finish_reason = "length"
        pay(samples, session.turns, turn_rewards, token_rewards)
        return samples


def _checked(samples: Sequence[Sample]) -> list[Sample]:
    """Raises ValueError where they cannot be trained as they are."""
    rewards: dict[int, float] = {}
    for sample in samples:
        chosen = zip(sample.response_mask, sample.weight_versions, strict=True)
        if any(mask and version == MASKED_VERSION for mask, version in chosen):
            raise ValueError("samples have tokens to be trained that the policy did not choose")
        said = sample.cross_entropy_mask
        if said and (len(said) != len(sample.response_ids) or not {*said} <= {0, 1}):
            raise ValueError(
                f"a cross_entropy_mask of {len(said)} entries for {len(sample.response_ids)} "
                "response tokens; it has to have 0 or 1 for each"
            )
        key = sample.trajectory if sample.role else -1
        if rewards.setdefault(key, sample.reward) != sample.reward:
            raise ValueError(
                f"samples of one trajectory have the rewards {rewards[key]:g} and "
                f"{sample.reward:g}: sessions with rewards of their own need roles"
            )
    return list(samples)
