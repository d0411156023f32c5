"""One vLLM engine as a plain asynchronous object: token ids in, token ids and their log-probs out.

It does not use Ray: a worker actor owns one, and so can a test.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from mcore_rl.config.errors import ConfigError, PeerError, StateError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.tokenizer import has_tokenizer
from mcore_rl.inference.lifecycle import ASLEEP, Call, State
from mcore_rl.inference.protocol import (
    Completion,
    DraftCounts,
    GenerationServer,
    NewTokens,
    SamplingParams,
    ServerFeatures,
    ServerMemory,
    ServerSpec,
    SleepTag,
    TokenScores,
)
from mcore_rl.inference.vllm.data_parallel import RankRouter
from mcore_rl.inference.vllm.engine_arguments import (
    check_arguments,
    prepare_import,
    read_arguments,
)
from mcore_rl.inference.vllm.headless import HeadlessWorkers
from mcore_rl.inference.vllm.images import RequestImages, check_prompt
from mcore_rl.inference.vllm.model_checks import check_model
from mcore_rl.inference.vllm.processes import ServerNodes, StoppedProcesses
from mcore_rl.inference.vllm.requests import (
    build_completion,
    build_request,
    build_scores,
    get_log_probs,
    has_failed,
)
from mcore_rl.inference.vllm.trace import run_trace
from mcore_rl.models.base import HFConfig
from mcore_rl.observability.process import exempt_imports_from_gc
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.weight_sync.receiver import check_same_shapes
from mcore_rl.weight_sync.spec import TransferSpec, WorkerLists

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from mcore_rl.inference.vllm.drafts import DraftCounter
    from mcore_rl.inference.vllm.worker import ServerName

_DTYPES = ("float32", "bfloat16")
# vLLM's settings for log-probs of a prompt. Cached prompt tokens would have no log-probs.
_SCORING: Any = {"max_tokens": 1, "prompt_logprobs": 1, "skip_reading_prefix_cache": True}


class VLLMServer(GenerationServer):
    """A server of vLLM. Waits have no time limit; the caller sets one.

    Args:
        timeout_s: Limit of the engine's start and of its steps. None: vLLM's default.
        eager: Compile no graphs, as `trace` needs. On CPUs it never does.
        nodes: The nodes of a server that spans several.
        records_experts: Record routed experts, as `SamplingParams.experts_from` needs.
        adapter_rank: Take adapters up to this rank; 0: none.
        adapters: Folders of frozen adapters by name, served beside the policy.
        images_folder: ImageStore that requests name images of; "": no images.
    """

    engine_name = "vLLM's engine"
    display_name = "vLLM"
    package = "vllm"
    features = ServerFeatures(
        weight_format="vllm",
        tensor_parallel=True,
        data_parallel=True,
        multi_node=True,
        sleep=True,
        updates_in_flight=True,
        adapters=True,
        max_adapter_rank=512,
        routed_experts=True,
        images=True,
        quantization=True,
        engine=True,
        drafts=True,
    )

    def __init__(
        self,
        model_path: str,
        dtype: str,
        max_model_tokens: int,
        config: RolloutConfig,
        seed: int,
        *,
        timeout_s: float | None = None,
        eager: bool = False,
        can_sleep: bool = False,
        nodes: ServerNodes | None = None,
        records_experts: bool = False,
        adapter_rank: int = 0,
        adapters: Mapping[str, str] | None = None,
        images_folder: str = "",
        num_sequences: int | None = None,
    ) -> None:
        super().__init__(
            ServerSpec(
                model_path, dtype, max_model_tokens, config, seed, num_sequences=num_sequences
            )
        )
        _check_settings(model_path, dtype)
        self._model_path, self._dtype = model_path, dtype
        self._max_model_tokens, self._config, self._seed = max_model_tokens, config, seed
        self._eager, self._timeout_s, self._can_sleep = eager, timeout_s, can_sleep
        self._nodes, self._records_experts = nodes, records_experts
        self._adapter_rank, self._adapters = adapter_rank, adapters or {}
        self._images = RequestImages(model_path, images_folder)
        # vLLM's names of adapters, by ours; None: the base model. The policy is "".
        self._adapter_requests: dict[str, Any] = {"": None}
        self._engine: AsyncLLM | None = None
        self._name: ServerName | None = None
        self._draft_counter: DraftCounter | None = None
        self._stop_watch: StoppedProcesses | None = None
        self._request_ids = itertools.count()
        self._router = RankRouter(config.dp)
        self._engine_ids: dict[str, str] = {}  # vLLM's id of each running request, by ours
        self._headless: HeadlessWorkers | None = None
        if nodes is not None and not nodes.is_first:
            self._headless = HeadlessWorkers(self)

    @classmethod
    def create(cls, spec: ServerSpec) -> VLLMServer:
        count, nodes = spec.settings.nodes_per_server, None
        if count > 1:
            assert spec.timeout_s is not None  # of a run
            nodes = ServerNodes(count, spec.node_rank, count, spec.timeout_s)
        return cls(
            spec.model_path, spec.dtype, spec.max_model_tokens, spec.settings, spec.seed,
            timeout_s=spec.timeout_s,
            can_sleep=spec.can_sleep,
            nodes=nodes,
            records_experts=spec.records_experts,
            adapter_rank=spec.adapter_rank,
            adapters=spec.adapters,
            images_folder=spec.images_folder,
            num_sequences=spec.num_sequences,
        )  # fmt: skip

    @classmethod
    def check_device(cls, settings: RolloutConfig, key: str, device: str) -> None:
        check_arguments(settings, key, device)

    @classmethod
    def check_model(
        cls,
        settings: RolloutConfig,
        key: str,
        hf_config: HFConfig,
        device: str,
        *,
        records_experts: bool = False,
    ) -> None:
        check_model(settings, key, hf_config, device, records_experts=records_experts)

    @classmethod
    def get_kv_cache_bytes(cls, settings: RolloutConfig) -> int | None:
        return settings.kv_cache_bytes

    @property
    def is_headless(self) -> bool:
        return self._headless is not None

    @property
    def is_dead(self) -> bool:
        return self._engine is not None and self._engine.errored

    @property
    def death_reason(self) -> str:
        return "" if self._stop_watch is None else self._stop_watch.reason

    @property
    def description(self) -> str:
        return "" if self.is_headless else f"vLLM's model runner: {self.model_runner}"

    @property
    def model_runner(self) -> str:
        """The model runner that vLLM uses: "V1" or "V2" (config/vllm.py:703).

        Raises:
            StateError: the server has not been started.
        """
        return "V2" if self._started_engine.vllm_config.use_v2_model_runner else "V1"

    def prepare(self) -> None:
        prepare_import()
        with exempt_imports_from_gc():
            import mcore_rl.inference.vllm.worker  # noqa: F401

    async def start(self, *, reads_weights: bool = True) -> None:
        """Start the engine and load the checkpoint: seconds to minutes.

        On a further node only workers are started.

        Args:
            reads_weights: See `GenerationServer.start`.

        Raises:
            ConfigError: the CPU has no kernels for the model's attention heads.
            RuntimeError: the engine does not start; its processes have printed why to stderr.
        """
        call = Call.START if reads_weights else Call.START_WITHOUT_WEIGHTS
        with self._lifecycle.run_alone(call):
            if self._headless is None:
                await self._start(reads_weights)
            else:
                await self._headless.start(reads_weights=reads_weights)

    def build_engine_config(
        self, *, headless: bool = False, reads_weights: bool = True
    ) -> tuple[VllmConfig, ServerName]:
        """Return vLLM's config and the name of this process's part of the server.

        Args:
            headless: Whether this is a node without the engine.
            reads_weights: See `GenerationServer.start`.

        Raises:
            ConfigError: see `start`.
        """
        self.prepare()
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        from mcore_rl.inference.vllm import adapters as vllm_adapters
        from mcore_rl.inference.vllm import drafts as vllm_drafts
        from mcore_rl.inference.vllm import weights as vllm_weights
        from mcore_rl.inference.vllm import worker as vllm_worker

        self._name = name = vllm_worker.ServerName.new()
        nodes = {} if self._nodes is None else self._nodes.build_engine_arguments()
        num_drafts = self._config.speculative.num_tokens
        loading = vllm_weights.build_loading_arguments(
            self._model_path,
            ep=self._config.ep,
            reads_weights=reads_weights,
            quantization=self._config.quantization,
        )
        max_tokens = self._max_model_tokens
        given = vllm_worker.build_device_arguments(self._config, name, max_tokens, self._eager)
        passed = read_arguments("rollout.engine", self._config.engine)
        own_arguments = dict[str, Any](
            model=self._model_path,
            dtype=self._dtype,
            seed=self._seed,
            max_model_len=max_tokens,
            kv_cache_memory_bytes=self.compute_kv_cache_bytes(),
            tensor_parallel_size=self._config.tp,
            data_parallel_size=self._config.dp,
            # Workers are processes of this server; inside an actor vLLM would make them Ray's.
            distributed_executor_backend="mp" if self._config.tp > 1 else "uni",
            enable_expert_parallel=self._config.ep,
            generation_config="vllm",  # sampling comes from our config alone
            logprobs_mode="processed_logprobs",  # those of the distribution sampled from
            weight_transfer_config=WeightTransferConfig(backend=vllm_worker.BACKEND),
            **_build_timeout_arguments(self._timeout_s),
            use_tqdm_on_load=False,
            skip_tokenizer_init=not has_tokenizer(self._model_path),  # ids may be scored without
            **given,
            **vllm_drafts.build_draft_arguments(num_drafts, given | passed),
            **vllm_worker.build_cache_arguments(self._model_path),
            **vllm_worker.build_sleep_arguments(self._can_sleep),
            **vllm_worker.build_expert_arguments(self._records_experts),
            **vllm_adapters.build_adapter_arguments(
                self._model_path, self._adapter_rank, self._adapters
            ),
            **self._images.build_arguments(self._config.max_images),
            **loading,
            **nodes,
        )
        config = AsyncEngineArgs(**(own_arguments | passed)).create_engine_config(
            UsageContext.OPENAI_API_SERVER, headless=headless
        )
        vllm_worker.check_heads(config.model_config)
        vllm_worker.check_recorded_experts(config)
        # Workers that crash leave shared memory behind, and the server may never be closed.
        atexit.register(vllm_worker.remove_shared_memory, name)
        return config, name

    async def _start(self, reads_weights: bool) -> None:
        config, name = self.build_engine_config(reads_weights=reads_weights)
        from vllm.v1.engine.async_llm import AsyncLLM

        from mcore_rl.inference.vllm import adapters as vllm_adapters
        from mcore_rl.inference.vllm import drafts as vllm_drafts
        from mcore_rl.inference.vllm import worker as vllm_worker

        loggers: list[Any] = []
        if self._config.speculative.num_tokens:
            self._draft_counter, factory = vllm_drafts.DraftCounter.build()
            loggers.append(factory)

        def launch() -> AsyncLLM:
            with vllm_worker.prepare_forks(name):
                return AsyncLLM.from_vllm_config(
                    config, disable_log_stats=True, stat_loggers=loggers
                )

        # A thread of its own: see prepare_forks.
        with ThreadPoolExecutor(1, "vllm-start") as executor:
            try:
                self._engine = await asyncio.get_running_loop().run_in_executor(executor, launch)
            except RuntimeError as error:
                raise RuntimeError("vLLM's engine does not start; its stderr says why") from error
        resources = cast(Any, self._started_engine.engine_core).resources
        self._stop_watch = StoppedProcesses(
            [process.pid for process in resources.engine_manager.processes],
            coordinator=resources.coordinator and resources.coordinator.proc.pid,
        )
        await self._started_engine.update_weight_version(str(self._version))
        await self._started_engine.get_supported_tasks()  # cached for later requests
        frozen = vllm_adapters.build_frozen_requests(self._adapters)
        for request in frozen.values():
            await self._started_engine.add_lora(request)
        self._adapter_requests |= frozen

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        """See `Generator.submit`.

        Raises:
            ConfigError: prompt and response exceed the server's maximum length, or the server has
                no such adapter.
            StateError: the server does not serve, or records no experts.
        """
        self._check_length(len(prompt_ids), sampling.max_tokens, "rollout.max_response_tokens = ")
        if sampling.experts_from is not None and not self._records_experts:
            raise StateError("the server records no experts: it was started without")
        async with self._request_gate.run_request():
            async for output in self._generate(prompt_ids, request_id, **asdict(sampling)):
                last = output
            get_reason, experts_from = self._images.get_finish_reason, sampling.experts_from
            return [build_completion(o, get_reason(o), experts_from) for o in last.outputs]

    async def stream(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> AsyncIterator[NewTokens]:
        """See `Generator.stream`. Raises as `submit`."""
        self._check_length(len(prompt_ids), sampling.max_tokens, "rollout.max_response_tokens = ")
        async with self._request_gate.run_request():
            arguments = asdict(sampling) | {"output_kind": "DELTA"}
            async for output in self._generate(prompt_ids, request_id, **arguments):
                for new in output.outputs:
                    reason, ids = self._images.get_finish_reason(new), list(new.token_ids)
                    yield NewTokens(new.index, ids, get_log_probs(new), reason)

    async def abort(self, request_id: str) -> None:
        if engine_id := self._engine_ids.get(request_id):
            await self._started_engine.abort(engine_id)

    @asynccontextmanager
    async def start_together(self) -> AsyncIterator[None]:
        async with self._request_gate.start_together():
            await self._pause_scheduler("keep")
            try:
                yield
            finally:
                if self._request_gate.is_last_start:
                    await self._started_engine.resume_generation()

    async def score(self, token_ids: list[int]) -> TokenScores:
        """Score all tokens but the first, in one prefill.

        Raises:
            ConfigError: the tokens and one more, which vLLM must generate, exceed the maximum
                length.
            StateError: the server does not serve.
        """
        self._check_length(len(token_ids), 1)
        async with self._request_gate.run_request():
            async for output in self._generate(token_ids, **_SCORING):
                last = output
            return build_scores(token_ids[1:], last.prompt_logprobs[1:])

    async def decode(self, prompt_ids: list[int], num_tokens: int, seed: int) -> TokenScores:
        """Sample `num_tokens` at temperature 1, also past an end of sequence, and score them.

        Raises as `score`.
        """
        self._check_length(len(prompt_ids), num_tokens)
        async with self._request_gate.run_request():
            sampling: dict[str, Any] = {
                "max_tokens": num_tokens,
                "seed": seed,
                "logprobs": 1,
                "ignore_eos": True,
            }
            async for last in self._generate(prompt_ids, **sampling):
                (output,) = last.outputs
            return build_scores(list(output.token_ids), output.logprobs)

    async def trace(self, token_ids: list[int]) -> dict[str, torch.Tensor]:
        """Return each module's output in a prefill: float32 [tokens, dim], on the CPU.

        Names are Hugging Face's: "model.embed_tokens", "model.norm", "lm_head" (logits of every
        position); in layer N, after "model.layers.N.": "input_layernorm", "self_attn",
        "post_attention_layernorm", "mlp" and, in a layer of experts, "mlp.gate": routing weights
        [tokens, experts] as they multiply the experts' outputs, 0 for experts not chosen. It is
        missing if a kernel of vLLM chooses the experts.

        No other request runs meanwhile. Raises as `score`, ConfigError if the server has several
        data-parallel ranks, and RuntimeError if the engine compiles graphs (start it with `eager`).
        """
        if self._config.dp > 1:
            raise ConfigError(
                f"trace: rollout.dp={self._config.dp}: its ranks split the tokens of a layer among "
                "their workers; allowed: 1"
            )
        self._check_length(len(token_ids), 1)
        with self._lifecycle.run_alone(Call.TRACE):
            engine = self._started_engine
            if not engine.model_config.enforce_eager:
                raise RuntimeError("a trace sees nothing in compiled graphs: start it with eager")
            await engine.pause_generation(mode="wait")  # cancelled requests may still run in it
            await engine.resume_generation()
            return await run_trace(engine, self._generate(token_ids, **_SCORING), len(token_ids))

    @property
    def _started_engine(self) -> AsyncLLM:
        if self._engine is None:
            raise StateError(f"the server {self._lifecycle.state.value}")
        return self._engine

    async def _generate(
        self, prompt_ids: list[int], request_id: str = "", **sampling: Any
    ) -> AsyncIterator[Any]:
        """Yield vLLM's outputs of one request. `sampling` as in `build_request`, and images."""
        images, adapter = sampling.pop("images", ()), sampling.pop("adapter", "")
        group = sampling.pop("group", "")
        num_tokens = len(prompt_ids) + sampling.get("n", 1) * sampling["max_tokens"]
        if adapter not in self._adapter_requests:
            allowed = ", ".join(self._adapters) or "none, as the server has none"
            raise ConfigError(f"the server has no adapter {adapter!r}; allowed: {allowed}")
        sampling["stop_token_ids"] = sorted(self._images.token_ids)
        prompt, parameters = build_request(prompt_ids, **sampling)
        prompt = self._images.add(prompt, images)
        options: dict[str, Any] = {"lora_request": self._adapter_requests[adapter]}
        with self._router.route(group, num_tokens) as options["data_parallel_rank"]:
            # vLLM sends pixels once, and then their hash. A request that is cancelled while its
            # images are preprocessed leaves them marked as sent: the next one that names them ends
            # in an error, after which vLLM sends them again (v1/engine/core.py:2001).
            for may_lack_pixels in (True, False) if images else (False,):
                stream = self._run_in_engine(prompt, parameters, request_id, options)
                async with aclosing(stream) as outputs:
                    async for output in outputs:
                        if may_lack_pixels and has_failed(output):
                            break
                        if images:
                            check_prompt(output, prompt_ids)
                        yield output
                    else:
                        return

    async def _run_in_engine(
        self, prompt: Any, parameters: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Yield the engine's outputs of a request, which `abort` finds meanwhile."""
        engine_id = f"{request_id}#{next(self._request_ids)}"
        self._engine_ids[request_id or engine_id] = engine_id
        try:
            stream = self._started_engine.generate(prompt, parameters, engine_id, **options)
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    yield output
        finally:
            del self._engine_ids[request_id or engine_id]

    async def list_parameters(self) -> WorkerLists:
        return await list_worker_parameters(self._started_engine, self._model_path)

    async def connect_weights(
        self, endpoint: RendezvousEndpoint, spec: TransferSpec, first_rank: int
    ) -> None:
        info = {"endpoint": asdict(endpoint), "spec": spec.to_dict(), "first_rank": first_rank}
        method, arguments = "init_weight_transfer_engine", {"init_info": info}
        async with self._request_gate.run_beside_requests(Call.CONNECT):
            # Workers wait for each other in the call, and data-parallel ranks in each step: some
            # would be in the one, some in the other.
            pauses = self._config.dp > 1 and self._lifecycle.state is State.SERVING
            if pauses:
                await self._pause_scheduler("keep")
            try:
                await _call_workers(self._started_engine, "joining the trainer", method, arguments)
            finally:
                if pauses:
                    await self._started_engine.resume_generation()

    async def update(
        self, version: int, *, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        async with self._replace_weights(version, in_flight, recompute_cache):
            await update_workers(self._started_engine, version)

    async def load_checkpoint(
        self, path: str, version: int, *, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        check_same_shapes(path, self._model_path)
        if self._lifecycle.state is State.WAITING:  # vLLM reloads only what its loader has read
            raise StateError(
                "load_checkpoint: the server was started without weights; allowed: update"
            )
        async with self._replace_weights(version, in_flight, recompute_cache):
            task = f"weight update to version {version}"
            await _call_workers(self._started_engine, task, "load_checkpoint", {"path": path})

    async def load_adapters(self, content: bytes, alpha: float, version: int) -> None:
        from mcore_rl.inference.vllm import adapters as vllm_adapters

        if not self._adapter_rank:
            raise StateError("load_adapters: the server was started without adapters")
        async with self._replace_weights(version, in_flight=False, recompute_cache=False):
            arguments = {"version": version, "content": content, "alpha": alpha}
            task = f"adapters of version {version}"
            await _call_workers(self._started_engine, task, "store_adapters", arguments)
            self._adapter_requests[""] = vllm_adapters.build_request(version)

    @asynccontextmanager
    async def _replace_weights(
        self, version: int, in_flight: bool, recompute_cache: bool
    ) -> AsyncIterator[None]:
        """Pause the engine, replace weights in the with block, and continue with `version`."""
        is_asleep = self._lifecycle.state in ASLEEP  # then the cache is empty
        async with self._pause_engine(Call.UPDATE, keep=in_flight):
            engine = self._started_engine
            yield
            await engine.update_weight_version(str(version))
            if not is_asleep:
                await self._drop_caches(keep_running=in_flight and not recompute_cache)
            self._router.forget_groups()
            self._version = version
            if not is_asleep:
                await engine.resume_generation()

    async def _drop_caches(self, *, keep_running: bool) -> None:
        """Drop what older weights have computed: keys, values and embeddings of images.

        Args:
            keep_running: Running requests keep their keys and values. Otherwise they compute them
                again.
        """
        from mcore_rl.inference.vllm.patches.caches import FORGET_PREFIXES

        engine = self._started_engine
        if keep_running:
            await engine.engine_core.call_utility_async(FORGET_PREFIXES)
        elif not await engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("the prefix cache is still in use")
        await engine.reset_encoder_cache()

    @asynccontextmanager
    async def _pause_engine(self, call: Call, *, keep: bool) -> AsyncIterator[None]:
        """Pause the engine for a call. The caller resumes it.

        Args:
            keep: Keep running requests. Otherwise there are none, but the engine may still work on
                cancelled ones.
        """
        gate = self._request_gate
        async with gate.run_beside_requests(call) if keep else gate.run_alone(call):
            if self._lifecycle.state not in ASLEEP:
                if keep:  # and wait for outputs that are on their way: they are of this version
                    await self._started_engine.pause_generation(mode="keep", clear_cache=False)
                else:
                    await self._pause_scheduler("wait")
            yield

    async def _pause_scheduler(self, mode: Literal["keep", "wait"]) -> None:
        """Pause the engine without the 20 ms that pause_generation adds for outputs on their way.

        They are not required for correctness (vllm/v1/engine/async_llm.py:978).
        """
        await self._started_engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)

    async def sleep(self, *, keep: bool = False) -> None:
        if not self._can_sleep and self._lifecycle.state in (State.SERVING, State.WAITING):
            raise StateError("the server cannot sleep: it was started without can_sleep")
        async with self._pause_engine(Call.SLEEP, keep=keep):
            # Running requests are preempted: the cache is empty afterwards.
            # 1: the base model and its adapters stay in host memory
            level = 1 if self._adapter_rank or self._adapters else 2
            await self._started_engine.sleep(level=level, mode="keep")
            if keep:
                self._request_gate.hold_until_awake()

    async def wake(self, tag: SleepTag) -> None:
        call = Call.WAKE_WEIGHTS if tag == "weights" else Call.WAKE_KV_CACHE
        async with self._request_gate.run_alone(call):
            await self._started_engine.wake_up([tag])

    async def memory(self) -> ServerMemory:
        workers = await self._started_engine.collective_rpc("measure_memory")
        return ServerMemory(*map(sum, zip(*workers, strict=True)))

    async def take_draft_counts(self) -> DraftCounts:
        return DraftCounts() if self._draft_counter is None else self._draft_counter.take()

    def synchronize_call(self) -> None:
        if self._nodes is not None:
            self._nodes.synchronize_call()

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        self._request_gate.close()
        if self._headless is not None:
            self._headless.close()
        if self._stop_watch is not None:
            self._stop_watch.close()
        if engine is None or self._name is None:
            return
        from mcore_rl.inference.vllm import worker as vllm_worker

        engine.shutdown()
        vllm_worker.remove_shared_memory(self._name)


def _check_settings(model_path: str, dtype: str) -> None:
    """Raise ConfigError for a folder without config.json, or a dtype that servers do not take."""
    if not Path(model_path, "config.json").is_file():
        raise ConfigError(f"model.path {model_path!r} has no config.json of a checkpoint")
    if dtype not in _DTYPES:
        raise ConfigError(f"model.dtype {dtype!r} is not one of {', '.join(_DTYPES)}")


def _build_timeout_arguments(timeout_s: float | None) -> dict[str, Any]:
    """Return vLLM's engine arguments for time limits; set its other limits in the environment."""
    if timeout_s is None:
        return {}
    seconds = math.ceil(timeout_s)
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(seconds)
    os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(seconds)
    names = "distributed_timeout_seconds", "cpu_distributed_timeout_seconds"
    return dict.fromkeys(names, seconds)


async def _call_workers(
    engine: AsyncLLM, task: str, method: str, arguments: dict[str, Any]
) -> None:
    """Call a method of vLLM's workers through `WorkerExtension.attempt`, and raise their errors.

    An exception in a worker would leave the other workers' answers in the queue, to be read as
    those of the next call (v1/executor/multiproc_executor.py:433).

    Raises:
        RuntimeError: the method failed on a worker.
        PeerError: the same, and all workers that failed blame a peer.
    """
    errors = await engine.collective_rpc("attempt", args=(method, arguments))
    if any(errors):
        reasons = "; ".join(f"worker {i}: {e[0]}" for i, e in enumerate(errors) if e)
        is_peers = all(e[1] for e in errors if e)
        raise (PeerError if is_peers else RuntimeError)(f"{task} failed: {reasons}")


async def list_worker_parameters(engine: AsyncLLM, model_path: str) -> WorkerLists:
    """Return the parameters of all workers. See `GenerationServer.list_parameters`."""
    from mcore_rl.inference.vllm.weights import build_trace_error

    answers = await engine.collective_rpc("list_parameters")
    if reason := next((reason for _, reason in answers if reason), ""):
        raise build_trace_error(model_path, reason)
    lists = [parameters for parameters, _ in answers]
    return lists if all(lists) else []


async def update_workers(engine: AsyncLLM, version: int) -> None:
    """Run vLLM's phases of a weight update on all workers. Raises as `_call_workers`."""
    task, info = f"weight update to version {version}", {"update_info": {"version": version}}
    await _call_workers(engine, task, "begin_weight_update", {})
    await _call_workers(engine, task, "update_weights", info)
    await _call_workers(engine, task, "finish_weight_update", {})
