"""The contract of a generation server: token ids in, token ids and their log-probs out.

`GenerationServer` is the class behind the setting rollout.backend; `mcore_rl.testing.check_server`
puts one through its rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from mcore_rl.config.errors import ConfigError, StateError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.sample import RoutedExperts
from mcore_rl.inference.kv_cache import CPU_BYTES, count_need
from mcore_rl.inference.lifecycle import Lifecycle, RequestGate
from mcore_rl.models.base import HFConfig, read_config
from mcore_rl.parallel.devices import detect_device
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.weight_sync.spec import TransferSpec, WeightFormat, WorkerLists

SleepTag = Literal["weights", "kv_cache"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request."""

    n: int = 1  # completions per prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    stop: tuple[str, ...] = ()  # texts that end a response
    max_tokens: int = 1024
    seed: int | None = None  # per request; None draws from the server's own generator
    cache: str = ""  # namespace of the prefix cache (vLLM's cache_salt)
    # Return the routed experts of the prompt tokens from this index on, and of the response.
    # None: of no token.
    experts_from: int | None = None
    # Digests of the prompt's images in the ImageStore, in the order of their tokens.
    images: tuple[str, ...] = ()
    adapter: str = ""  # one of ServerSpec.adapters instead of the policy
    # Requests of one name begin alike, and go to one data-parallel rank for its prefix cache.
    group: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """One response. Lists have one entry per token, including the end-of-sequence token."""

    token_ids: list[int]
    log_probs: list[float]  # nats, with temperature (at 0 that of 1), top_p and top_k applied
    finish_reason: str  # "stop" (end of sequence, or a stop string), "length" or "abort"
    weight_versions: list[int]  # version of the weights that chose the token
    stop_string: str = ""  # completed by the last token, if any
    # Experts of each token from `experts_from`, except the last (never run through the model).
    # None: not requested, or no token was sampled.
    routed_experts: RoutedExperts | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """New tokens of one response of a streamed request."""

    index: int  # of the response among the request's n
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str | None  # None while the response goes on


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probs of tokens, each given all tokens before it. Lists have one entry per token."""

    token_ids: list[int]
    log_probs: list[float]  # nats, at temperature 1
    top_ids: list[int]  # most likely token at each position


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Memory of all workers of a server; 0 for what is asleep."""

    weights_bytes: int
    kv_cache_bytes: int


class Generator(Protocol):
    """The part of a server that an agent loop needs."""

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        """Generate `sampling.n` completions of one prompt.

        Args:
            request_id: Name for `abort`, unique among running requests.
        """

    def stream(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> AsyncIterator[NewTokens]:
        """Generate as `submit`, and yield tokens as they are sampled."""

    async def abort(self, request_id: str) -> None:
        """End a request: its tokens so far are returned with the finish reason "abort"."""

    def start_together(self) -> AbstractAsyncContextManager[None]:
        """Hold the requests made inside the block; all start when it ends.

        Otherwise the first ones run in a batch of their own, whose size depends on timing, and
        sums of floats in another batch differ in their last digits.
        """


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Arguments of a server, the same for every backend."""

    model_path: str  # folder of a Hugging Face checkpoint
    dtype: str  # of weights and computation: "float32" or "bfloat16"
    max_model_tokens: int  # prompt and response
    settings: RolloutConfig  # rollout.*, or those of a frozen model
    seed: int
    timeout_s: float | None = None  # limit of each call
    can_sleep: bool = False  # its devices are a trainer's, too
    records_experts: bool = False  # as `SamplingParams.experts_from` needs
    adapter_rank: int = 0  # of the adapters that it takes; 0: none
    # Folders in PEFT's format of frozen adapters, by name, which are served beside the policy.
    adapters: Mapping[str, str] = field(default_factory=dict)
    images_folder: str = ""  # of the ImageStore that requests name images of; "": none
    node_rank: int = 0  # among the settings.nodes_per_server nodes of the server
    num_sequences: int | None = None  # most at once; None: as many as the server takes


@dataclass(frozen=True, slots=True)
class ServerFeatures:
    """Abilities of a backend. A setting that needs another is refused before anything starts."""

    # Layout of weights over a transport: "huggingface" (each worker gets all tensors of a
    # checkpoint, whole) or "vllm". None: checkpoints only (weight_sync.method=full_export).
    weight_format: WeightFormat | None = None
    tensor_parallel: bool = False  # rollout.tp above 1, rollout.ep
    data_parallel: bool = False  # rollout.dp above 1
    multi_node: bool = False  # rollout.nodes_per_server above 1
    sleep: bool = False  # devices that are a trainer's, too
    updates_in_flight: bool = False  # trainer.mode=fully_async
    adapters: bool = False  # rollout.lora=adapter, and models.NAME.adapter
    max_adapter_rank: int | None = None  # None: any
    routed_experts: bool = False  # actor.moe.router_replay=rollout
    images: bool = False  # data.images_column
    quantization: bool = False  # rollout.quantization
    sglang: bool = False  # rollout.sglang
    engine: bool = False  # rollout.engine
    drafts: bool = False  # rollout.speculative


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of speculative decoding (rollout.speculative)."""

    num_drafts: int = 0  # steps of a response that had drafted tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
        )


class GenerationServer(ABC):
    """A server of one model, in the process of a Ray actor. All calls come from one event loop.

    A call raises StateError in a state that does not allow it (inference/lifecycle.py).
    `_lifecycle` and `_request_gate` do so: a call runs inside `run_request`, `run_alone` or
    `run_beside_requests` of the gate.

    Attributes:
        engine_name: Name in errors: "... has died".
        display_name: Name in plans: "2 ... servers". "" is that of the class in the setting.
        package: A package that only some extras install, and that the server imports; "" for none.
    """

    features: ClassVar[ServerFeatures] = ServerFeatures()
    engine_name: ClassVar[str] = "the server"
    display_name: ClassVar[str] = ""
    package: ClassVar[str] = ""

    def __init__(self, spec: ServerSpec) -> None:
        """Check the arguments; start nothing. Raises ConfigError."""
        self.spec = spec
        self._version = 0
        self._lifecycle = Lifecycle()
        self._request_gate = RequestGate(self._lifecycle)

    @classmethod
    def create(cls, spec: ServerSpec) -> GenerationServer:
        """Build a server, or a further node of it."""
        return cls(spec)

    @classmethod  # noqa: B027
    def check_settings(cls, settings: RolloutConfig, key: str) -> None:
        """Check settings of this backend before anything starts.

        Args:
            key: Name of the settings in errors: "rollout", or "models.NAME".

        Raises:
            ConfigError: one is not allowed.
        """

    @classmethod  # noqa: B027
    def check_device(cls, settings: RolloutConfig, key: str, device: str) -> None:
        """Check that servers can run on "cpu" or "cuda", before anything starts.

        Raises:
            ConfigError: they cannot.
        """

    @classmethod  # noqa: B027
    def check_model(
        cls,
        settings: RolloutConfig,
        key: str,
        hf_config: HFConfig,
        device: str,
        *,
        records_experts: bool = False,
    ) -> None:
        """Check that servers can have a model, by its config.json, before anything starts.

        Args:
            device: Where they run, "cpu" or "cuda".
            records_experts: See ServerSpec.

        Raises:
            ConfigError: they cannot.
        """

    @classmethod
    def get_kv_cache_bytes(cls, settings: RolloutConfig) -> int | None:
        """Return the size of the KV cache of each worker; 0 if it is none of the settings.

        Args:
            settings: With kv_cache_bytes, also where it is the default.
        """
        return 0

    def compute_kv_cache_bytes(self) -> int:
        """Return settings.kv_cache_bytes, or its default: what the sequences need.

        On a GPU the default is for a server to bound by the memory that is free there.
        """
        spec, device = self.spec, detect_device().type
        if spec.settings.kv_cache_bytes is not None:
            return spec.settings.kv_cache_bytes
        need = count_need(
            read_config(spec.model_path),
            spec.settings,
            spec.dtype,
            spec.max_model_tokens,
            spec.num_sequences,
            device,
        )
        return need.choose_bytes(CPU_BYTES if device == "cpu" else None)

    @property
    def is_headless(self) -> bool:
        """True on a further node of a server, which gets `prepare`, `start` and `close` only."""
        return False

    @property
    def is_dead(self) -> bool:
        """True once the server's processes have died without `close`."""
        return False

    @property
    def death_reason(self) -> str:
        """The reason why this process has killed the server's processes; else ""."""
        return ""

    @property
    def awaits_update(self) -> bool:
        """True while new requests wait for an update, because the last one in flight failed."""
        return self._request_gate.awaits_update

    @property
    def weight_version(self) -> int:
        """Version of the weights it generates with; the checkpoint it started from is 0."""
        return self._version

    @property
    def description(self) -> str:
        """A line for the log once it has started; "" for none."""
        return ""

    def prepare(self) -> None:  # noqa: B027
        """Import packages that `start` needs. Optional."""

    @abstractmethod
    async def start(self, *, reads_weights: bool = True) -> None:
        """Load the checkpoint and spec.adapters, and begin to serve.

        A further node joins the first one.

        Args:
            reads_weights: Read the checkpoint's weights. Otherwise the server refuses requests
                until an update.
        """

    @abstractmethod
    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        """Generate completions: see `Generator.submit`.

        A response ends with a token of `read_stop_ids(spec.model_path)` or the tokenizer's
        end-of-sequence token, which is its last; with the token that completes a text of
        `sampling.stop`; or at `sampling.max_tokens`. Completion i of a seeded request is that of
        the seed sampling.seed + i; it is the same whenever that is asked for, up to rounding.
        A token that stands for an image or a video ends a response as if it were cut off, with the
        finish reason "length": no image follows it. A request of an adapter of spec.adapters is
        answered with it alone, whatever the version of the policy.

        Raises:
            ConfigError: prompt and response exceed spec.max_model_tokens (`_check_length`), or
                sampling.adapter is none of spec.adapters.
        """

    async def stream(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> AsyncIterator[NewTokens]:
        """Yield new tokens: see `Generator.stream`. By default each completion at once."""
        completions = await self.submit(prompt_ids, sampling, request_id=request_id)
        for index, c in enumerate(completions):
            yield NewTokens(index, c.token_ids, c.log_probs, c.finish_reason)

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request: see `Generator.abort`. No error if there is none of this name."""

    def start_together(self) -> AbstractAsyncContextManager[None]:
        """Hold requests: see `Generator.start_together`. By default they start at once."""
        return self._request_gate.start_together()

    def _check_length(self, num_prompt: int, num_new: int, setting: str = "") -> None:
        """Raise ConfigError if a prompt and its response exceed the server's maximum length."""
        if num_prompt + num_new > self.spec.max_model_tokens:
            raise ConfigError(
                f"a prompt of {num_prompt} tokens and {setting}{num_new} exceed the server's "
                f"{self.spec.max_model_tokens} tokens"
            )

    async def list_parameters(self) -> WorkerLists:
        """Return what the parameters of each worker are made of; [] if the rules of the model's
        family say so.

        Raises:
            ConfigError: the engine's loader computes a parameter.
        """
        return []

    async def connect_weights(
        self, endpoint: RendezvousEndpoint, spec: TransferSpec, first_rank: int
    ) -> None:
        """Join the ranks of `spec`: this server's workers are generation ranks from `first_rank`.

        May be called again, when training ranks or servers have joined or left.

        Raises:
            RuntimeError: with the reason of every worker that failed.
        """
        raise StateError(f"{self.engine_name} takes no weights over a transport")

    async def update(
        self, version: int, *, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        """Receive a version of the weights over the connection made by `connect_weights`.

        After a failure running requests stay paused until a complete update in flight, or an
        `abort`. If it was in flight, new requests wait for that update, too; else they are refused.

        Args:
            in_flight: Pause running requests and continue them with the new weights; new ones
                wait. Without it running requests are an error.
            recompute_cache: Compute keys and values of running requests again with the new
                weights. Otherwise they keep those of the older weights, unless the backend always
                computes them again.

        Raises:
            RuntimeError: a worker did not receive everything; with every worker's reason.
            PeerError: the same, and all workers that failed blame the trainer.
        """
        raise StateError(f"{self.engine_name} takes no weights over a transport")

    @abstractmethod
    async def load_checkpoint(
        self, path: str, version: int, *, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        """Load a version from a Hugging Face folder, otherwise as `update`.

        Raises:
            ConfigError: tensors are missing, or have another shape.
            StateError: it started without weights, and takes them from a trainer only.
        """

    async def load_adapters(self, content: bytes, alpha: float, version: int) -> None:
        """Add the adapters of a version to the model that it has loaded, and serve with them.

        Args:
            content: A safetensors file with PEFT's names (checkpoint/peft.pack_adapters).
            alpha: Adapters are scaled by alpha / rank.

        Raises:
            RuntimeError: a worker did not take them; with every worker's reason.
        """
        raise StateError(f"{self.engine_name} takes no adapters")

    async def sleep(self, *, keep: bool = False) -> None:
        """Free weights and KV cache. Values are discarded: the server needs an update to serve.

        Args:
            keep: Pause running requests until the server serves again, then compute their keys and
                values anew and continue; new ones wait until then. Without it running requests
                are an error.
        """
        raise StateError("the server cannot sleep: its backend has no such feature")

    async def wake(self, tag: SleepTag) -> None:
        """Allocate the weights, which then need an update, or after that the KV cache."""
        raise StateError("the server cannot wake: its backend has no such feature")

    async def memory(self) -> ServerMemory:
        """Return the memory of weights and KV cache; 0 if the backend does not measure it."""
        return ServerMemory(0, 0)

    async def take_draft_counts(self) -> DraftCounts:
        """Return the counts of drafts since the last call; 0 without drafts."""
        return DraftCounts()

    def synchronize_call(self) -> None:  # noqa: B027
        """Wait on further nodes of a server until its first node has finished a call.

        Called on all nodes, after each call that is for all of them.

        Raises:
            PeerError: the first node has died.
        """

    async def close(self) -> None:
        """End the server and its processes; safe to call twice."""
        self._request_gate.close()
