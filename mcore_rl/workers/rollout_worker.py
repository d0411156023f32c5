"""A generation server as an actor: prompts in, samples with rewards out."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from mcore_rl.config.agent_schema import AgentConfig
from mcore_rl.config.errors import ConfigError, DiedError
from mcore_rl.config.resolve_models import ServedModel
from mcore_rl.config.schema import RewardConfig, RolloutConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.data.batch import Batch
from mcore_rl.data.sample import Sample
from mcore_rl.data.tokenizer import load_tokenizer, stop_ids_of
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.rewards.judge import Judge
from mcore_rl.rollout.agent_loop import Prompt, SingleTurnLoop
from mcore_rl.rollout.protocol import GenerationServer, SamplingParams, ServerMemory, SleepTag
from mcore_rl.rollout.vllm_nodes import HeadlessWorkers, ServerNodes
from mcore_rl.rollout.vllm_server import VLLMServer
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.workers.expert_records import ExpertLayers, with_experts
from mcore_rl.workers.idle_time import IdleTime
from mcore_rl.workers.loop_thread import LoopThread
from mcore_rl.workers.running_groups import RunningGroups

if TYPE_CHECKING:
    from mcore_rl.agents.choose import CodecKind
    from mcore_rl.agents.remote import ModelAddress, RemoteGenerator
    from mcore_rl.agents.runner import AgentRunner

T = TypeVar("T")
Stream = Literal["train", "evaluation"]  # what samples are for


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    model_path: str
    chat_date: str  # in prompts of the policy and of frozen models
    dtype: str
    max_model_tokens: int  # prompt and response
    rollout: RolloutConfig
    reward: RewardConfig
    agent: AgentConfig
    seed: int
    timeout_s: float  # of everything that the worker asks of its server
    can_sleep: bool = False
    # Of each node of each server, where they are not those that Ray shows it.
    gpu_ids: tuple[str, ...] = ()
    models: Mapping[str, ServedModel] = field(default_factory=dict)  # frozen ones, each with a path
    experts: ExpertLayers | None = None  # of which those that are used are recorded; None: of none


class RolloutWorker:
    """Runs one server and its event loop, or one node of a server that spans several.

    The ranks of its group are the nodes of the server with this number.
    """

    def __init__(self, spec: RolloutSpec, number: int = 0) -> None:
        self._spec = spec
        rank, count = int(os.environ.get("RANK", "0")), spec.rollout.nodes_per_server
        if spec.gpu_ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = spec.gpu_ids[number * count + rank]
        self._nodes: ServerNodes | None = None
        if count > 1:
            self._nodes = ServerNodes(count, rank, count, spec.timeout_s)
        server = VLLMServer(
            spec.model_path,
            spec.dtype,
            spec.max_model_tokens,
            spec.rollout,
            spec.seed,
            timeout_s=spec.timeout_s,
            can_sleep=spec.can_sleep,
            nodes=self._nodes,
            records_experts=spec.experts is not None,
        )
        self._server: GenerationServer = server
        self._headless: HeadlessWorkers | None = None
        if self._nodes is not None and not self._nodes.is_first:
            self._headless = HeadlessWorkers(server)
        tokenizer = load_tokenizer(spec.model_path, spec.chat_date)
        self._judge = Judge(spec.reward, decode=tokenizer.decode)
        self._agent: SingleTurnLoop | AgentRunner
        if spec.agent.loop == "single_turn":
            self._agent = SingleTurnLoop(self._server, tokenizer, self._judge)
        else:
            from mcore_rl.agents.runner import AgentRunner  # imports clients of HTTP

            self._agent = AgentRunner(
                self._server,
                tokenizer,
                self._judge,
                spec.agent,
                spec.max_model_tokens,
                stops_on_error=spec.reward.on_error == "stop",
                models=spec.models,
                stop_ids=stop_ids_of(spec.model_path),
            )
        self._remotes: list[RemoteGenerator] = []
        self._idle = IdleTime()
        self._idle.begin("start")
        self._streams: dict[Stream, RunningGroups] = {
            "train": RunningGroups(self._idle),
            "evaluation": RunningGroups(self._idle),
        }
        self._wait = LoopThread(spec.timeout_s).wait

    def _ask(self, ask: Callable[[GenerationServer], Coroutine[Any, Any, T]]) -> T | None:
        """What the server answers; None on its further nodes, when the first one has the answer.

        Raises DiedError when the server has died.
        """
        try:
            with self._alive():
                return None if self._headless else self._wait(ask(self._server))
        finally:
            if self._nodes is not None:
                self._nodes.called()

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        """Raises DiedError when the server has died by the end, whatever was made of it inside."""
        try:
            yield
        except Exception as error:
            if not self._server.is_dead:
                raise
            reason = self._server.death_reason or error
            raise DiedError(f"vLLM's engine has died ({reason})") from error
        if self._server.is_dead:
            reason = self._server.death_reason
            raise DiedError(f"vLLM's engine has died{reason and f' ({reason})'}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_start=True)
    def prepare(self) -> None:
        """Import what `start` needs: the slowest part of it, and without device memory."""
        self._server.prepare()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_start=True)
    def start(self, reads_weights: bool = True) -> None:
        """Start the server, which serves; without weights it waits for an update."""
        self._wait(self._started(reads_weights))

    async def _started(self, reads_weights: bool) -> None:
        await (self._headless or self._server).start(reads_weights=reads_weights)
        if self._headless is None and isinstance(self._server, VLLMServer):
            print(f"vLLM's model runner: {self._server.model_runner}")
        self._idle.end("start")

    def _batch(self, samples: list[Sample], records: bool) -> Batch:
        batch, experts = Batch.of(samples), self._spec.experts
        if experts is not None and records:
            batch = with_experts(batch, samples, experts)
        return batch

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def begin(self, prompts: Batch, sampling: SamplingParams, stream: Stream) -> None:
        """Starts `sampling.n` trajectories per prompt, together, and returns at once.

        This and the two calls below are for a group of one server. What has been begun ends by the
        limits of a trajectory (agent.timeout_s), of a reward and of `sampling.max_tokens`; the
        caller limits all else by `abandon`.

        `prompts` has prompt_ids, group_ids, fields and messages (JSON, as Jagged.of_texts), and
        rows (of their file). Raises ConfigError when a group of that id has been begun and neither
        collected nor abandoned.
        """
        asked = prompts_of(prompts)
        with self._alive():
            self._wait(self._begin(asked, sampling, stream))

    async def _begin(
        self, asked: Sequence[Prompt], sampling: SamplingParams, stream: Stream
    ) -> None:
        own = self._streams[stream]
        if taken := sorted(own.ids & {prompt.group_id for prompt in asked}):
            raise ConfigError(f"stream {stream!r}: groups {taken} have been begun already")
        groups = self._agent.start(asked, sampling)
        own.begin({prompt.group_id: one for prompt, one in zip(asked, groups, strict=True)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, makes=True)
    def collect(self, stream: Stream, wait_s: float, at_least: int = 1) -> Batch | None:
        """Samples of the groups that have ended since the last call, in order of group ids.

        Waits up to `wait_s`, less than the worker's timeout_s, until there are `at_least` so many
        or none runs any more. Returns whole groups, each once, or an empty batch. In the stream
        "train" they have the experts of their tokens, where the server records them.

        None on further nodes of the server, which are asked so that their death is told.

        Raises what a reward or a loop has raised; that group is forgotten.
        """
        if self._headless:
            return None
        if not 0 <= wait_s < self._spec.timeout_s:
            raise ValueError(f"wait_s={wait_s:g}; allowed: 0 to less than {self._spec.timeout_s:g}")
        with self._alive():
            samples = self._wait(self._streams[stream].collect(wait_s, at_least))
        return self._batch(samples, stream == "train")

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def abandon(self, stream: Stream, group_ids: Sequence[int]) -> None:
        """Ends groups and forgets them: `collect` never returns them.

        Returns when nothing of them runs any more: then their ids may be begun anew. Groups that
        have been collected are no error.
        """
        self._wait(self._streams[stream].abandon(group_ids))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect_models(self, addresses: Mapping[str, ModelAddress]) -> None:
        """Where the servers of the frozen models are that loops and rewards talk to."""
        if self._headless or not addresses:
            return
        from mcore_rl.agents.choose import codec_for
        from mcore_rl.agents.judge_model import chat_of
        from mcore_rl.agents.remote import FrozenModel, RemoteGenerator

        for name, address in addresses.items():
            model = self._spec.models[name]
            remote = RemoteGenerator(name, address, model.timeout_s)
            self._remotes.append(remote)
            kind, stop_ids = cast("CodecKind", model.codec), stop_ids_of(model.path)
            tokenizer = load_tokenizer(model.path, self._spec.chat_date)
            longest = model.max_context
            codec = codec_for(tokenizer, kind, stop_ids=stop_ids, max_tokens=longest)
            found = FrozenModel(remote, codec, sampling_of(model), model.max_context)
            self._judge.models[name] = chat_of(found)
            if not isinstance(self._agent, SingleTurnLoop):
                self._agent.models[name] = found

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect_weights(
        self, endpoint: RendezvousEndpoint, spec: TransferSpec, first_rank: int
    ) -> None:
        """Returns when all training ranks and all workers of servers are connected.

        The workers of all servers are the generation ranks in a row: these are those from
        `first_rank` on. May be called again, when servers have come or gone.
        """
        self._ask(lambda server: server.connect_weights(endpoint, spec, first_rank))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(
        self, version: int, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        """As GenerationServer.update: `in_flight` keeps the requests that run."""
        how = {"in_flight": in_flight, "recompute_cache": recompute_cache}
        self._ask(lambda server: self._replacing(server.update(version, **how)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, path: str, version: int, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        """As `receive_weights`."""
        how = {"in_flight": in_flight, "recompute_cache": recompute_cache}
        self._ask(lambda server: self._replacing(server.load_checkpoint(path, version, **how)))

    async def _replacing(self, update: Coroutine[Any, Any, None]) -> None:
        """Where an update has failed that is made again, its requests and their time wait on."""
        self._hold("update")
        try:
            await update
        finally:
            if not self._server.awaits_update:
                self._release("update")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, keep: bool = False) -> None:
        """Free weights and KV cache. `keep`: what has been begun goes on after the wake."""
        self._ask(lambda server: self._sleep(server, keep))

    async def _sleep(self, server: GenerationServer, keep: bool) -> None:
        self._hold("sleep")
        await server.sleep(keep=keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake(self, tag: SleepTag) -> None:
        self._ask(lambda server: self._wake(server, tag))

    async def _wake(self, server: GenerationServer, tag: SleepTag) -> None:
        await server.wake(tag)
        if tag == "kv_cache":
            self._release("sleep")

    def _hold(self, reason: str) -> None:
        """The server has something else to do than requests: those of programs outside wait.

        The time of trajectories stands still.
        """
        self._idle.begin(reason)
        if not isinstance(self._agent, SingleTurnLoop):
            self._agent.hold(reason)

    def _release(self, reason: str) -> None:
        self._idle.end(reason)
        if not isinstance(self._agent, SingleTurnLoop):
            self._agent.release(reason)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory(self) -> ServerMemory:
        """Of all workers of a server, on its first node."""
        return self._ask(lambda server: server.memory()) or ServerMemory(0, 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def idle_s(self) -> float | None:
        """Seconds since its start in which the server has had nothing to do; of its first node."""
        return None if self._headless else self._wait(self._idle_s())

    async def _idle_s(self) -> float:
        return self._idle.seconds

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shut_down(self) -> None:
        if self._headless:
            self._headless.close()
        for groups in self._streams.values():
            self._wait(groups.abandon([*groups.ids]))
        if not isinstance(self._agent, SingleTurnLoop):
            self._wait(self._agent.close())
        self._wait(self._judge.close())
        for remote in self._remotes:
            self._wait(remote.close())
        self._wait(self._server.close())


def prompts_of(prompts: Batch) -> list[Prompt]:
    columns = (
        prompts.jagged("prompt_ids"),
        prompts.array("group_ids"),
        prompts.jagged("fields").texts,
        prompts.array("rows"),
        prompts.jagged("messages").texts,
    )
    return [
        Prompt(ids.tolist(), int(group), json.loads(fields), int(row), json.loads(messages))
        for ids, group, fields, row, messages in zip(*columns, strict=True)
    ]


def sampling_of(model: ServedModel) -> SamplingParams:
    servers = model.servers
    return SamplingParams(
        temperature=servers.temperature,
        top_p=servers.top_p,
        top_k=servers.top_k,
        max_tokens=servers.max_response_tokens,
    )
