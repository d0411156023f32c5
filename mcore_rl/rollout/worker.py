"""Ray actors with a generation server: of the policy, which makes samples, and of frozen models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import (
    Callable,
    Coroutine,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray

from mcore_rl.agents.single_turn import Group, Prompt, SingleTurnLoop
from mcore_rl.config.errors import ConfigError, DiedError
from mcore_rl.config.rules_rollout import ServedModel
from mcore_rl.config.schema import AgentConfig, RewardConfig, RolloutConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.data.batch import IMAGES, Batch
from mcore_rl.data.images import ImageStore, ImageTokens
from mcore_rl.data.routed_experts import ExpertLayers, add_experts
from mcore_rl.data.sample import Sample
from mcore_rl.data.tokenizer import load_tokenizer, read_stop_ids
from mcore_rl.inference.protocol import (
    DraftCounts,
    GenerationServer,
    Generator,
    SamplingParams,
    ServerMemory,
    ServerSpec,
    SleepTag,
)
from mcore_rl.inference.registry import create_server
from mcore_rl.parallel.devices import get_gpu
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rollout.routing import Stream
from mcore_rl.weight_sync.spec import TransferSpec, WorkerLists

if TYPE_CHECKING:
    from mcore_rl.agents.api_server.http_server import HttpServer
    from mcore_rl.agents.chat_template.codec import ChatCodec, ImageCodec
    from mcore_rl.agents.chat_template.validation import CodecKind
    from mcore_rl.agents.frozen_model import ModelAddress, RemoteGenerator
    from mcore_rl.agents.runner import AgentRunner

T = TypeVar("T")


class IdleTimer:
    """Counts the seconds in which no activity runs (the metric time/servers_idle_s).

    Activities of a server:

    - a group of samples, of training or evaluation, from its begin until it has its rewards;
    - an update of the weights, with or without running requests;
    - its start, and its sleep, when its devices are another role's.

    These overlap: an update in flight runs beside groups, so their times cannot be subtracted one
    by one. All calls are made in one event loop.
    """

    def __init__(self) -> None:
        self._activities: set[Hashable] = set()
        self._idle_since, self._counted_s = time.monotonic(), 0.0

    def begin(self, activity: Hashable) -> None:
        """Add an activity, which may run already."""
        self._counted_s = self.seconds
        self._activities.add(activity)

    def end(self, activity: Hashable) -> None:
        """Remove an activity, if it runs."""
        self._counted_s, self._idle_since = self.seconds, time.monotonic()
        self._activities.discard(activity)

    @property
    def seconds(self) -> float:
        """Idle seconds since the timer was made."""
        idle_s = 0.0 if self._activities else time.monotonic() - self._idle_since
        return self._counted_s + idle_s


class RunningGroups:
    """Running groups of samples of one stream, by id. All calls are made in one event loop.

    Groups have no time limit of their own: they end by those of their requests and of their loop.

    Args:
        idle: Timer to count running groups in.
    """

    def __init__(self, idle: IdleTimer | None = None) -> None:
        self._groups: dict[int, Group] = {}
        self._idle = IdleTimer() if idle is None else idle
        self._has_ended = asyncio.Event()  # a group has, since the last check

    @property
    def ids(self) -> Set[int]:
        """Ids of groups that were begun, and neither collected nor abandoned."""
        return self._groups.keys()

    def begin(self, groups: Mapping[int, Group]) -> None:
        """Add groups with new ids."""
        self._groups |= groups
        for group in groups.values():
            self._idle.begin(group)
            group.add_done_callback(self._end)

    def _end(self, group: Group) -> None:
        self._idle.end(group)
        self._has_ended.set()

    async def collect(self, wait_s: float, at_least: int = 1) -> list[Sample]:
        """Return samples of all groups that have ended, by group id, and forget these groups.

        A group without samples, in which no trajectory has had a turn, gets one failed sample.

        Args:
            wait_s: Maximum wait for `at_least` groups, unless all have ended, or one has failed.

        Raises:
            Exception: that of the first group that failed, which is forgotten. Others stay.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._should_return(at_least):
                    self._has_ended.clear()
                    await self._has_ended.wait()
        ended = sorted(i for i, group in self._groups.items() if group.done())
        for group_id in ended:
            if _has_failed(self._groups[group_id]):
                self._groups.pop(group_id).result()
        return [s for i in ended for s in self._groups.pop(i).result() or [_make_failed_sample(i)]]

    def _should_return(self, at_least: int) -> bool:
        """Return whether `collect` has enough groups, or one that has failed."""
        ended = [group for group in self._groups.values() if group.done()]
        if len(ended) < min(at_least, len(self._groups)):
            return any(map(_has_failed, ended))
        return bool(ended)

    async def abandon(self, group_ids: Sequence[int]) -> None:
        """Cancel groups and forget them; return when nothing of them runs any more.

        Ids of groups that have been collected are no error.
        """
        groups = [self._groups.pop(i) for i in group_ids if i in self._groups]
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)


def _has_failed(group: Group) -> bool:
    """Return whether a group that has ended was cancelled or has raised."""
    return group.cancelled() or group.exception() is not None


def _make_failed_sample(group_id: int) -> Sample:
    error = "no trajectory of the group has had a turn"
    return Sample([0], [], [], [], [], "abort", group_id, reward_error=error, status="failed")


class EventLoopThread:
    """An event loop in a thread, for an actor whose methods run in other threads.

    Args:
        timeout_s: Limit of each call of `run`.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and return its result.

        Raises:
            TimeoutError: it took longer than the limit, and was cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            if not future.cancel():  # the error is the coroutine's own
                raise
            limit = f"{self._timeout_s:g} s"
            raise TimeoutError(f"the server has not answered in {limit}") from error


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Arguments of `RolloutWorker`."""

    model_path: str
    chat_date: str  # in prompts of the policy and of frozen models
    dtype: str
    max_model_tokens: int  # prompt and response of the policy
    rollout: RolloutConfig
    reward: RewardConfig
    agent: AgentConfig
    seed: int
    timeout_s: float  # of each call on the server
    can_sleep: bool = False
    # Visible GPUs of each node of each server. Empty: as Ray sets it.
    gpu_ids: tuple[str, ...] = ()
    models: Mapping[str, ServedModel] = field(default_factory=dict)  # frozen ones, each with a path
    adapter_rank: int = 0  # of a LoRA actor whose adapters the servers take
    experts: ExpertLayers | None = None  # layers whose routed experts are recorded
    images_folder: str = ""  # of the run's ImageStore; "": no images
    max_image_pixels: int = 0
    num_sequences: int | None = None  # as of ServerSpec


class RolloutWorker:
    """Runs a server, an agent loop and rewards, or a further node of a server.

    The ranks of its group are the nodes of one server.

    Args:
        number: Number of the server among those of the run.
    """

    def __init__(self, spec: RolloutSpec, number: int = 0) -> None:
        self._spec = spec
        rank, count = int(os.environ.get("RANK", "0")), spec.rollout.nodes_per_server
        if spec.gpu_ids:
            os.environ[get_gpu().visible_variable] = spec.gpu_ids[number * count + rank]
        self._adapters = {name: m.adapter for name, m in spec.models.items() if m.adapter}
        contexts = (spec.models[name].max_context for name in self._adapters)
        self._server = create_server(
            ServerSpec(
                spec.model_path,
                spec.dtype,
                max([spec.max_model_tokens, *contexts]),
                spec.rollout,
                spec.seed,
                timeout_s=spec.timeout_s,
                can_sleep=spec.can_sleep,
                records_experts=spec.experts is not None,
                images_folder=spec.images_folder,
                adapter_rank=spec.adapter_rank,
                adapters=self._adapters,
                node_rank=rank,
                num_sequences=spec.num_sequences,
            )
        )
        is_agent = spec.agent.loop != "single_turn"
        tokenizer = load_tokenizer(spec.model_path, spec.chat_date, needs_template=is_agent)
        self._reward_manager = RewardManager(spec.reward, decode=tokenizer.decode)
        self._agent: SingleTurnLoop | AgentRunner
        if not is_agent:
            self._agent = SingleTurnLoop(self._server, tokenizer, self._reward_manager)
        else:
            from mcore_rl.agents.runner import AgentRunner  # imports HTTP clients

            self._agent = AgentRunner(
                self._server,
                tokenizer,
                self._reward_manager,
                spec.agent,
                spec.max_model_tokens,
                stops_on_error=spec.reward.on_error == "stop",
                models=spec.models,
                stop_ids=read_stop_ids(spec.model_path),
                images=self._build_image_codec if spec.images_folder else None,
            )
        for name in self._adapters:
            from mcore_rl.agents.frozen_model import AdapterGenerator  # imports HTTP clients

            self._add_model(name, AdapterGenerator(self._server, name))
        self._remotes: list[RemoteGenerator] = []
        self._idle = IdleTimer()
        self._idle.begin("start")
        self._streams: dict[Stream, RunningGroups] = {
            "train": RunningGroups(self._idle),
            "evaluation": RunningGroups(self._idle),
        }
        self._wait = EventLoopThread(spec.timeout_s).run

    def _build_image_codec(self, codec: ChatCodec) -> ImageCodec:
        from mcore_rl.agents.chat_template.codec import ImageCodec

        spec, tokens = self._spec, ImageTokens.load(self._spec.model_path)
        assert tokens is not None  # the data has images for it
        store, limit = ImageStore.open(spec.images_folder), spec.rollout.max_images
        return ImageCodec(codec, tokens, store, limit, spec.max_image_pixels)

    def _call_server(self, call: Callable[[GenerationServer], Coroutine[Any, Any, T]]) -> T | None:
        """Return the result of a call on the server; None on further nodes, when it has ended.

        Raises:
            DiedError: the server has died.
        """
        try:
            with self._check_alive():
                return None if self._server.is_headless else self._wait(call(self._server))
        finally:
            self._server.synchronize_call()

    @contextlib.contextmanager
    def _check_alive(self) -> Iterator[None]:
        """Raise DiedError at the end of the block if the server has died, also for other errors."""
        try:
            yield
        except Exception as error:
            if not self._server.is_dead:
                raise
            reason = self._server.death_reason or error
            raise DiedError(f"{self._server.engine_name} has died ({reason})") from error
        if self._server.is_dead:
            reason = self._server.death_reason
            raise DiedError(f"{self._server.engine_name} has died{reason and f' ({reason})'}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_start=True)
    def prepare(self) -> None:
        """Import packages that `start` needs: its slowest part, without device memory."""
        self._server.prepare()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_start=True)
    def start(self, reads_weights: bool = True) -> None:
        """Start the server, or this node of it: see `GenerationServer.start`."""
        self._wait(self._start(reads_weights))

    async def _start(self, reads_weights: bool) -> None:
        await start_server(self._server, reads_weights=reads_weights)
        self._idle.end("start")

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def begin(self, prompts: Batch, sampling: SamplingParams, stream: Stream) -> None:
        """Start `sampling.n` trajectories per prompt, together, and return at once.

        Trajectories end by agent.timeout_s, the limits of a reward and `sampling.max_tokens`; the
        caller abandons groups that it does not wait for.

        Args:
            prompts: Columns of PromptBatches.

        Raises:
            ConfigError: a group of the same id was begun, and neither collected nor abandoned.
        """
        with self._check_alive():
            self._wait(self._begin(list_prompts(prompts), sampling, stream))

    async def _begin(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, stream: Stream
    ) -> None:
        running = self._streams[stream]
        if taken := sorted(running.ids & {prompt.group_id for prompt in prompts}):
            raise ConfigError(f"stream {stream!r}: groups {taken} have been begun already")
        groups = self._agent.start(prompts, sampling)
        running.begin({p.group_id: group for p, group in zip(prompts, groups, strict=True)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, makes=True)
    def collect(self, stream: Stream, wait_s: float, at_least: int = 1) -> Batch | None:
        """Return samples of whole groups that have ended since the last call, by group id.

        In the stream "train" they have their routed experts, if the server records them.

        Args:
            wait_s: Maximum wait, less than the worker's timeout_s, for `at_least` groups, unless
                all have ended.

        Returns:
            None on further nodes of the server, which are called to notice their death.

        Raises:
            Exception: a reward or a loop raised it; that group is forgotten.
        """
        if self._server.is_headless:
            return None
        if not 0 <= wait_s < self._spec.timeout_s:
            raise ValueError(f"wait_s={wait_s:g}; allowed: 0 to less than {self._spec.timeout_s:g}")
        with self._check_alive():
            samples = self._wait(self._streams[stream].collect(wait_s, at_least))
        batch, experts = Batch.collate(samples), self._spec.experts
        if experts is not None and stream == "train":
            batch = add_experts(batch, samples, experts)
        return batch

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def abandon(self, stream: Stream, group_ids: Sequence[int]) -> None:
        """End groups, so that `collect` never returns them, and their ids may be begun again.

        Returns when nothing of them runs any more. Groups that have been collected are no error.
        """
        self._wait(self._streams[stream].abandon(group_ids))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect_models(self, addresses: Mapping[str, ModelAddress]) -> None:
        """Connect loops and rewards with the servers of frozen models."""
        if self._server.is_headless or not addresses:
            return
        from mcore_rl.agents.frozen_model import RemoteGenerator

        for name, address in addresses.items():
            remote = RemoteGenerator(name, address, self._spec.models[name].timeout_s)
            self._remotes.append(remote)
            self._add_model(name, remote)

    def _add_model(self, name: str, generator: Generator) -> None:
        """Pass a frozen model to loops and rewards."""
        from mcore_rl.agents.chat_template.validation import select_codec
        from mcore_rl.agents.frozen_model import FrozenModel, make_judge_post

        model = self._spec.models[name]
        kind, stop_ids = cast("CodecKind", model.codec), read_stop_ids(model.path)
        tokenizer = load_tokenizer(model.path, self._spec.chat_date)
        codec = select_codec(tokenizer, kind, stop_ids=stop_ids, max_tokens=model.max_context)
        frozen = FrozenModel(generator, codec, _get_sampling(model), model.max_context)
        self._reward_manager.models[name] = make_judge_post(frozen)
        if not isinstance(self._agent, SingleTurnLoop):
            self._agent.models[name] = frozen

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def list_parameters(self) -> WorkerLists | None:
        """Return what the parameters of this server's workers are made of (GenerationServer)."""
        return self._call_server(lambda server: server.list_parameters())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect_weights(
        self, endpoint: RendezvousEndpoint, spec: TransferSpec, first_rank: int
    ) -> None:
        """Connect to all training ranks and all workers of servers; return when all are connected.

        May be called again, when servers have joined or left.

        Args:
            first_rank: Generation rank of this server's first worker.
        """
        self._call_server(lambda server: server.connect_weights(endpoint, spec, first_rank))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(
        self, version: int, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        """Receive a version of the weights: see `GenerationServer.update`."""
        options = {"in_flight": in_flight, "recompute_cache": recompute_cache}
        self._call_server(lambda server: self._replace_weights(server.update(version, **options)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_adapters(self, content: bytes, alpha: float, version: int) -> None:
        """Serve with the adapters of a version: see `GenerationServer.load_adapters`."""
        self._call_server(
            lambda server: self._replace_weights(server.load_adapters(content, alpha, version))
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, path: str, version: int, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        """Load a version from a Hugging Face folder: see `GenerationServer.load_checkpoint`."""
        options = {"in_flight": in_flight, "recompute_cache": recompute_cache}
        self._call_server(
            lambda server: self._replace_weights(server.load_checkpoint(path, version, **options))
        )

    async def _replace_weights(self, update: Coroutine[Any, Any, None]) -> None:
        """Hold trajectories during an update; after a failure in flight until one succeeds."""
        self._hold("update")
        try:
            await update
        finally:
            if not self._server.awaits_update:
                self._release("update")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, keep: bool = False) -> None:
        """Free weights and KV cache. With `keep`, running groups continue after the wake."""
        self._call_server(lambda server: self._sleep(server, keep))

    async def _sleep(self, server: GenerationServer, keep: bool) -> None:
        self._hold("sleep")
        await server.sleep(keep=keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake(self, tag: SleepTag) -> None:
        """Allocate weights or KV cache: see `GenerationServer.wake`."""
        self._call_server(lambda server: self._wake(server, tag))

    async def _wake(self, server: GenerationServer, tag: SleepTag) -> None:
        await server.wake(tag)
        if tag == "kv_cache":
            self._release("sleep")

    def _hold(self, reason: str) -> None:
        """Hold requests of outside programs, and stop the time of trajectories."""
        self._idle.begin(reason)
        if not isinstance(self._agent, SingleTurnLoop):
            self._agent.hold(reason)

    def _release(self, reason: str) -> None:
        self._idle.end(reason)
        if not isinstance(self._agent, SingleTurnLoop):
            self._agent.release(reason)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory(self) -> ServerMemory:
        """Return the memory of all workers of a server on its first node; 0 on further ones."""
        return self._call_server(lambda server: server.memory()) or ServerMemory(0, 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_draft_counts(self) -> DraftCounts:
        """Return the server's counts of drafts since the last call; 0 on further nodes."""
        return self._call_server(lambda server: server.take_draft_counts()) or DraftCounts()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def idle_s(self) -> float | None:
        """Return the server's idle seconds since its start; None on further nodes."""
        return None if self._server.is_headless else self._wait(self._read_idle_s())

    async def _read_idle_s(self) -> float:
        return self._idle.seconds

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shut_down(self) -> None:
        """End all groups, and the server."""
        for groups in self._streams.values():
            self._wait(groups.abandon([*groups.ids]))
        if not isinstance(self._agent, SingleTurnLoop):
            self._wait(self._agent.close())
        self._wait(self._reward_manager.close())
        for remote in self._remotes:
            self._wait(remote.close())
        self._wait(self._server.close())


async def start_server(server: GenerationServer, *, reads_weights: bool = True) -> None:
    """Start a server and print a line on its engine, if it has one."""
    await server.start(reads_weights=reads_weights)
    if server.description:
        print(server.description)


def list_prompts(prompts: Batch) -> list[Prompt]:
    """Convert a batch of prompts."""
    columns = (
        prompts.jagged("prompt_ids"),
        prompts.array("group_ids"),
        prompts.jagged("fields").texts,
        prompts.array("rows"),
        prompts.jagged("messages").texts,
        prompts.array(IMAGES) if IMAGES in prompts else [""] * len(prompts),
    )
    return [
        Prompt(
            ids.tolist(),
            int(group),
            json.loads(fields),
            int(row),
            json.loads(messages),
            tuple(str(images).split()),
        )
        for ids, group, fields, row, messages, images in zip(*columns, strict=True)
    ]


def _get_sampling(model: ServedModel) -> SamplingParams:
    servers = model.servers
    return SamplingParams(
        temperature=servers.temperature,
        top_p=servers.top_p,
        top_k=servers.top_k,
        max_tokens=servers.response_limit,
    )


@dataclass(frozen=True, slots=True)
class ModelServerSpec:
    """Arguments of `ModelServer`."""

    model_path: str
    dtype: str
    max_context: int  # tokens of a prompt and its response
    servers: RolloutConfig
    seed: int
    timeout_s: float  # of each call on the server
    key: str = field(repr=False)  # API key of requests
    num_sequences: int | None = None  # as of ServerSpec


class ModelServer:
    """Runs the server of a frozen model: it answers HTTP requests, and never gets new weights."""

    def __init__(self, spec: ModelServerSpec) -> None:
        self._spec = spec
        self._server = create_server(
            ServerSpec(
                spec.model_path,
                spec.dtype,
                spec.max_context,
                spec.servers,
                spec.seed,
                timeout_s=spec.timeout_s,
                num_sequences=spec.num_sequences,
            )
        )
        self._http: HttpServer | None = None
        self._wait = EventLoopThread(spec.timeout_s).run

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_start=True)
    def prepare(self) -> None:
        """Import packages that `start` needs: its slowest part, without device memory."""
        self._server.prepare()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_start=True)
    def start(self) -> str:
        """Start the server; return its URL on this node's address in the Ray cluster."""
        self._wait(self._start(ray.util.get_node_ip_address()))
        assert self._http is not None
        return self._http.url

    async def _start(self, host: str) -> None:
        from mcore_rl.agents.api_server.app import build_generate_app
        from mcore_rl.agents.api_server.http_server import HttpServer

        await start_server(self._server)
        app = build_generate_app(self._server, self._spec.key, self._spec.max_context)
        self._http = HttpServer(app, host)
        await self._http.start()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shut_down(self) -> None:
        """End the HTTP server and the generation server."""
        if self._http is not None:
            self._wait(self._http.close())
        self._wait(self._server.close())
