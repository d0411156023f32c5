"""One vLLM engine as a plain asynchronous object: tokens in; tokens and their log-probs out.

No Ray here: a worker actor owns one of these, and a test can too.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import math
import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mcore_rl.config.errors import ConfigError, PeerError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.tokenizer import has_tokenizer
from mcore_rl.observability.garbage import long_lived
from mcore_rl.rollout.protocol import Completion, SamplingParams, TokenScores
from mcore_rl.weight_sync.announced import Announced
from mcore_rl.weight_sync.checkpoint_engine import RoutePlan
from mcore_rl.weight_sync.colocated import ShardEndpoint
from mcore_rl.weight_sync.disaggregated import Endpoint
from mcore_rl.weight_sync.stream import StreamEndpoint

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from mcore_rl.rollout.vllm_worker import ServerName

_DTYPES = ("float32", "bfloat16")
# Set before vLLM is imported: no telemetry, no look-ups on the hub, no start-up chatter.
_QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
# vLLM's settings for log-probs of a prompt. A cached prompt would have no log-probs and no outputs.
_SCORING = {"max_tokens": 1, "prompt_logprobs": 1, "skip_reading_prefix_cache": True}


class VLLMServer:
    """Generates with one version of the weights at a time; each request runs on a single version.

    During an update new requests wait and those in flight finish first. After an update that failed
    the server refuses to generate until a complete one succeeds: its weights may be mixed.

    Waits for requests, updates and answers of workers have no limit here; who calls sets one.
    """

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
    ) -> None:
        _check(model_path, dtype, config)
        self._model_path, self._dtype = model_path, dtype
        self._max_model_tokens, self._config, self._seed = max_model_tokens, config, seed
        self._eager, self._timeout_s = eager, timeout_s
        self._engine: AsyncLLM | None = None
        self._name: ServerName | None = None
        self._request_ids = itertools.count()
        self._version = 0
        self._in_flight = 0
        self._update_lock = asyncio.Lock()
        self._admitting = asyncio.Event()  # clear while an update waits or runs
        self._idle = asyncio.Event()  # set while no request is in flight
        self._idle.set()
        self._refusal = "it has not been started"

    @property
    def weight_version(self) -> int:
        """Version of the weights it generates with; the checkpoint it started from is 0."""
        return self._version

    async def start(self) -> None:
        """Load the checkpoint; returns when the engine runs (seconds to minutes).

        Raises ConfigError when the model's attention heads do not suit the lane, RuntimeError when
        the engine does not start: why, its processes have told this one's stderr.
        """
        os.environ |= _QUIET
        with long_lived():
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            from mcore_rl.rollout import vllm_worker

        self._name = name = vllm_worker.ServerName.new()
        arguments = AsyncEngineArgs(
            model=self._model_path,
            dtype=self._dtype,
            seed=self._seed,
            max_model_len=self._max_model_tokens,
            max_num_seqs=self._config.max_num_seqs,
            kv_cache_memory_bytes=self._config.kv_cache_bytes,
            tensor_parallel_size=self._config.tp,
            # Workers are processes of this server; inside an actor vLLM would make them Ray's.
            distributed_executor_backend="mp" if self._config.tp > 1 else "uni",
            enable_expert_parallel=self._config.ep,
            enable_prefix_caching=True,
            generation_config="vllm",  # sampling comes from our config alone
            logprobs_mode="processed_logprobs",  # those of the distribution sampled from
            **self._timeouts(),
            use_tqdm_on_load=False,
            skip_tokenizer_init=not has_tokenizer(self._model_path),  # ids may be scored without
            **vllm_worker.lane_arguments(self._config, name, self._max_model_tokens, self._eager),
        )
        config = arguments.create_engine_config()
        vllm_worker.check_heads(config.model_config)
        # Workers that crash leave their memory behind, and nobody may come to close the server.
        atexit.register(vllm_worker.remove_shared_memory, name)

        def launch() -> AsyncLLM:
            with vllm_worker.owned_processes(name):
                return AsyncLLM.from_vllm_config(config, disable_log_stats=True)

        with ThreadPoolExecutor(1, "vllm-start") as fresh:
            try:
                self._engine = await asyncio.get_running_loop().run_in_executor(fresh, launch)
            except RuntimeError as error:
                raise RuntimeError("vLLM's engine does not start; its stderr says why") from error
        self._refusal = ""
        self._admitting.set()

    def _timeouts(self) -> dict[str, Any]:
        """The engine arguments; what else vLLM limits goes into the environment."""
        if self._timeout_s is None:
            return {}
        seconds = math.ceil(self._timeout_s)
        os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(seconds)
        os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(seconds)
        return dict.fromkeys(
            ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"), seconds
        )

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams) -> list[Completion]:
        """`sampling.n` completions. Waits while an update runs.

        Raises ConfigError when prompt and response cannot fit, RuntimeError when it may not serve.
        """
        self._check_room(len(prompt_ids), sampling.max_tokens, "rollout.max_response_tokens = ")
        async with self._admission() as engine:
            output = await self._run(engine, prompt_ids, **asdict(sampling))
            return [_completion(c, self._version) for c in output.outputs]

    async def score(self, token_ids: list[int]) -> TokenScores:
        """Scores of all tokens but the first, from a prefill of them. Waits while an update runs.

        Raises ConfigError when they and one token more do not fit (vLLM must generate one),
        RuntimeError when it may not serve.
        """
        self._check_room(len(token_ids), 1)
        async with self._admission() as engine:
            output = await self._run(engine, token_ids, **_SCORING)
            return _scores(token_ids[1:], output.prompt_logprobs[1:])

    async def decode(self, prompt_ids: list[int], num_tokens: int, seed: int) -> TokenScores:
        """Samples `num_tokens` at temperature 1, past an end of sequence too, and scores them.

        Waits while an update runs. Raises ConfigError when they do not fit, RuntimeError when it
        may not serve.
        """
        self._check_room(len(prompt_ids), num_tokens)
        async with self._admission() as engine:
            sampling = {"max_tokens": num_tokens, "seed": seed, "logprobs": 1, "ignore_eos": True}
            (output,) = (await self._run(engine, prompt_ids, **sampling)).outputs
            return _scores(list(output.token_ids), output.logprobs)

    async def trace(self, token_ids: list[int]) -> dict[str, torch.Tensor]:
        """What each module puts out in a prefill of the tokens, float32 [tokens, dim] on the CPU.

        Names are Hugging Face's: "model.embed_tokens", "model.norm", "lm_head" (logits of every
        position); in layer N, after "model.layers.N.": "input_layernorm", "self_attn",
        "post_attention_layernorm", "mlp" and, where there are experts, "mlp.gate": routing weights
        [tokens, experts] as they multiply the experts' outputs, 0 where one was not chosen. It is
        left out where a kernel of vLLM chooses the experts by itself.

        The engine serves nothing else meanwhile: the trace waits for requests in flight, new ones
        wait for the trace. Raises RuntimeError when the engine compiles graphs (start it with
        `eager`) or may not serve, ConfigError as `score` does.
        """
        self._check_room(len(token_ids), 1)
        async with self._alone() as engine:
            if self._refusal:
                raise RuntimeError(f"the vLLM server does not serve: {self._refusal}")
            if not engine.model_config.enforce_eager:
                raise RuntimeError("a trace sees nothing in compiled graphs: start it with eager")
            shapes = await self._traced_shapes(engine, token_ids)
            return {name: await _traced(engine, name, shape) for name, shape in shapes.items()}

    async def _traced_shapes(self, engine: AsyncLLM, token_ids: list[int]) -> dict[str, list[int]]:
        await engine.pause_generation(mode="wait")  # cancelled requests may still run in the engine
        await engine.resume_generation()
        await engine.collective_rpc("start_trace")
        try:
            await self._run(engine, token_ids, **_SCORING)
        finally:
            shapes: dict[str, list[int]] = (await engine.collective_rpc("end_trace"))[0]
        for name, (num_rows, _) in shapes.items():
            if num_rows != len(token_ids):
                raise RuntimeError(f"traced {num_rows} rows of {name} for {len(token_ids)} tokens")
        return shapes

    def _check_room(self, num_prompt: int, num_new: int, setting: str = "") -> None:
        if num_prompt + num_new > self._max_model_tokens:
            raise ConfigError(
                f"a prompt of {num_prompt} tokens and {setting}{num_new} exceed the server's "
                f"{self._max_model_tokens} tokens"
            )

    async def _run(self, engine: AsyncLLM, prompt_ids: list[int], **sampling: Any) -> Any:
        """One request; `sampling` are fields of vLLM's SamplingParams."""
        from vllm import SamplingParams as EngineSampling
        from vllm.sampling_params import RequestOutputKind

        parameters = EngineSampling(
            **{"logprobs": 0} | sampling,  # 0: of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request_id = str(next(self._request_ids))
        prompt = {"prompt_token_ids": prompt_ids}
        async for output in engine.generate(prompt, parameters, request_id):
            last = output
        return last

    @asynccontextmanager
    async def _admission(self) -> AsyncIterator[AsyncLLM]:
        """Let a request in between updates, and hold the next update off until it is done."""
        while not self._admitting.is_set():
            if self._refusal:
                break
            await self._admitting.wait()
        if self._refusal or self._engine is None:
            raise RuntimeError(f"the vLLM server does not serve: {self._refusal}")
        self._in_flight += 1
        self._idle.clear()
        try:
            yield self._engine
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def update_weights(self, endpoint: StreamEndpoint, version: int) -> None:
        """Replace all weights by the stream at `endpoint` (one connection for each of tp workers).

        Raises RuntimeError with every worker's reason when one of them did not get a complete set:
        a PeerError when all of them blame the trainer.
        """
        fields = (endpoint.host, endpoint.port, endpoint.token, endpoint.timeout_s, version)
        await self._update("receive_weights", fields, version)

    async def receive_shards(self, endpoints: Sequence[ShardEndpoint], version: int) -> None:
        """Replace all weights by shards: `endpoints` of the workers, in their order.

        Raises RuntimeError as `update_weights` does.
        """
        fields = [(e.name, e.token, e.timeout_s, e.generation_rank) for e in endpoints]
        await self._update("receive_shards", (fields, version), version)

    async def join_checkpoint_engine(
        self, endpoint: Endpoint, plan: RoutePlan, first_worker: int
    ) -> None:
        """Make each worker's end of the route; the first is generation rank `first_worker`.
        Returns when all ranks of both sides are in reach of each other.

        Raises RuntimeError with the reason of every worker that could not.
        """
        async with self._alone() as engine:
            arguments = (asdict(endpoint), plan.to_dict(), first_worker)
            await engine.collective_rpc("join_checkpoint_engine", args=(json.dumps(arguments),))
            await self._check_workers(engine, "joining the trainer")

    async def receive_checkpoint(self, version: int) -> None:
        """Replace all weights by shards, by the route that the workers have joined.

        Raises RuntimeError as `update_weights` does.
        """
        await self._update("receive_checkpoint", (version,), version)

    async def weight_layout(self) -> list[Announced]:
        """What each worker says about its parameters. Waits while an update runs."""
        async with self._alone() as engine:
            return [Announced.from_json(w) for w in await engine.collective_rpc("weight_layout")]

    async def _update(self, method: str, arguments: tuple[Any, ...], version: int) -> None:
        async with self._alone() as engine:
            self._refusal = f"its update to version {version} did not complete"
            await self._replace(engine, method, arguments, version)
            self._version, self._refusal = version, ""

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[AsyncLLM]:
        """Let no request in, and wait for those in flight."""
        if self._engine is None:
            raise RuntimeError(f"the vLLM server does not serve: {self._refusal}")
        async with self._update_lock:
            self._admitting.clear()
            try:
                await self._idle.wait()
                yield self._engine
            finally:
                self._admitting.set()

    async def _replace(
        self, engine: AsyncLLM, method: str, arguments: tuple[Any, ...], version: int
    ) -> None:
        await engine.pause_generation(mode="wait")  # cancelled requests may still run in the engine
        await engine.collective_rpc(method, args=arguments)
        await self._check_workers(engine, f"weight update to version {version}")
        if not await engine.reset_prefix_cache():
            raise RuntimeError(
                f"weight update to version {version}: the prefix cache is still in use"
            )
        await engine.resume_generation()

    async def _check_workers(self, engine: AsyncLLM, what: str) -> None:
        errors = await engine.collective_rpc("weight_error")
        if any(errors):
            reasons = "; ".join(f"worker {i}: {e[0]}" for i, e in enumerate(errors) if e)
            kind = PeerError if all(e[1] for e in errors if e) else RuntimeError
            raise kind(f"{what} failed: {reasons}")

    async def close(self) -> None:
        """End the engine and its processes; safe to call twice."""
        engine, self._engine, self._refusal = self._engine, None, "it has been closed"
        if engine is None or self._name is None:
            return
        from mcore_rl.rollout import vllm_worker

        engine.shutdown()
        vllm_worker.remove_shared_memory(self._name)


def _completion(output: Any, version: int) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}")
    token_ids = list(output.token_ids)
    log_probs = [at[token].logprob for at, token in zip(output.logprobs, token_ids, strict=True)]
    return Completion(token_ids, log_probs, output.finish_reason, [version] * len(token_ids))


def _scores(token_ids: list[int], tables: Any) -> TokenScores:
    """`tables`: for each token vLLM's Logprob by id, of that token and of the most likely one."""
    log_probs = [at[token].logprob for at, token in zip(tables, token_ids, strict=True)]
    top_ids = [next(token for token, entry in at.items() if entry.rank == 1) for at in tables]
    return TokenScores(token_ids, log_probs, top_ids)


async def _traced(engine: AsyncLLM, name: str, shape: list[int]) -> torch.Tensor:
    values, *_ = await engine.collective_rpc("traced_tensor", args=(name,))
    return torch.frombuffer(bytearray(values), dtype=torch.float32).view(shape)


def _check(model_path: str, dtype: str, config: RolloutConfig) -> None:
    if not Path(model_path, "config.json").is_file():
        raise ConfigError(f"model.path {model_path!r} holds no config.json of a checkpoint")
    if dtype not in _DTYPES:
        raise ConfigError(f"model.dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
