"""The interface of a generation server: tokens in, tokens and their log-probs out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.weight_sync.spec import TransferSpec

SleepTag = Literal["weights", "kv_cache"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    n: int = 1  # completions a prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    max_tokens: int = 1024
    seed: int | None = None  # of this request; None draws from the server's own generator


@dataclass(frozen=True, slots=True)
class Completion:
    """One response; the lists have one entry a token, the end-of-sequence token included."""

    token_ids: list[int]
    log_probs: list[float]  # nats, under the distribution sampled from (temperature, top_p applied)
    finish_reason: str  # "stop" (end of sequence), "length" or "abort"
    weight_versions: list[int]  # version of the weights that chose the token


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Some more of one response, as they come."""

    index: int  # of the response among the request's n
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str | None  # of the response's last tokens


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a model says of tokens, each given all before it; the lists have one entry a token."""

    token_ids: list[int]
    log_probs: list[float]  # nats, at temperature 1
    top_ids: list[int]  # the most likely token there


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes that the workers of a server keep, all together; 0 of what is asleep."""

    weights_bytes: int
    kv_cache_bytes: int


class Generator(Protocol):
    """The part of a server that an agent loop needs."""

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        """`sampling.n` completions of one prompt, when they are whole.

        `request_id` is for `abort`; of requests that run at a time each has another.
        """

    def stream(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> AsyncIterator[NewTokens]:
        """The same tokens as they come."""

    async def abort(self, request_id: str) -> None:
        """End a request: what it has so far comes back with the finish reason "abort"."""


class GenerationServer(Generator, Protocol):
    """A server of one model. `rollout/lifecycle.py` says which call is allowed when.

    Each raises StateError where it is not.
    """

    @property
    def weight_version(self) -> int:
        """Version of the weights it generates with; the checkpoint it started from is 0."""

    def prepare(self) -> None:
        """Import what `start` needs. It may be left out."""

    async def start(self) -> None:
        """Load the checkpoint; returns when it serves."""

    async def connect_weights(
        self, endpoint: RendezvousEndpoint, spec: TransferSpec, first_rank: int
    ) -> None:
        """Join all ranks of `spec`: this server's workers are generation ranks from `first_rank`.

        Raises RuntimeError with the reason of every worker that could not.
        """

    async def update(self, version: int) -> None:
        """Receive a version of the weights over the connection that `connect_weights` made.

        Raises RuntimeError with every worker's reason when one of them did not get a complete set:
        a PeerError when all of them blame the trainer.
        """

    async def load_checkpoint(self, path: str, version: int) -> None:
        """Take a version from a Hugging Face folder. Raises ConfigError when it lacks tensors."""

    async def sleep(self) -> None:
        """Free weights and KV cache. The weights are given up: the next have to be sent."""

    async def wake(self, tag: SleepTag) -> None:
        """Memory for the weights, which are then to be updated, or for the KV cache after that."""

    async def memory(self) -> ServerMemory: ...

    async def close(self) -> None:
        """End the server and its processes; safe to call twice."""
