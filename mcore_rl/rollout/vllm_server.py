"""One vLLM engine as a plain asynchronous object: tokens in; tokens and their log-probs out.

No Ray here: a worker actor owns one of these, and a test can too.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError, StateError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.tokenizer import has_tokenizer
from mcore_rl.observability.garbage import long_lived
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.rollout.lifecycle import ASLEEP, Call, Lifecycle, State
from mcore_rl.rollout.protocol import (
    Completion,
    NewTokens,
    SamplingParams,
    ServerMemory,
    SleepTag,
    TokenScores,
)
from mcore_rl.rollout.stopped_processes import StoppedProcesses
from mcore_rl.rollout.traffic import Traffic
from mcore_rl.rollout.vllm_requests import (
    completion_of,
    log_probs_of,
    on_workers,
    request_of,
    scores_of,
    timeout_arguments,
    update_workers,
)
from mcore_rl.rollout.vllm_trace import traced
from mcore_rl.weight_sync.spec import TransferSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from mcore_rl.rollout.vllm_nodes import ServerNodes
    from mcore_rl.rollout.vllm_worker import ServerName

_DTYPES = ("float32", "bfloat16")
# Set before vLLM is imported: no telemetry, no look-ups on the hub.
_QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# vLLM's settings for log-probs of a prompt. A cached prompt would have no log-probs and no outputs.
_SCORING: dict[str, Any] = {
    "max_tokens": 1,
    "prompt_logprobs": 1,
    "skip_reading_prefix_cache": True,
}


class VLLMServer:
    """A GenerationServer. No wait has a limit here; the caller sets one."""

    def __init__(
        self,
        model_path: str,
        dtype: str,
        max_model_tokens: int,
        config: RolloutConfig,
        seed: int,
        *,
        timeout_s: float | None = None,  # of the engine's start and its steps; None: vLLM's own
        eager: bool = False,  # what `trace` needs: no compiled graphs, as on the CPU lane anyway
        can_sleep: bool = False,
        nodes: ServerNodes | None = None,  # if it spans several
        records_experts: bool = False,  # what `SamplingParams.experts_from` needs
    ) -> None:
        _check(model_path, dtype, config)
        self._model_path, self._dtype = model_path, dtype
        self._max_model_tokens, self._config, self._seed = max_model_tokens, config, seed
        self._eager, self._timeout_s, self._can_sleep = eager, timeout_s, can_sleep
        self._nodes, self._records_experts = nodes, records_experts
        self._engine: AsyncLLM | None = None
        self._name: ServerName | None = None
        self._stop_watch: StoppedProcesses | None = None
        self._request_ids = itertools.count()
        self._running: dict[str, str] = {}  # our names of running requests, and vLLM's
        self._version = self._num_updates = 0
        self._lifecycle = Lifecycle()
        self._traffic = Traffic(self._lifecycle)

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def is_dead(self) -> bool:
        return self._engine is not None and self._engine.errored

    @property
    def death_reason(self) -> str:
        return "" if self._stop_watch is None else self._stop_watch.reason

    @property
    def awaits_update(self) -> bool:
        return self._traffic.awaits_update

    @property
    def model_runner(self) -> str:
        """Which of vLLM's runners executes the model: "V1" or "V2" (config/vllm.py:703).

        Raises:
            StateError: the server has not been started.
        """
        return "V2" if self._serving.vllm_config.use_v2_model_runner else "V1"

    def prepare(self) -> None:
        os.environ |= _QUIET
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        with long_lived():
            import mcore_rl.rollout.vllm_worker  # noqa: F401

    async def start(self, *, reads_weights: bool = True) -> None:
        """Start the engine: seconds to minutes.

        Args:
            reads_weights: False leaves the checkpoint's weights on disk; the server refuses
                requests until an update.

        Raises:
            ConfigError: the model's attention heads do not suit the lane.
            RuntimeError: the engine does not start: why, its processes have told this one's stderr.
        """
        with self._lifecycle.alone(Call.START if reads_weights else Call.START_WITHOUT_WEIGHTS):
            await self._start(reads_weights)

    def engine_config(
        self, *, headless: bool = False, reads_weights: bool = True
    ) -> tuple[VllmConfig, ServerName]:
        """Return vLLM's settings and the name of this process's part of the server.

        Args:
            headless: Of a node without the engine.
            reads_weights: As of `start`.

        Raises:
            ConfigError: as `start`.
        """
        self.prepare()
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        from mcore_rl.rollout import vllm_float8, vllm_routing, vllm_weights, vllm_worker

        self._name = name = vllm_worker.ServerName.new()
        nodes = {} if self._nodes is None else self._nodes.engine_arguments()
        loading = vllm_float8.float8_arguments(self._model_path, ep=self._config.ep)
        if not reads_weights:
            loading["load_format"] = vllm_weights.NO_WEIGHTS
        config = AsyncEngineArgs(
            model=self._model_path,
            dtype=self._dtype,
            seed=self._seed,
            max_model_len=self._max_model_tokens,
            kv_cache_memory_bytes=self._config.kv_cache_bytes,
            tensor_parallel_size=self._config.tp,
            # Workers are processes of this server; inside an actor vLLM would make them Ray's.
            distributed_executor_backend="mp" if self._config.tp > 1 else "uni",
            enable_expert_parallel=self._config.ep,
            enable_prefix_caching=True,
            generation_config="vllm",  # sampling comes from our config alone
            logprobs_mode="processed_logprobs",  # those of the distribution sampled from
            weight_transfer_config=WeightTransferConfig(backend=vllm_worker.BACKEND),
            **timeout_arguments(self._timeout_s),
            use_tqdm_on_load=False,
            skip_tokenizer_init=not has_tokenizer(self._model_path),  # ids may be scored without
            **vllm_worker.lane_arguments(self._config, name, self._max_model_tokens, self._eager),
            **vllm_worker.sleep_arguments(self._can_sleep),
            **vllm_routing.arguments(self._records_experts),
            **loading,
            **nodes,
        ).create_engine_config(UsageContext.OPENAI_API_SERVER, headless=headless)
        vllm_worker.check_heads(config.model_config)
        vllm_routing.check(config)
        # Workers that crash leave their memory behind, and the server may never be closed.
        atexit.register(vllm_worker.remove_shared_memory, name)
        return config, name

    async def _start(self, reads_weights: bool) -> None:
        config, name = self.engine_config(reads_weights=reads_weights)
        from vllm.v1.engine.async_llm import AsyncLLM

        from mcore_rl.rollout import vllm_worker

        def launch() -> AsyncLLM:
            with vllm_worker.owned_processes(name):
                return AsyncLLM.from_vllm_config(config, disable_log_stats=True)

        with ThreadPoolExecutor(1, "vllm-start") as fresh:
            try:
                self._engine = await asyncio.get_running_loop().run_in_executor(fresh, launch)
            except RuntimeError as error:
                raise RuntimeError("vLLM's engine does not start; its stderr says why") from error
        core: Any = self._serving.engine_core
        self._stop_watch = StoppedProcesses(
            [p.pid for p in core.resources.engine_manager.processes]
        )
        await self._serving.update_weight_version(str(self._version))
        await self._serving.get_supported_tasks()  # kept: later requests do not wait for it

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        """Raises ConfigError when prompt and response cannot fit, and StateError."""
        self._check_room(len(prompt_ids), sampling.max_tokens, "rollout.max_response_tokens = ")
        if sampling.experts_from is not None and not self._records_experts:
            raise StateError("the server records no experts: it was started without")
        async with self._traffic.request():
            async for output in self._run(prompt_ids, request_id, **asdict(sampling)):
                last = output
            return [completion_of(one, sampling.experts_from) for one in last.outputs]

    async def stream(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> AsyncIterator[NewTokens]:
        """Raises as `submit`."""
        self._check_room(len(prompt_ids), sampling.max_tokens, "rollout.max_response_tokens = ")
        async with self._traffic.request():
            arguments = asdict(sampling) | {"output_kind": "DELTA"}
            async for output in self._run(prompt_ids, request_id, **arguments):
                for new in output.outputs:
                    yield NewTokens(
                        new.index, list(new.token_ids), log_probs_of(new), new.finish_reason
                    )

    async def abort(self, request_id: str) -> None:
        if own := self._running.get(request_id):
            await self._serving.abort(own)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        async with self._traffic.held():
            await self._serving.pause_generation(mode="keep", clear_cache=False)
            try:
                yield
            finally:
                if self._traffic.is_last_held:
                    await self._serving.resume_generation()

    async def score(self, token_ids: list[int]) -> TokenScores:
        """Scores of all tokens but the first, from a prefill of them.

        Raises ConfigError when they and one token more do not fit (vLLM must generate one),
        StateError when it does not serve.
        """
        self._check_room(len(token_ids), 1)
        async with self._traffic.request():
            async for output in self._run(token_ids, **_SCORING):
                last = output
            return scores_of(token_ids[1:], last.prompt_logprobs[1:])

    async def decode(self, prompt_ids: list[int], num_tokens: int, seed: int) -> TokenScores:
        """Samples `num_tokens` at temperature 1, past an end of sequence too, and scores them.

        Raises as `score`.
        """
        self._check_room(len(prompt_ids), num_tokens)
        async with self._traffic.request():
            sampling: dict[str, Any] = {
                "max_tokens": num_tokens,
                "seed": seed,
                "logprobs": 1,
                "ignore_eos": True,
            }
            async for last in self._run(prompt_ids, **sampling):
                (output,) = last.outputs
            return scores_of(list(output.token_ids), output.logprobs)

    async def trace(self, token_ids: list[int]) -> dict[str, torch.Tensor]:
        """What each module puts out in a prefill of the tokens, float32 [tokens, dim] on the CPU.

        Names are Hugging Face's: "model.embed_tokens", "model.norm", "lm_head" (logits of every
        position); in layer N, after "model.layers.N.": "input_layernorm", "self_attn",
        "post_attention_layernorm", "mlp" and, where there are experts, "mlp.gate": routing weights
        [tokens, experts] as they multiply the experts' outputs, 0 where one was not chosen. It is
        left out where a kernel of vLLM chooses the experts by itself.

        The engine runs nothing else meanwhile. Raises RuntimeError when it compiles graphs (start
        it with `eager`), else as `score`.
        """
        self._check_room(len(token_ids), 1)
        with self._lifecycle.alone(Call.TRACE):
            engine = self._serving
            if not engine.model_config.enforce_eager:
                raise RuntimeError("a trace sees nothing in compiled graphs: start it with eager")
            await engine.pause_generation(mode="wait")  # cancelled requests may still run in it
            await engine.resume_generation()
            return await traced(engine, self._run(token_ids, **_SCORING), len(token_ids))

    def _check_room(self, num_prompt: int, num_new: int, setting: str = "") -> None:
        if num_prompt + num_new > self._max_model_tokens:
            raise ConfigError(
                f"a prompt of {num_prompt} tokens and {setting}{num_new} exceed the server's "
                f"{self._max_model_tokens} tokens"
            )

    @property
    def _serving(self) -> AsyncLLM:
        if self._engine is None:
            raise StateError(f"the server {self._lifecycle.state.value}")
        return self._engine

    async def _run(
        self, prompt_ids: list[int], request_id: str = "", **sampling: Any
    ) -> AsyncIterator[Any]:
        """The outputs of one request; `sampling` are fields of vLLM's SamplingParams."""
        # No request reads what weights before an update have cached.
        sampling["cache"] = f"{sampling.get('cache', '')}@{self._num_updates}"
        prompt, parameters = request_of(prompt_ids, **sampling)
        own = f"{request_id}#{next(self._request_ids)}"
        self._running[request_id or own] = own
        try:
            async for output in self._serving.generate(prompt, parameters, own):
                yield output
        finally:
            del self._running[request_id or own]

    async def connect_weights(
        self, endpoint: RendezvousEndpoint, spec: TransferSpec, first_rank: int
    ) -> None:
        own = {"endpoint": asdict(endpoint), "spec": spec.to_dict(), "first_rank": first_rank}
        method, info = "init_weight_transfer_engine", {"init_info": own}
        async with self._traffic.beside(Call.CONNECT):
            await on_workers(self._serving, "joining the trainer", method, info)

    async def update(
        self, version: int, *, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        async with self._replacing(version, in_flight, recompute_cache):
            await update_workers(self._serving, version)

    async def load_checkpoint(
        self, path: str, version: int, *, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        expected, found = (CheckpointReader(p).shapes() for p in (self._model_path, path))
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise ConfigError(
                    f"{path}: {name} is {found.get(name, 'missing')}; the checkpoint that the "
                    f"server started from has {expected.get(name, 'no such tensor')}"
                )
        async with self._replacing(version, in_flight, recompute_cache):
            what = f"weight update to version {version}"
            await on_workers(self._serving, what, "load_checkpoint", {"path": path})

    @asynccontextmanager
    async def _replacing(
        self, version: int, in_flight: bool, recompute_cache: bool
    ) -> AsyncIterator[None]:
        is_asleep = self._lifecycle.state in ASLEEP  # then nothing is cached
        async with self._stopped(Call.UPDATE, keep=in_flight):
            engine = self._serving
            yield
            await engine.update_weight_version(str(version))
            # Running requests go on with what they have cached, or compute it anew.
            forgets = not is_asleep and (recompute_cache or not in_flight)
            if forgets and not await engine.reset_prefix_cache(reset_running_requests=in_flight):
                raise RuntimeError(f"version {version}: the prefix cache is still in use")
            self._version, self._num_updates = version, self._num_updates + 1
            if not is_asleep:
                await engine.resume_generation()

    @asynccontextmanager
    async def _stopped(self, call: Call, *, keep: bool) -> AsyncIterator[None]:
        """Inside, the engine runs nothing; nor does it afterwards, until it is told to.

        `keep`: requests may be there, else only what cancelled ones still run in the engine.
        """
        async with self._traffic.beside(call) if keep else self._traffic.alone(call):
            if self._lifecycle.state not in ASLEEP:
                mode: Literal["keep", "wait"] = "keep" if keep else "wait"
                await self._serving.pause_generation(mode=mode, clear_cache=False)
            yield

    async def sleep(self, *, keep: bool = False) -> None:
        if not self._can_sleep and self._lifecycle.state in (State.SERVING, State.WAITING):
            raise StateError("the server cannot sleep: it was started without can_sleep")
        async with self._stopped(Call.SLEEP, keep=keep):
            # Requests that are there are preempted: nothing is cached afterwards.
            await self._serving.sleep(level=2, mode="keep")
            if keep:
                self._traffic.fall_asleep()

    async def wake(self, tag: SleepTag) -> None:
        call = Call.WAKE_WEIGHTS if tag == "weights" else Call.WAKE_KV_CACHE
        async with self._traffic.alone(call):
            await self._serving.wake_up([tag])

    async def memory(self) -> ServerMemory:
        found = await self._serving.collective_rpc("kept_bytes")
        return ServerMemory(*map(sum, zip(*found, strict=True)))

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        self._traffic.close()
        if self._stop_watch is not None:
            self._stop_watch.close()
        if engine is None or self._name is None:
            return
        from mcore_rl.rollout import vllm_worker

        engine.shutdown()
        vllm_worker.remove_shared_memory(self._name)


def _check(model_path: str, dtype: str, config: RolloutConfig) -> None:
    if not Path(model_path, "config.json").is_file():
        raise ConfigError(f"model.path {model_path!r} has no config.json of a checkpoint")
    if dtype not in _DTYPES:
        raise ConfigError(f"model.dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
