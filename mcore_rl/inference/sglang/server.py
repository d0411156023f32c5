"""The rollout backend `sglang`: GenerationServer by SGLang's /generate and its routes for weights.

Against SGLang 0.5.23, which decides these points:

- Seeds count only with --enable-deterministic-inference; a request without one then has seed 42
  (sampling/sampling_batch_info.py:157). So a request always has one, and `n` requests have theirs:
  SGLang's own `n` repeats a seed (managers/tokenizer_manager.py:2165).
- `output_token_logprobs` have the temperature applied, but not top_p and top_k
  (layers/sampler.py:275-315). `output_token_sampling_logprobs` have; they need a finite top_k up to
  --sampling-mask-max-tokens (managers/scheduler.py:3160).
- A pause of mode "retract" computes keys and values of running requests again, and the prefix
  cache can be emptied in it (managers/io_struct.py:1927, managers/scheduler.py:5518).
- `weight_versions` are spans of tokens by version (utils/weight_versions.py).
- A response has one token less than the context allows (managers/scheduler.py:2714).
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import random
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.checks import read_secret
from mcore_rl.config.errors import ConfigError, StateError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.tokenizer import has_tokenizer, read_stop_ids, read_tokenizer
from mcore_rl.inference.kv_cache import count_token_bytes
from mcore_rl.inference.lifecycle import Call, State
from mcore_rl.inference.protocol import (
    Completion,
    GenerationServer,
    SamplingParams,
    ServerFeatures,
    ServerSpec,
    SleepTag,
)
from mcore_rl.inference.sglang.client import SGLangClient, SGLangConnectionError, SGLangError
from mcore_rl.inference.sglang.process import SGLangProcess
from mcore_rl.models.base import get_field
from mcore_rl.models.rope import count_positions
from mcore_rl.weight_sync.receiver import check_same_shapes

# Arguments that come from other settings, or would break what a server has to do.
RESERVED = frozenset(
    {
        "admin_api_key", "allow_auto_truncate", "api_key", "chunked_prefill_size", "config",
        "context_length", "dp_size", "dtype", "enable_deterministic_inference",
        "enable_memory_saver", "ep_size", "host", "load_format", "max_running_requests",
        "max_total_tokens", "model", "model_path", "nnodes", "node_rank", "port",
        "preferred_sampling_params", "random_seed", "sampling_mask_max_tokens",
        "skip_tokenizer_init", "tensor_parallel_size", "tokenizer_path", "tp", "tp_size",
        "weight_version",
    }
)  # fmt: skip
_TOKEN_BYTES = 256  # of a reply: id, log-prob
_MASK_BYTES = 12  # of a reply: an id in the support of a token
_ABORT_S, _ABORT_POLL_S = 5.0, 0.05
_SPARE_TOKENS = 8  # of the context, beyond prompt and response
_MAX_SEED = 2**62


@dataclass(eq=False)
class _Response:
    """A response that a task waits for."""

    request_id: str  # SGLang's; none is the beginning of another
    task: asyncio.Task[dict[str, Any]]
    is_aborted: bool = False


class SGLangServer(GenerationServer):
    """A client of a server of SGLang, which it may start."""

    engine_name = display_name = "SGLang"
    features = ServerFeatures(tensor_parallel=True, sleep=True, updates_in_flight=True, sglang=True)

    def __init__(self, spec: ServerSpec) -> None:
        super().__init__(spec)
        self.check_settings(spec.settings, "rollout")
        self._settings = spec.settings.sglang
        eos_id = read_tokenizer(spec.model_path).eos_token_id if self._has_tokenizer else None
        eos_ids = [] if eos_id is None else [int(eos_id)]
        self._stop_ids = sorted({*read_stop_ids(spec.model_path), *eos_ids})
        self._config = CheckpointReader(spec.model_path).read_config()
        self._vocab_size = int(get_field(self._config, "vocab_size"))
        self._max_mask_tokens = self._vocab_size
        self._random = random.Random(spec.seed)  # seeds of requests without one
        self._process: SGLangProcess | None = None
        self._client: SGLangClient | None = None
        self._description = ""
        self._connection_error = ""
        self._requests: dict[str, list[_Response]] = {}

    @classmethod
    def check_settings(cls, settings: RolloutConfig, key: str) -> None:
        sglang, name = settings.sglang, f"{key}.sglang"
        for argument, value in sglang.arguments.items():
            _check_argument(f"{name}.arguments.{argument}", str(argument), value)
        if not sglang.url:
            if sglang.api_key_env:
                raise ConfigError(
                    f"{name}.api_key_env={sglang.api_key_env!r} is of a server at {name}.url; "
                    "allowed: '', since a server that the run starts gets a key of its own"
                )
            return
        parts = urlsplit(sglang.url)
        is_plain = not (parts.query or parts.fragment or parts.username or parts.path.strip("/"))
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
            raise ConfigError(f"{name}.url={sglang.url!r}; allowed: http://HOST:PORT or https://")
        for setting, value in (("arguments", sglang.arguments), ("python", sglang.python)):
            if value:
                raise ConfigError(
                    f"{name}.{setting}={value!r} is of a server that the run starts; allowed: none "
                    f"with {name}.url"
                )
        if settings.num_servers > 1:
            raise ConfigError(
                f"{key}.num_servers={settings.num_servers}: {name}.url is one server; allowed: 1"
            )
        if sglang.api_key_env:
            read_secret(f"{name}.api_key_env", sglang.api_key_env)

    @classmethod
    def check_device(cls, settings: RolloutConfig, key: str, device: str) -> None:
        if settings.sglang.url:
            return
        backend = f"{key}.backend='sglang'"
        if device == "cpu":
            raise ConfigError(
                f"{backend}: SGLang's packages have no kernels for CPUs; allowed: a node with "
                f"GPUs, or {key}.sglang.url of a server that runs"
            )
        python = settings.sglang.python
        if python and not os.access(python, os.X_OK):
            raise ConfigError(
                f"{key}.sglang.python={python!r} is no program; allowed: the interpreter of an "
                "environment with sglang"
            )
        if not python and importlib.util.find_spec("sglang") is None:
            raise ConfigError(
                f"{backend}: the package sglang is not installed; allowed: {key}.sglang.python of "
                f"an environment that has it, or {key}.sglang.url of a server that runs"
            )

    @classmethod
    def get_kv_cache_bytes(cls, settings: RolloutConfig) -> int | None:
        return 0 if settings.sglang.url else settings.kv_cache_bytes  # there it is the user's

    @property
    def is_dead(self) -> bool:
        is_closed = self._lifecycle.state is State.CLOSED
        has_exited = self._process is not None and self._process.exit_status is not None
        return not is_closed and (has_exited or bool(self._connection_error))

    @property
    def death_reason(self) -> str:
        return self._connection_error

    @property
    def description(self) -> str:
        return self._description

    @property
    def _has_tokenizer(self) -> bool:
        return has_tokenizer(self.spec.model_path)

    async def start(self, *, reads_weights: bool = True) -> None:
        call = Call.START if reads_weights else Call.START_WITHOUT_WEIGHTS
        with self._lifecycle.run_alone(call):
            await (
                self._connect(reads_weights) if self._settings.url else self._launch(reads_weights)
            )

    async def _launch(self, reads_weights: bool) -> None:
        """Start a server and wait for it."""
        arguments = self._build_arguments(reads_weights)
        self._process = SGLangProcess(self._settings.python, arguments)
        self._client = SGLangClient(self._process.url, self._process.key, self.spec.timeout_s)
        try:
            async with asyncio.timeout(self.spec.timeout_s):
                await self._process.wait_until_healthy(self._client)
        except BaseException:
            await self._disconnect()
            raise
        info = await self._call("/server_info", is_get=True)
        self._description = f"SGLang {info.get('version', 'of an unknown version')}"

    def _build_arguments(self, reads_weights: bool) -> dict[str, Any]:
        """Return the arguments of `sglang.launch_server`."""
        spec, settings = self.spec, self.spec.settings
        token_bytes = count_token_bytes(self._config, settings, spec.dtype)
        positions = count_positions(self._config) or 0
        context = spec.max_model_tokens + _SPARE_TOKENS
        arguments: dict[str, Any] = {
            "model_path": spec.model_path,
            "dtype": spec.dtype,
            "context_length": min(context, positions) if positions else context,
            "random_seed": spec.seed % 2**31,
            "max_total_tokens": self.compute_kv_cache_bytes() // token_bytes,
            "tp_size": settings.tp,
            "enable_deterministic_inference": True,
            "sampling_mask_max_tokens": self._vocab_size,
            "weight_version": "0",
            "load_format": "auto" if reads_weights else "dummy",
        }
        optional = {
            "ep_size": settings.tp if settings.ep else None,
            "max_running_requests": settings.max_num_seqs,
            "chunked_prefill_size": settings.max_num_batched_tokens,
            "enable_memory_saver": spec.can_sleep or None,
            "skip_tokenizer_init": None if self._has_tokenizer else True,
        }
        arguments |= {name: value for name, value in optional.items() if value is not None}
        return self._settings.arguments | arguments  # the last of two options counts

    async def _connect(self, reads_weights: bool) -> None:
        """Connect to the server at rollout.sglang.url, and load the checkpoint there."""
        name = "rollout.sglang"
        variable = self._settings.api_key_env
        key = read_secret(f"{name}.api_key_env", variable) if variable else ""
        self._client = SGLangClient(self._settings.url.rstrip("/"), key, self.spec.timeout_s)
        info = await self._call("/server_info", is_get=True)
        model = await self._call("/model_info", is_get=True)
        place = f"{name}.url={self._settings.url!r}"
        if not info.get("enable_deterministic_inference"):
            raise ConfigError(
                f"{place} ignores the seeds of requests; allowed: a server with "
                "--enable-deterministic-inference"
            )
        if self.spec.can_sleep and not info.get("enable_memory_saver"):
            raise ConfigError(
                f"{place} cannot free its memory; allowed: a server with --enable-memory-saver, or "
                "placement.rollout='own'"
            )
        if preferred := model.get("preferred_sampling_params"):
            raise ConfigError(f"{place} has --preferred-sampling-params {preferred}; allowed: none")
        expected = self._config.get("architectures")
        if model.get("architectures") not in (None, expected):
            raise ConfigError(
                f"{place} serves a model of {model['architectures']}; allowed: {expected}, as "
                f"{self.spec.model_path}"
            )
        self._max_mask_tokens = int(info.get("sampling_mask_max_tokens") or 0)
        version = info.get("version", "of an unknown version")
        self._description = f"SGLang {version} at {self._settings.url}"
        if reads_weights:  # it may have those of another run
            await self._call("/pause_generation", mode="retract")
            await self._load(self.spec.model_path, 0)
            await self._call("/continue_generation")

    async def _call(self, route: str, *, is_get: bool = False, **body: Any) -> dict[str, Any]:
        """Return the JSON object of a reply, or {} for another value."""
        assert self._client is not None  # start creates it
        try:
            client = self._client
            reply = await (client.get(route) if is_get else client.post(route, body))
        except SGLangConnectionError as error:
            self._connection_error = str(error)
            raise
        return reply if isinstance(reply, dict) else {}

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        self._check_length(len(prompt_ids), sampling.max_tokens, "rollout.max_response_tokens = ")
        body = self._build_request(prompt_ids, sampling)
        async with self._request_gate.run_request():
            first_seed = sampling.seed
            if first_seed is None:
                first_seed = self._random.randrange(_MAX_SEED)
            responses = [self._send(body, first_seed + i) for i in range(sampling.n)]
            if request_id:
                self._requests[request_id] = responses
            try:
                return await asyncio.gather(*(self._receive(r, sampling) for r in responses))
            finally:
                self._requests.pop(request_id, None)
                for response in responses:
                    response.task.cancel()  # SGLang ends a request without a connection

    def _build_request(self, prompt_ids: list[int], sampling: SamplingParams) -> dict[str, Any]:
        """Return the body of /generate, without id and seed."""
        is_cut = _is_cut(sampling)
        top_k = sampling.top_k or (self._vocab_size if is_cut else -1)
        if is_cut and top_k > self._max_mask_tokens:
            raise ConfigError(
                f"top_p={sampling.top_p}, top_k={sampling.top_k}: rollout.sglang.url gives "
                f"log-probs of distributions of up to {self._max_mask_tokens} tokens; allowed: a "
                f"smaller top_k, or a server with --sampling-mask-max-tokens {self._vocab_size}"
            )
        return {
            "input_ids": prompt_ids,
            "return_logprob": True,
            "return_sampling_mask": is_cut,
            "cache_salt": sampling.cache or None,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p if sampling.temperature else 1.0,
                "top_k": top_k if sampling.temperature else -1,
                "stop": list(sampling.stop),
                "stop_token_ids": self._stop_ids,
                "max_new_tokens": sampling.max_tokens,
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
        }

    def _send(self, body: dict[str, Any], seed: int) -> _Response:
        """Send one response's request."""
        assert self._client is not None  # the server serves
        request_id, sampling = uuid.uuid4().hex, body["sampling_params"]
        body = {**body, "rid": request_id, "sampling_params": sampling | {"sampling_seed": seed}}
        mask_bytes = sampling["top_k"] * _MASK_BYTES if body["return_sampling_mask"] else 0
        max_bytes = sampling["max_new_tokens"] * (_TOKEN_BYTES + mask_bytes)
        return _Response(request_id, asyncio.create_task(self._client.generate(body, max_bytes)))

    async def _receive(self, response: _Response, sampling: SamplingParams) -> Completion:
        """Wait for a response."""
        await asyncio.wait([response.task])
        if response.task.cancelled():
            return Completion([], [], "abort", [])
        try:
            reply = response.task.result()
        except SGLangConnectionError as error:
            self._connection_error = str(error)
            raise
        return parse_completion(reply, sampling, is_aborted=response.is_aborted)

    async def abort(self, request_id: str) -> None:
        responses = self._requests.get(request_id, [])
        for response in responses:
            response.is_aborted = True
        # SGLang ignores an id that it does not know yet (managers/tokenizer_manager.py:2252).
        deadline = asyncio.get_running_loop().time() + _ABORT_S
        while running := [r for r in responses if not r.task.done()]:
            if asyncio.get_running_loop().time() > deadline:
                for response in running:
                    response.task.cancel()
                return
            for response in running:
                await self._call("/abort_request", rid=response.request_id)
            await asyncio.wait([r.task for r in running], timeout=_ABORT_POLL_S)

    @asynccontextmanager
    async def _pause(self, call: Call, *, keep: bool) -> AsyncIterator[None]:
        """Pause all requests, also of other clients, until the server serves again."""
        gate = self._request_gate
        async with gate.run_beside_requests(call) if keep else gate.run_alone(call):
            await self._call("/pause_generation", mode="retract")
            yield
        await self._resume_if_serving()

    async def _resume_if_serving(self) -> None:
        if self._lifecycle.state is State.SERVING:
            await self._call("/continue_generation")

    async def _load(self, path: str, version: int) -> None:
        """Load a checkpoint while requests are paused."""
        # With load_format=None SGLang takes that of its start, which may be "dummy".
        await self._call(
            "/update_weights_from_disk",
            model_path=path,
            load_format="auto",
            weight_version=str(version),
            flush_cache=True,
        )
        served = (await self._call("/model_info", is_get=True)).get("weight_version")
        if served != str(version):
            raise SGLangError(f"SGLang has version {served!r} after an update to {version}")

    async def load_checkpoint(
        self, path: str, version: int, *, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        check_same_shapes(path, self.spec.model_path)
        async with self._pause(Call.UPDATE, keep=in_flight):
            await self._load(path, version)
            self._version = version

    async def sleep(self, *, keep: bool = False) -> None:
        if not self.spec.can_sleep and self._lifecycle.state is State.SERVING:
            raise StateError("the server cannot sleep: it was started without can_sleep")
        async with self._pause(Call.SLEEP, keep=keep):
            await self._call("/release_memory_occupation", tags=["kv_cache", "weights"])
            if keep:
                self._request_gate.hold_until_awake()

    async def wake(self, tag: SleepTag) -> None:
        call = Call.WAKE_WEIGHTS if tag == "weights" else Call.WAKE_KV_CACHE
        async with self._request_gate.run_alone(call):
            await self._call("/resume_memory_occupation", tags=[tag])
        await self._resume_if_serving()

    async def close(self) -> None:
        await super().close()
        await self._disconnect()

    async def _disconnect(self) -> None:
        """Close the connections, and end the server if this process has started it."""
        client, self._client = self._client, None
        process, self._process = self._process, None
        if client is not None:
            await client.close()
        if process is not None:
            await asyncio.to_thread(process.close)


def parse_completion(
    reply: dict[str, Any], sampling: SamplingParams, *, is_aborted: bool = False
) -> Completion:
    """Parse a reply of /generate.

    Args:
        is_aborted: The request was aborted: its tokens so far are expected.

    Raises:
        SGLangError: the reply lacks something, has something wrong, or says that it failed.
    """
    try:
        meta = reply["meta_info"]
        token_ids = [int(token) for token in reply["output_ids"]]
        pairs = [(entry[0], int(entry[1])) for entry in meta["output_token_logprobs"]]
        log_probs = [float(log_prob) for log_prob, _ in pairs]
        if _is_cut(sampling):
            log_probs = [float(value) for value in meta["output_token_sampling_logprobs"]]
        versions = [
            int(span["version"])
            for span in (meta["weight_versions"] if token_ids else [])
            for _ in range(span["start"], min(span["end"], len(token_ids)))
        ]
        reason = meta["finish_reason"]
        kind, matched = str(reason["type"]), reason.get("matched")
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise SGLangError(f"/generate: the reply has no valid {error}") from error
    if kind == "abort":
        if not is_aborted:
            raise SGLangError(f"SGLang has aborted a request: {reason.get('message')}")
        num_tokens = min(len(token_ids), len(log_probs), len(versions))
        token_ids, log_probs = token_ids[:num_tokens], log_probs[:num_tokens]
        versions, pairs = versions[:num_tokens], pairs[:num_tokens]
    elif kind == "length" and len(token_ids) != sampling.max_tokens:
        raise SGLangError(
            f"SGLang has ended a response after {len(token_ids)} of {sampling.max_tokens} tokens: "
            "its context or its KV cache is too small"
        )
    elif kind not in ("stop", "length"):
        raise SGLangError(f"/generate: finish_reason is {reason}")
    if isinstance(matched, str) and matched not in sampling.stop:
        raise SGLangError(f"SGLang has ended a response: {matched}")
    if not len(log_probs) == len(versions) == len(token_ids):
        raise SGLangError(
            f"/generate: {len(token_ids)} tokens, {len(log_probs)} log-probs and {len(versions)} "
            "versions; allowed: as many"
        )
    if [token for _, token in pairs] != token_ids or not all(map(math.isfinite, log_probs)):
        raise SGLangError("/generate: log-probs are not those of the tokens")
    stop_string = matched if isinstance(matched, str) else ""
    return Completion(token_ids, log_probs, kind, versions, stop_string)


def _is_cut(sampling: SamplingParams) -> bool:
    """Return whether a part of the distribution is sampled."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def _check_argument(key: str, name: str, value: Any) -> None:
    """Check a server argument of rollout.sglang.arguments."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or name in RESERVED:
        raise ConfigError(
            f"{key}: allowed: names of arguments of `sglang.launch_server`, with '_', except "
            f"{', '.join(sorted(RESERVED))}, which other settings decide"
        )
    entries = value if isinstance(value, list) else [value]
    if not entries or not all(isinstance(entry, str | int | float) for entry in entries):
        raise ConfigError(f"{key}={value!r}; allowed: text, a number, true, false, or a list")
