"""A generation server as an actor: prompts in, samples with rewards out."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mcore_rl.config.schema import RewardConfig, RolloutConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.data.batch import Batch
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.rewards.base import Judge
from mcore_rl.rollout.agent_loop import Prompt, SingleTurnLoop
from mcore_rl.rollout.protocol import SamplingParams
from mcore_rl.rollout.vllm_server import VLLMServer
from mcore_rl.weight_sync.announced import Announced
from mcore_rl.weight_sync.checkpoint_engine import RoutePlan
from mcore_rl.weight_sync.colocated import ShardEndpoint
from mcore_rl.weight_sync.disaggregated import Endpoint
from mcore_rl.weight_sync.stream import StreamEndpoint

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    model_path: str
    dtype: str
    max_model_tokens: int  # prompt and response
    rollout: RolloutConfig
    reward: RewardConfig
    seed: int
    timeout_s: float  # of everything that the worker asks of its server


class RolloutWorker:
    """Owns one server and the event loop that it lives on."""

    def __init__(self, spec: RolloutSpec) -> None:
        self._spec = spec
        self._server = VLLMServer(
            spec.model_path,
            spec.dtype,
            spec.max_model_tokens,
            spec.rollout,
            spec.seed,
            timeout_s=spec.timeout_s,
        )
        tokenizer = load_tokenizer(spec.model_path)
        self._agent = SingleTurnLoop(
            self._server, tokenizer, Judge(spec.reward.name, spec.reward.settings)
        )
        self._events = asyncio.new_event_loop()
        threading.Thread(target=self._events.run_forever, daemon=True).start()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises TimeoutError after the spec's timeout_s, and then the work is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._events)
        try:
            return future.result(self._spec.timeout_s)
        except TimeoutError as error:
            if not future.cancel():  # it ended, with this error
                raise
            limit = f"{self._spec.timeout_s:g} s"
            raise TimeoutError(f"the server has not answered in {limit}") from error

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_start=True)
    def start(self) -> None:
        self._wait(self._server.start())

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def generate(self, prompts: Batch, sampling: SamplingParams) -> tuple[Batch]:
        """`sampling.n` samples a prompt, in one batch.

        `prompts` has prompt_ids, group_ids, fields (JSON) and rows (of their file).
        """
        columns = (
            prompts.jagged("prompt_ids"),
            prompts.array("group_ids"),
            prompts.array("fields"),
            prompts.array("rows"),
        )
        asked = [
            Prompt(ids.tolist(), int(group_id), json.loads(str(fields)), int(row))
            for ids, group_id, fields, row in zip(*columns, strict=True)
        ]
        return (Batch.of(self._wait(self._agent.run_all(asked, sampling))),)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, endpoint: StreamEndpoint, version: int) -> None:
        self._wait(self._server.update_weights(endpoint, version))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_layout(self) -> list[Announced]:
        """What each vLLM worker of this server says about its parameters."""
        return self._wait(self._server.weight_layout())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_shards(self, endpoints: Sequence[ShardEndpoint], version: int) -> None:
        """Takes this server's part of the endpoints, which are those of all generation ranks."""
        first, tp = self._first_worker, self._spec.rollout.tp
        self._wait(self._server.receive_shards(endpoints[first : first + tp], version))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_checkpoint_engine(self, endpoint: Endpoint, plan: RoutePlan) -> None:
        """Returns when all training ranks and all workers of servers are in reach of each other."""
        self._wait(self._server.join_checkpoint_engine(endpoint, plan, self._first_worker))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_checkpoint(self, version: int) -> None:
        self._wait(self._server.receive_checkpoint(version))

    @property
    def _first_worker(self) -> int:
        """Among the vLLM workers of all servers: each rank of this group is a server."""
        return int(os.environ["RANK"]) * self._spec.rollout.tp

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shut_down(self) -> None:
        self._wait(self._server.close())
