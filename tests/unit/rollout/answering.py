"""A pool of servers that answer when they are asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mcore_rl.data.batch import Batch
from mcore_rl.inference.protocol import SamplingParams


class Answering(ABC):
    """Of ServerPool, what generation calls; `answers` says what comes back."""

    found: Sequence[Batch] = ()

    @abstractmethod
    def answers(self, prompts: Batch, sampling: SamplingParams) -> list[Batch]: ...

    def begin(self, prompts: Batch, sampling: SamplingParams, stream: str = "train") -> None:
        self.found = self.answers(prompts, sampling)

    def idle_s(self) -> list[float]:
        return [0.0]

    def num_outstanding(self, stream: str) -> int:
        return len(self.found)

    def collect(self, stream: str, wait_s: float, at_least: int = 1) -> list[Batch]:
        found, self.found = [*self.found], ()
        return found
