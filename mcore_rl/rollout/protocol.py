"""What an agent loop may ask of a generator, and what it gets back: tokens in, tokens out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
    finish_reason: str  # "stop" (end of sequence) or "length"
    weight_versions: list[int]  # version of the weights that chose the token


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a model says of tokens, each given all before it; the lists have one entry a token."""

    token_ids: list[int]
    log_probs: list[float]  # nats, at temperature 1
    top_ids: list[int]  # the most likely token there


class Generator(Protocol):
    async def generate(self, prompt_ids: list[int], sampling: SamplingParams) -> list[Completion]:
        """`sampling.n` completions of one prompt."""
