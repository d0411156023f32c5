"""Run the loop that agent.loop names, for many trajectories at once."""

from __future__ import annotations

import asyncio
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mcore_rl.agents.api_server.protocol import RefusalError
from mcore_rl.agents.api_server.sessions import ApiServer, SessionHandler, SessionLimits, draw_key
from mcore_rl.agents.chat_template.codec import (
    ChatCodec,
    ChatTokenizer,
    ContextFullError,
    ImageCodec,
    ValidatedChatTemplate,
    parse_messages,
    replace_surrogates,
)
from mcore_rl.agents.chat_template.validation import CodecKind, select_codec
from mcore_rl.agents.environments.base import Environment
from mcore_rl.agents.environments.coding import Coding
from mcore_rl.agents.environments.openenv import OpenEnv
from mcore_rl.agents.frozen_model import FrozenModel
from mcore_rl.agents.loops import (
    AgentLoop,
    ApiSession,
    EnvironmentLoop,
    Task,
    ToolLoop,
    UserLoop,
)
from mcore_rl.agents.program import ProgramLoop
from mcore_rl.agents.session import ChatSession, GenerationError, Turn, draw_session_seed
from mcore_rl.agents.single_turn import Group, Prompt, Reward, gather_samples
from mcore_rl.agents.tools.base import ToolSet, close_or_report
from mcore_rl.agents.tools.sources import load_tool_sources, shut_down_sources, try_mcp_servers
from mcore_rl.agents.trajectory import MASKED_VERSION, assign_turn_rewards, build_samples
from mcore_rl.agents.verifiers.loop import VerifiersLoop
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.event_loop import run_coroutine
from mcore_rl.config.schema import AgentConfig
from mcore_rl.data.sample import Sample, TrajectoryStatus
from mcore_rl.inference.lifecycle import Gate
from mcore_rl.inference.protocol import Generator, SamplingParams
from mcore_rl.rewards.registry import RewardError

LOOPS: Registry[Callable[..., Any]] = Registry("agent.loop", ("agent",), "agent.settings")
LOOPS.register("tools")(ToolLoop)
LOOPS.register("environment")(EnvironmentLoop)
LOOPS.register("program")(ProgramLoop)
LOOPS.register("user")(UserLoop)
LOOPS.register("verifiers")(VerifiersLoop)
ENVIRONMENTS: Registry[Callable[..., Any]] = Registry("agent.environment", ("fields",))
ENVIRONMENTS.register("code")(Coding)
ENVIRONMENTS.register("openenv")(OpenEnv)
_EXAMPLES = "mcore_rl.examples.environments"  # the environments of toy tasks
ENVIRONMENTS.register_path("countdown", f"{_EXAMPLES}.countdown:Countdown")
ENVIRONMENTS.register_path("guessing", f"{_EXAMPLES}.guessing:Guessing")
MAX_ROLES = 64  # sessions that a program may open in a trajectory
# Methods of `Agent` under the names of the last release.
_RENAMED = {
    "judged": "score_samples",
    "rewarded": "build_samples",
    "served": "open_api_session",
    "begin_anew": "restart",
}


def check_agent(
    config: AgentConfig,
    tokenizer: ChatTokenizer,
    models: Collection[str] = (),
    stop_ids: Sequence[int] = (),
    max_context: int | None = None,
) -> tuple[ValidatedChatTemplate, list[object]]:
    """Return the codec and the tools of a run; no tool is set up.

    Args:
        models: Names of the frozen models.
        stop_ids: Tokens at which the server ends a turn (`data.tokenizer.read_stop_ids`).
        max_context: Tokens of a prompt.

    Raises:
        ConfigError: The chat template, a tool, the loop or its environment cannot be used.
    """
    kind = cast(CodecKind, config.codec)
    codec = select_codec(tokenizer, kind, stop_ids=stop_ids, max_tokens=max_context)
    sources = load_tool_sources(config)
    if sources and codec.tool_refusal:
        raise ConfigError(f"agent.tools: the codec {codec.name} takes none: {codec.tool_refusal}")
    settings = LOOPS.build_settings(config.loop, config.settings)
    if (model := getattr(settings, "model", None)) is not None and model not in models:
        raise ConfigError(
            f"agent.settings.model={model!r} is none of models; allowed: "
            f"{', '.join(models) or 'none, as models is empty'}"
        )
    if config.environment:
        environment = ENVIRONMENTS.build_settings(config.environment, config.environment_settings)
        if check := getattr(ENVIRONMENTS[config.environment], "check", None):
            check(environment)
    return codec, sources


def try_out(config: AgentConfig, fields: Mapping[str, Any]) -> None:
    """Check, once before a run, what takes seconds: MCP servers, and the loop's `try_out`.

    Args:
        fields: Columns of a row.

    Raises:
        ConfigError: The loop or a server of agent.mcp_servers cannot work.
    """
    run_coroutine(try_mcp_servers(config))
    if check := getattr(LOOPS[config.loop], "try_out", None):
        check(LOOPS.build_settings(config.loop, config.settings), config.max_turns, fields)


class TrajectoryTimeout:
    """Limits the time of a trajectory, as `asyncio.timeout` does; its clock can be paused."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._timeout = limit_s, asyncio.timeout(limit_s)
        self._clock = asyncio.get_running_loop().time
        self._num_pauses = 0
        self._remaining_s = 0.0

    async def __aenter__(self) -> TrajectoryTimeout:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._timeout.__aexit__(*error)

    def when(self) -> float | None:
        """Return the end, in the time of the event loop; None while paused."""
        return self._timeout.when()

    def expired(self) -> bool:
        """Return whether the time is over."""
        return self._timeout.expired()

    def pause(self) -> None:
        """Stop the clock. After n calls, n calls of `resume` start it again."""
        self._num_pauses += 1
        if self._num_pauses == 1:
            end = self.when()
            assert end is not None  # only `pause` removes it
            self._remaining_s = end - self._clock()
            self._reschedule(None)

    def resume(self) -> None:
        """Undo a `pause`."""
        self._num_pauses -= 1
        if not self._num_pauses:
            self._reschedule(self._clock() + self._remaining_s)

    def restart(self) -> None:
        """Give back the whole time. A paused clock stays paused."""
        self._remaining_s = self._limit_s
        if not self._num_pauses:
            self._reschedule(self._clock() + self._limit_s)

    def _reschedule(self, end: float | None) -> None:
        if not self.expired():  # else the trajectory is being cancelled
            self._timeout.reschedule(end)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock within a block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()


@dataclass(slots=True)
class _Trajectory:
    """A trajectory that is being generated."""

    group_size: int  # trajectories of the prompt
    timeout: TrajectoryTimeout
    sessions: list[ChatSession] = field(default_factory=list)  # with the policy
    num_sessions: int = 0  # with any model


class AgentRunner:
    """Runs loops against a server; it is the `Agent` that they get (see `loops.Agent`)."""

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
        images: Callable[[ChatCodec], ImageCodec] | None = None,
    ) -> None:
        """Load the codec, the tools and the loop.

        Args:
            models: Names of those that will be in `self.models` when loops run.
            stop_ids: Tokens at which the server ends a turn (`data.tokenizer.read_stop_ids`).
            images: Makes the codec of a model that takes images; None: it takes none.

        Raises:
            ConfigError: The chat template, a tool or the loop cannot be used.
        """
        self._generator, self._reward, self._config = generator, reward, config
        self._tokenizer = tokenizer
        self.max_context, self._stops_on_error = max_context, stops_on_error
        codec, self._sources = check_agent(config, tokenizer, models, stop_ids, max_context)
        self.codec: ChatCodec = codec if images is None else images(codec)
        self.models: dict[str, FrozenModel] = {}
        self.max_turns = config.max_turns
        self._running: dict[tuple[int, int], _Trajectory] = {}  # by group id and trajectory
        self.gate = Gate()  # holds requests of programs, and trajectories that have yet to begin
        max_images = self.codec.max_images if isinstance(self.codec, ImageCodec) else 0
        self._api_server = ApiServer(max_context, max_images)
        self._loop: AgentLoop = LOOPS.bind(config.loop, config.settings)(self)

    def __getattr__(self, name: str) -> Any:
        if name not in _RENAMED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"agent.{name} is now agent.{_RENAMED[name]}", FutureWarning, stacklevel=2)
        return getattr(self, _RENAMED[name])

    async def close(self) -> None:
        """End what the loop has started, MCP servers, and the HTTP server of programs."""
        if close := getattr(self._loop, "close", None):
            await close()
        await shut_down_sources(self._sources)
        await self._api_server.close()

    def hold(self, reason: str) -> None:
        """Hold requests of programs, and stop the clocks of trajectories, until `release`."""
        if self.gate.is_open:
            for trajectory in self._running.values():
                trajectory.timeout.pause()
        self.gate.hold(reason)

    def release(self, reason: str) -> None:
        """Undo `hold` for a reason."""
        was_open = self.gate.is_open
        self.gate.release(reason)
        if self.gate.is_open and not was_open:
            for trajectory in self._running.values():
                trajectory.timeout.resume()

    async def run_all(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Sample]:
        """Return `sampling.n` trajectories per prompt, in order. The first failure cancels others.

        The seed of a trajectory is that of the response in its place: see SingleTurnLoop.
        """
        return await gather_samples(self.start(prompts, sampling))

    def start(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Group]:
        """Start a group for each prompt. Call it in an event loop."""
        return [asyncio.create_task(self._run_group(prompt, sampling)) for prompt in prompts]

    async def _run_group(self, prompt: Prompt, sampling: SamplingParams) -> list[Sample]:
        tasks = [self._build_task(prompt, number, sampling) for number in range(sampling.n)]
        running = [asyncio.create_task(self._run(task, sampling.n)) for task in tasks]
        return await gather_samples(running)

    def _build_task(self, prompt: Prompt, number: int, sampling: SamplingParams) -> Task:
        seed = sampling.seed
        if seed is not None:
            seed += prompt.group_id * sampling.n + number
        turn_tokens = min(self._config.max_turn_tokens or sampling.max_tokens, sampling.max_tokens)
        return Task(
            parse_messages(prompt.messages),
            prompt.fields,
            prompt.group_id,
            number,
            prompt.row,
            replace(sampling, n=1, seed=seed, max_tokens=turn_tokens, group=str(prompt.group_id)),
            sampling.max_tokens,
        )

    async def _run(self, task: Task, group_size: int) -> list[Sample]:
        await self.gate.wait_open()
        key, timeout = (task.group_id, task.trajectory), TrajectoryTimeout(self._config.timeout_s)
        self._running[key] = _Trajectory(group_size, timeout)
        try:
            async with timeout:
                samples = _check_samples(await self._loop.run(task))
        except TimeoutError as error:
            samples = (
                self._build_cut_off(task, "aborted")
                if timeout.expired()
                else self._build_failed(task, error)
            )
        except ContextFullError as error:  # not caught by the loop: a limit like time
            samples = self._build_cut_off(task, "truncated") or self._build_failed(task, error)
        except RewardError:
            raise
        except GenerationError as error:
            raise error.__cause__ or error from None
        except Exception as error:  # noqa: BLE001 (of a user's loop or environment)
            samples = self._build_failed(task, error)
        finally:
            del self._running[key]
        segments: Counter[int] = Counter()
        for sample in samples:
            sample.group_id = task.group_id
            sample.trajectory = sample.trajectory if sample.role else task.trajectory
            sample.segment = segments[sample.trajectory]
            segments[sample.trajectory] += 1
        return samples

    def _build_cut_off(self, task: Task, status: TrajectoryStatus) -> list[Sample]:
        """Build the samples of all sessions of a trajectory so far, with a reward of 0."""
        sessions = self._running[task.group_id, task.trajectory].sessions
        used = [session for session in sessions if session.turns]
        return [s for session in used for s in self.build_samples(task, session, status, 0.0)]

    def _build_failed(self, task: Task, error: Exception) -> list[Sample]:
        """Build the samples of a trajectory that failed.

        Raises:
            RewardError: The run stops on errors.
        """
        reason = replace_surrogates(
            f"agent.loop={self._config.loop!r} raised {type(error).__name__}: {error}"
        )
        if self._stops_on_error:
            where = f"row {task.row} of the data (group {task.group_id})"
            raise RewardError(f"{reason}; it was asked about {where}") from error
        samples = self._build_cut_off(task, "failed")
        for sample in samples:
            sample.reward_error = reason
        return samples

    # The methods of loops.Agent.

    def session(self, task: Task, *, model: str = "", role: str = "") -> ChatSession:
        """Begin a conversation; see `loops.Agent`."""
        trajectory = self._running[task.group_id, task.trajectory]
        name = f"{task.group_id}/{task.trajectory}/{trajectory.num_sessions}"
        seed = draw_session_seed(task.sampling.seed, trajectory.num_sessions)
        if model and (role or model not in self.models):
            raise ConfigError(
                f"agent.session(model={model!r}, role={role!r}); allowed: one of models "
                f"({', '.join(self.models) or 'there is none'}), without a role"
            )
        trajectory.num_sessions += 1
        if model:
            frozen = self.models[model]
            sampling = replace(frozen.sampling, seed=seed)
            context = frozen.max_context
            return ChatSession(name, frozen.generator, frozen.codec, sampling, context, model=model)
        number = task.trajectory
        if role:  # numbered after the trajectories without a role
            number += trajectory.group_size * (1 + len(trajectory.sessions))
        sampling, context = replace(task.sampling, seed=seed), self.max_context
        session = ChatSession(
            name,
            self._generator,
            self.codec,
            sampling,
            context,
            max_response=task.max_tokens,
            role=role,
            trajectory=number,
        )
        trajectory.sessions.append(session)
        return session

    def restart(self, task: Task) -> None:
        """Forget the sessions of a trajectory; see `loops.Agent`."""
        trajectory = self._running[task.group_id, task.trajectory]
        trajectory.sessions.clear()
        trajectory.num_sessions = 0
        trajectory.timeout.restart()

    @asynccontextmanager
    async def open_api_session(self, task: Task) -> AsyncIterator[ApiSession]:
        """Open a session for a client of OpenAI's API; see `loops.Agent`."""
        url, handlers = await self._api_server.start(), list[SessionHandler]()

        def open_session(role: str) -> ApiSession:
            session = ApiSession(url, draw_key(), self.session(task, role=role))
            limits = SessionLimits(self.max_turns, self.max_context)
            handler = SessionHandler(
                session, self.codec, self._tokenizer, limits, self.gate, open_role
            )
            self._api_server.add(session.api_key, handler)
            handlers.append(handler)
            return session

        def open_role(role: str) -> ApiSession:
            if len(handlers) > MAX_ROLES:
                reason = f"the trajectory has {MAX_ROLES} sessions of roles; no more are allowed"
                raise RefusalError(429, "too_many_sessions", reason)
            session = open_session(role)
            handlers[0].session.roles.append(session)
            return session

        try:
            yield open_session("")
        finally:
            for handler in handlers:
                await self._api_server.remove(handler.session.api_key)
            for handler in handlers:
                if handler.failure is not None:
                    raise handler.failure

    def tools(self) -> AbstractAsyncContextManager[ToolSet]:
        """Set up the tools of a trajectory; see `loops.Agent`."""
        return ToolSet(self._sources, self._config.tool_timeout_s)

    @asynccontextmanager
    async def environment(self, task: Task) -> AsyncIterator[Environment]:
        """Make the environment of a trajectory; see `loops.Agent`."""
        make = ENVIRONMENTS.bind(self._config.environment, self._config.environment_settings)
        environment: Environment = make(task.fields)
        try:
            yield environment
        finally:
            name = f"agent.environment={self._config.environment!r}, for row {task.row},"
            await close_or_report(name, environment.close)

    async def score_samples(
        self,
        task: Task,
        session: ChatSession,
        status: TrajectoryStatus,
        text: str,
        helpers: Sequence[ChatSession] = (),
    ) -> list[Sample]:
        """Build samples with the reward of config.reward; see `loops.Agent`."""
        main = self.build_samples(task, session, status, 0.0)
        used = [helper for helper in helpers if helper.turns]
        samples = [s for helper in used for s in self.build_samples(task, helper, status, 0.0)]
        samples += main
        where = f"row {task.row} of the data (group {task.group_id})"
        last = samples[-1:]
        for sample in last:
            sample.messages = [message.to_dict() for message in task.messages]
            sample.turn_texts = [self._decode_turn(turn) for turn in session.turns]
            sample.turn_token_ids = [list(turn.token_ids) for turn in session.turns]
        # A reward has a timeout of its own.
        with self._running[task.group_id, task.trajectory].timeout.paused():
            await self._reward(last, [text], task.max_tokens, where)
        for sample in samples[:-1]:
            sample.reward, sample.reward_parts = last[0].reward, last[0].reward_parts
            sample.reward_error = last[0].reward_error
        if last:
            assign_turn_rewards(main, session.turns, last[0].turn_rewards, last[0].token_rewards)
        return samples

    def _decode_turn(self, turn: Turn) -> str:
        """Return the text of a turn, with calls and reasoning, without the token that ends it."""
        ids = turn.token_ids
        if turn.finish_reason == "stop" and ids[-1] in self.codec.stop_ids:  # else by a stop text
            ids = ids[:-1]
        return self._tokenizer.decode([*ids], skip_special_tokens=False)

    def build_samples(
        self,
        task: Task,
        session: ChatSession,
        status: TrajectoryStatus,
        reward: float,
        turn_rewards: Sequence[float] = (),
        token_rewards: Sequence[Sequence[float]] = (),
    ) -> list[Sample]:
        """Build samples with a known reward; see `loops.Agent`."""
        if session.model:
            raise ValueError(f"a session with models.{session.model} is not trained")
        if not session.turns:
            raise ValueError(
                "a session without a turn has no samples: the policy was never asked, or its first "
                f"prompt has no room in {self.max_context} tokens"
            )
        samples = build_samples(
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
        assign_turn_rewards(samples, session.turns, turn_rewards, token_rewards)
        return samples


def _check_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of a loop; raise ValueError if they cannot be trained on."""
    rewards: dict[int, float] = {}
    for sample in samples:
        trained = zip(sample.response_mask, sample.weight_versions, strict=True)
        if any(mask and version == MASKED_VERSION for mask, version in trained):
            raise ValueError("samples have tokens to be trained that the policy did not choose")
        mask = sample.cross_entropy_mask
        if mask and (len(mask) != len(sample.response_ids) or not {*mask} <= {0, 1}):
            raise ValueError(
                f"a cross_entropy_mask of {len(mask)} entries for {len(sample.response_ids)} "
                "response tokens; it has to have 0 or 1 for each"
            )
        key = sample.trajectory if sample.role else -1
        if rewards.setdefault(key, sample.reward) != sample.reward:
            raise ValueError(
                f"samples of one trajectory have the rewards {rewards[key]:g} and "
                f"{sample.reward:g}: sessions with rewards of their own need roles"
            )
    return list(samples)
