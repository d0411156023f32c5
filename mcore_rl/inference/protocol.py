"""The interface of a generation server: token ids in, token ids and their log-probs out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mcore_rl.data.sample import RoutedExperts
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.weight_sync.spec import TransferSpec

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


@dataclass(frozen=True, slots=True)
class Completion:
    """One response. Lists have one entry per token, including the end-of-sequence token."""

    token_ids: list[int]
    log_probs: list[float]  # nats, with temperature, top_p and top_k applied
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


class Gate:
    """A barrier for requests: open unless it is held, for one reason or several.

    All calls are made in one event loop.
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._opened = asyncio.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def is_held(self, reason: str) -> bool:
        return reason in self._reasons

    def hold(self, reason: str) -> None:
        """Close the gate until this reason, and all others, are released."""
        self._reasons.add(reason)
        self._opened.clear()

    def release(self, reason: str) -> None:
        """Drop a reason; open the gate if none is left."""
        self._reasons.discard(reason)
        if not self._reasons:
            self._opened.set()

    @contextmanager
    def hold_during(self, reason: str) -> Iterator[None]:
        """Hold the gate for the length of a with block."""
        self.hold(reason)
        try:
            yield
        finally:
            self.release(reason)

    async def wait_open(self) -> None:
        """Wait until the gate is open, without a time limit."""
        while not self.is_open:  # it may have been closed between the event and this task
            await self._opened.wait()


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


class GenerationServer(Generator, Protocol):
    """A server of one model.

    Each call raises StateError in a state that does not allow it (inference/vllm/lifecycle.py).
    """

    @property
    def is_dead(self) -> bool:
        """True once the server's processes have died without `close`."""

    @property
    def death_reason(self) -> str:
        """The reason why this process has killed the server's processes; else ""."""

    @property
    def awaits_update(self) -> bool:
        """True while new requests wait for an update, because the last one in flight failed."""

    @property
    def weight_version(self) -> int:
        """Version of the weights it generates with; the checkpoint it started from is 0."""

    def prepare(self) -> None:
        """Import packages that `start` needs. Optional."""

    async def start(self, *, reads_weights: bool = True) -> None:
        """Load the checkpoint and begin to serve.

        Args:
            reads_weights: Read the checkpoint's weights. Otherwise the server refuses requests
                until an update.
        """

    async def connect_weights(
        self, endpoint: RendezvousEndpoint, spec: TransferSpec, first_rank: int
    ) -> None:
        """Join the ranks of `spec`: this server's workers are generation ranks from `first_rank`.

        Raises:
            RuntimeError: with the reason of every worker that failed.
        """

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
                weights. Otherwise they keep those of the older weights.

        Raises:
            RuntimeError: a worker did not receive everything; with every worker's reason.
            PeerError: the same, and all workers that failed blame the trainer.
        """

    async def load_checkpoint(
        self, path: str, version: int, *, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        """Load a version from a Hugging Face folder, otherwise as `update`.

        Raises:
            ConfigError: tensors are missing, or have another shape.
        """

    async def sleep(self, *, keep: bool = False) -> None:
        """Free weights and KV cache. Values are discarded: the server needs an update to serve.

        Args:
            keep: Pause running requests until the server serves again, then compute their keys and
                values anew and continue; new ones wait until then. Without it running requests
                are an error.
        """

    async def wake(self, tag: SleepTag) -> None:
        """Allocate the weights, which then need an update, or after that the KV cache."""

    async def memory(self) -> ServerMemory:
        """Return the memory of weights and KV cache."""

    async def close(self) -> None:
        """End the server and its processes; safe to call twice."""
