"""A fake pool of servers that answer at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mcore_rl.data.batch import Batch
from mcore_rl.inference.protocol import SamplingParams


class Answering(ABC):
    """The methods of ServerPool that RolloutPool calls; `answers` returns the samples."""

    batches: Sequence[Batch] = ()
    abandoned: Sequence[str] = ()  # streams

    @abstractmethod
    def answers(self, prompts: Batch, sampling: SamplingParams) -> list[Batch]: ...

    def begin(self, prompts: Batch, sampling: SamplingParams, stream: str = "train") -> None:
        self.batches = self.answers(prompts, sampling)

    def idle_s(self) -> list[float]:
        return [0.0]

    def abandon_all(self, stream: str) -> None:
        self.abandoned = [*self.abandoned, stream]
        self.batches = ()

    def num_outstanding(self, stream: str) -> int:
        return len(self.batches)

    def collect(self, stream: str, wait_s: float, at_least: int = 1) -> list[Batch]:
        batches, self.batches = [*self.batches], ()
        return batches
