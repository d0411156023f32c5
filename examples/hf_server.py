"""A rollout backend of one's own: `generate` of plain transformers, in the worker's process.

    mcore-rl rl recipe=quickstart rollout.backend=examples/hf_server.py:HFServer

For debugging: any model that transformers has, every line in Python, and log-probs of the code that
a checkpoint is published with. Responses that wait form a batch; a pause for new weights ends the
call of `generate`, and the next one computes the keys and values of all tokens so far.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)
from transformers.utils import logging

from mcore_rl.config.errors import StateError
from mcore_rl.data.images import ImageStore, ImageTokens
from mcore_rl.data.tokenizer import has_tokenizer, read_stop_ids, read_tokenizer
from mcore_rl.inference.lifecycle import Call, Gate, State
from mcore_rl.inference.protocol import (
    Completion,
    GenerationServer,
    SamplingParams,
    ServerFeatures,
    ServerMemory,
    ServerSpec,
    SleepTag,
)
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.weight_sync.receiver import TensorReceiver, check_same_shapes
from mcore_rl.weight_sync.spec import TransferSpec


@dataclass(eq=False)
class Response:
    """A response that waits or runs. It is sampled in a thread, and may be aborted in another."""

    prompt_ids: list[int]
    sampling: SamplingParams
    generator: torch.Generator
    tokens: list[tuple[int, float, int]] = field(default_factory=list)  # id, log-prob, version
    result: Future[Completion] = field(default_factory=Future)

    def sample(self, logits: torch.Tensor, version: int) -> int:
        """Sample the next token from [vocabulary] logits."""
        sampling = self.sampling
        log_probs = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
        if sampling.temperature == 0:
            token = int(log_probs.argmax())
        else:
            if sampling.top_p < 1 or sampling.top_k:
                log_probs = truncate(log_probs, sampling.top_p, sampling.top_k)
            token = int(torch.multinomial(log_probs.exp(), 1, generator=self.generator))
        self.tokens.append((token, float(log_probs[token]), version))
        return token

    def end(self, reason: str, stop_string: str = "") -> None:
        """Return the tokens so far to the request, unless it has ended."""
        ids, log_probs, versions = (
            map(list, zip(*self.tokens, strict=True)) if self.tokens else ([], [], [])
        )
        with contextlib.suppress(InvalidStateError):
            self.result.set_result(Completion(ids, log_probs, reason, versions, stop_string))


def truncate(log_probs: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Return the log-probs of the distribution cut to its likeliest tokens; of others -inf."""
    ordered, order = log_probs.sort(descending=True)
    probability_before = ordered.exp().cumsum(-1) - ordered.exp()
    is_cut = probability_before >= top_p
    if top_k:
        is_cut[top_k:] = True
    return log_probs.index_fill(-1, order[is_cut], -torch.inf).log_softmax(-1)


class HFServer(GenerationServer):
    """A server with one model of transformers."""

    engine_name = "transformers' model"
    features = ServerFeatures(
        weight_format="huggingface", sleep=True, updates_in_flight=True, images=True
    )

    def __init__(self, spec: ServerSpec) -> None:
        super().__init__(spec)
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._tokenizer = (
            read_tokenizer(spec.model_path) if has_tokenizer(spec.model_path) else None
        )
        eos_id = None if self._tokenizer is None else self._tokenizer.eos_token_id
        self._stop_ids = {*read_stop_ids(spec.model_path), eos_id}
        self._generator = torch.Generator(self._device).manual_seed(spec.seed)
        self._receiver = TensorReceiver(spec.model_path, self._device)
        self._model: Any = None
        self._images = ImageTokens.load(spec.model_path)
        self._model_class: Any = AutoModelForCausalLM
        if self._images is not None:
            self._model_class = AutoModelForImageTextToText
        self._responses: list[Response] = []  # that have not ended, and some that have
        self._requests: dict[str, list[Response]] = {}
        self._has_responses = asyncio.Event()
        self._may_generate = Gate()
        self._model_lock = asyncio.Lock()  # held in a call of generate, and while weights change
        self._scheduler: asyncio.Task[None] | None = None

    async def start(self, *, reads_weights: bool = True) -> None:
        logging.disable_progress_bar()
        call = Call.START if reads_weights else Call.START_WITHOUT_WEIGHTS
        with self._lifecycle.run_alone(call):
            if reads_weights:
                await asyncio.to_thread(self._load_model, self.spec.model_path, None)
            else:
                config = self._read_config()
                with torch.device("meta"):
                    self._model_class = type(
                        self._model_class.from_config(config, trust_remote_code=False)
                    )
                self._may_generate.hold("weights")
            self._scheduler = asyncio.create_task(self._run_batches())

    def _load_model(self, path: str | None, tensors: dict[str, torch.Tensor] | None) -> None:
        """Load weights from a folder, or out of tensors with the names of a checkpoint."""
        self._model = None
        options = {
            "config": self._read_config(),
            "dtype": getattr(torch, self.spec.dtype),
            "state_dict": tensors,
        }
        model = self._model_class.from_pretrained(path, trust_remote_code=False, **options)
        self._model = model.to(self._device).eval()
        self._model_class = type(model)
        self._model.generation_config = GenerationConfig()  # sampling comes from requests alone

    def _read_config(self) -> Any:
        return AutoConfig.from_pretrained(
            self.spec.model_path, local_files_only=True, trust_remote_code=False
        )

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        self._check_length(len(prompt_ids), sampling.max_tokens, "rollout.max_response_tokens = ")
        async with self._request_gate.run_request():
            responses = [
                Response(prompt_ids, sampling, self._create_generator(sampling.seed, index))
                for index in range(sampling.n)
            ]
            self._responses += responses
            if request_id:
                self._requests[request_id] = responses
            self._has_responses.set()
            try:
                return await asyncio.gather(*(asyncio.wrap_future(r.result) for r in responses))
            finally:
                self._requests.pop(request_id, None)

    def _create_generator(self, seed: int | None, index: int) -> torch.Generator:
        if seed is None:
            return self._generator
        return torch.Generator(self._device).manual_seed(seed + index)

    async def abort(self, request_id: str) -> None:
        for response in self._requests.get(request_id, ()):
            response.end("abort")

    @asynccontextmanager
    async def start_together(self) -> AsyncIterator[None]:
        async with self._request_gate.start_together():
            self._may_generate.hold("start")
            try:
                yield
            finally:
                if self._request_gate.is_last_start:
                    self._may_generate.release("start")

    async def _run_batches(self) -> None:
        """Generate the responses that wait, batch by batch."""
        while True:
            await self._has_responses.wait()
            await self._may_generate.wait_open()
            async with self._model_lock:
                self._responses = [r for r in self._responses if not r.result.done()]
                batch = self._responses[: self.spec.settings.max_num_seqs]
                if not batch:
                    self._has_responses.clear()
                elif self._may_generate.is_open:
                    try:
                        await asyncio.to_thread(self._generate, batch)
                    except Exception as error:  # noqa: BLE001 (the requests raise it)
                        for response in batch:
                            with contextlib.suppress(InvalidStateError):
                                response.result.set_exception(error)

    @torch.inference_mode()
    def _generate(self, batch: list[Response]) -> None:
        """Continue a batch until all responses have ended, or new weights are to come."""
        rows = [r.prompt_ids + [token for token, _, _ in r.tokens] for r in batch]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self._device)
        is_token = [[0] * (width - len(row)) + [1] * len(row) for row in rows]

        def sample(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            tokens = [
                0 if r.result.done() else self._sample(r, row)
                for r, row in zip(batch, logits, strict=True)
            ]
            chosen = torch.tensor(tokens, device=self._device)[:, None]
            return torch.full_like(logits, -torch.inf).scatter(1, chosen, 0.0)

        def has_ended(*_: object) -> torch.Tensor:
            is_paused = self._may_generate.is_held("weights")
            return torch.tensor([is_paused or r.result.done() for r in batch], device=self._device)

        self._model.generate(
            ids,
            attention_mask=torch.tensor(is_token, device=self._device),
            max_new_tokens=max(r.sampling.max_tokens - len(r.tokens) for r in batch),
            do_sample=False,  # takes the token that `sample` leaves
            pad_token_id=0,
            logits_processor=[sample],
            stopping_criteria=[has_ended],
            **self._build_image_inputs(batch, ids),
        )

    def _build_image_inputs(self, batch: list[Response], ids: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of the model for the images of a batch."""
        digests = [digest for response in batch for digest in response.sampling.images]
        if self._images is None or not digests:
            return {}
        store = ImageStore.open(self.spec.images_folder)
        pixels = [self._images.compute_pixels(store.read(digest)) for digest in digests]
        return {
            "pixel_values": torch.cat([values for values, _ in pixels]).to(self._device),
            "image_grid_thw": torch.stack([grid for _, grid in pixels]).to(self._device),
            "mm_token_type_ids": (ids == self._images.token_id).int(),
        }

    def _sample(self, response: Response, logits: torch.Tensor) -> int:
        """Sample a token of a response, and end the response if that completes it."""
        sampling, token = response.sampling, response.sample(logits, self._version)
        text = ""
        if sampling.stop and self._tokenizer is not None:
            text = self._tokenizer.decode([token for token, _, _ in response.tokens])
        stop_string = next((stop for stop in sampling.stop if stop in text), "")
        is_image = self._images is not None and token in self._images.special_ids
        if token in self._stop_ids or stop_string:
            response.end("stop", stop_string)
        elif is_image or len(response.tokens) == sampling.max_tokens:
            response.end("length")
        return token

    @asynccontextmanager
    async def _pause(self, call: Call, *, keep: bool) -> AsyncIterator[None]:
        """End the running call of `generate`, and begin none until the server serves again."""
        gate = self._request_gate
        async with gate.run_beside_requests(call) if keep else gate.run_alone(call):
            self._may_generate.hold("weights")
            async with self._model_lock:
                yield
        self._resume_if_serving()

    def _resume_if_serving(self) -> None:
        if self._lifecycle.state is State.SERVING:
            self._may_generate.release("weights")

    async def connect_weights(
        self, endpoint: RendezvousEndpoint, spec: TransferSpec, first_rank: int
    ) -> None:
        async with self._request_gate.run_beside_requests(Call.CONNECT):
            await asyncio.to_thread(self._receiver.connect, endpoint, spec, first_rank)

    async def update(
        self, version: int, *, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        async with self._pause(Call.UPDATE, keep=in_flight):
            tensors = await asyncio.to_thread(self._receiver.receive, version)
            await asyncio.to_thread(self._load_model, None, tensors)
            self._version = version

    async def load_checkpoint(
        self, path: str, version: int, *, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        check_same_shapes(path, self.spec.model_path)
        async with self._pause(Call.UPDATE, keep=in_flight):
            await asyncio.to_thread(self._load_model, path, None)
            self._version = version

    async def sleep(self, *, keep: bool = False) -> None:
        if not self.spec.can_sleep and self._lifecycle.state is State.SERVING:
            raise StateError("the server cannot sleep: it was started without can_sleep")
        async with self._pause(Call.SLEEP, keep=keep):
            self._model = None
            torch.cuda.empty_cache()
            if keep:
                self._request_gate.hold_until_awake()

    async def wake(self, tag: SleepTag) -> None:
        call = Call.WAKE_WEIGHTS if tag == "weights" else Call.WAKE_KV_CACHE
        async with self._request_gate.run_alone(call):
            pass  # an update allocates the weights, and generate its cache
        self._resume_if_serving()

    async def memory(self) -> ServerMemory:
        weights = [] if self._model is None else self._model.parameters()
        return ServerMemory(sum(p.numel() * p.element_size() for p in weights), 0)

    async def close(self) -> None:
        await super().close()
        self._may_generate.hold("weights")
        async with self._model_lock:
            scheduler, self._scheduler = self._scheduler, None
            if scheduler is not None:
                scheduler.cancel()
        for response in self._responses:
            response.end("abort")
        self._receiver.close()
        self._model = None
