"""The interface of a generation server: tokens in, tokens and their log-probs out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mcore_rl.data.sample import RoutedExperts
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.weight_sync.spec import TransferSpec

SleepTag = Literal["weights", "kv_cache"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    n: int = 1  # completions a prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    stop: tuple[str, ...] = ()  # texts that end a response
    max_tokens: int = 1024
    seed: int | None = None  # of this request; None draws from the server's own generator
    cache: str = ""  # requests with another name share no prefix cache with it
    # The first token of the prompt whose experts come back, with those of all after it; None: none.
    experts_from: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One response; the lists have one entry per token, including the end-of-sequence token."""

    token_ids: list[int]
    log_probs: list[float]  # nats, under the distribution sampled from (temperature, top_p applied)
    finish_reason: str  # "stop" (end of sequence, or a stop string), "length" or "abort"
    weight_versions: list[int]  # version of the weights that chose the token
    stop_string: str = ""  # the one that the last token completes, if any
    # Of all tokens from `experts_from` on but the last, which the model never ran; None: not asked
    # for, or no token was sampled.
    routed_experts: RoutedExperts | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The next tokens of one response, when they are ready."""

    index: int  # of the response among the request's n
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str | None  # of the response's last tokens


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of tokens, each given all before it; the lists have one entry per token."""

    token_ids: list[int]
    log_probs: list[float]  # nats, at temperature 1
    top_ids: list[int]  # the most likely token there


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes of all workers of a server; 0 for what is asleep."""

    weights_bytes: int
    kv_cache_bytes: int


class Generator(Protocol):
    """The part of a server that an agent loop needs."""

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        """`sampling.n` completions of one prompt, when they are complete.

        `request_id` is for `abort`, and unique among running requests.
        """

    def stream(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> AsyncIterator[NewTokens]:
        """The same, token by token."""

    async def abort(self, request_id: str) -> None:
        """End a request: its tokens so far are returned with the finish reason "abort"."""

    def held(self) -> AbstractAsyncContextManager[None]:
        """Requests that are made inside start together when it ends.

        Else those that come first run in a batch of their own, which one depends on the moment, and
        sums of floats in another batch differ in their last digits.
        """


class GenerationServer(Generator, Protocol):
    """A server of one model. `rollout/lifecycle.py` says which call is allowed when.

    Each raises StateError where it is not.
    """

    @property
    def is_dead(self) -> bool:
        """Whether its processes have died without having been closed; it stays so."""

    @property
    def death_reason(self) -> str:
        """Why its processes were ended, where it was not they that died; else ""."""

    @property
    def awaits_update(self) -> bool:
        """Whether requests wait, since an update in flight has failed, until one succeeds."""

    @property
    def weight_version(self) -> int:
        """Version of the weights it generates with; the checkpoint it started from is 0."""

    def prepare(self) -> None:
        """Import what `start` needs. Optional."""

    async def start(self, *, reads_weights: bool = True) -> None:
        """Load the checkpoint; returns when it serves."""

    async def connect_weights(
        self, endpoint: RendezvousEndpoint, spec: TransferSpec, first_rank: int
    ) -> None:
        """Join all ranks of `spec`; this server's workers are generation ranks from `first_rank`.

        Raises RuntimeError with the reason of every worker that failed.
        """

    async def update(
        self, version: int, *, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        """Receive a version of the weights over the connection that `connect_weights` made.

        `in_flight`: running requests stand still meanwhile and go on with it, new ones wait.
        They keep the keys and values of older weights that they have cached, or with
        `recompute_cache` compute them anew. Without it running requests are an error.

        Raises RuntimeError with every worker's reason if one of them did not receive everything:
        a PeerError when all of them blame the trainer. Running requests then stand still until a
        complete update in flight, or an `abort`. New ones wait so too after one in flight that
        failed; else they are refused.
        """

    async def load_checkpoint(
        self, path: str, version: int, *, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        """Load a version from a Hugging Face folder, else as `update`.

        Raises ConfigError if tensors are missing.
        """

    async def sleep(self, *, keep: bool = False) -> None:
        """Free weights and KV cache. The weights are discarded: new ones must be sent.

        `keep`: running requests stand still, compute their keys and values anew when it serves
        again and go on; new ones wait until then. Without it running requests are an error.
        """

    async def wake(self, tag: SleepTag) -> None:
        """Allocate the weights, which then need an update, or after that the KV cache."""

    async def memory(self) -> ServerMemory: ...

    async def close(self) -> None:
        """End the server and its processes; safe to call twice."""
