"""Generation as a trainer sees it: a batch of prompts in, a batch of samples out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mcore_rl.config.schema import EvaluationConfig, RolloutConfig
from mcore_rl.controller.batch_ops import concat_batches, drop_groups, find_lost_groups
from mcore_rl.data.batch import Batch
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.observability.activity import ACTIVITY
from mcore_rl.rollout.server_pool import ALL, ServerPool

_WAIT_S = 10.0

TRAIN = "train"  # the stream of samples that are trained on
Heard = Callable[[Sequence[Batch]], None]  # takes samples that have come


@dataclass(frozen=True, slots=True)
class RolloutPool:
    """All servers of a run."""

    servers: ServerPool
    config: RolloutConfig
    seed: int
    records_experts: bool = False  # of the tokens of samples that are trained

    def generate(
        self,
        prompts: Batch,
        n: int,
        *,
        is_greedy: bool = False,
        heard: Heard = lambda found: None,
    ) -> Batch:
        """`n` samples per prompt, in the order of the prompts; `heard` takes them as they come.

        A response depends on the run's seed, its group id, its number in the group, `n` and the
        weights, not on the server. Those that die with a node are generated again.
        """
        sampling = self._sampling(n, 0.0 if is_greedy else self.config.temperature)
        if self.records_experts and not is_greedy:
            sampling = replace(sampling, experts_from=0)
        return self._answers(prompts, sampling, heard=heard)

    def begin(self, prompts: Batch, n: int) -> None:
        """The same samples, which come by `collect`; returns at once."""
        sampling = self._sampling(n, self.config.temperature)
        self.servers.begin(prompts, sampling, stream=TRAIN)

    def collect(self, wait_s: float, at_least: int) -> list[Batch]:
        """Whole groups that were begun and have ended since the last call.

        Waits up to `wait_s` until there is one; servers may wait for their share of `at_least` so
        many. Raises what a reward or a loop raised.
        """
        found: list[Batch] = self.servers.collect(TRAIN, wait_s, at_least)
        return found

    def tend(self) -> list[Batch]:
        """As `collect`, at once, while the weights of the trainer change."""
        found: list[Batch] = self.servers.tend(TRAIN)
        return found

    def rerouted(self) -> list[int]:
        """Groups that were begun again since the last call, as the server that had them died."""
        return self.servers.rerouted(TRAIN)

    def abandon(self, group_ids: Sequence[int]) -> None:
        """These groups never come."""
        self.servers.abandon(TRAIN, group_ids)

    def idle_s(self) -> float:
        """Seconds since the last call in which a server had nothing to do, on average over servers.

        Of those that are up; 0 if none is.
        """
        found = self.servers.idle_s()
        return sum(found) / max(len(found), 1)

    def evaluate(self, prompts: Batch, config: EvaluationConfig) -> Batch:
        """config.num_samples a prompt, as `generate`, with the settings of sampling of evaluation.

        Servers keep what these requests have cached apart: those of training come out bit for bit
        as if there had been none.
        """
        sampling = self._sampling(config.num_samples, self.config.temperature)
        own = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k")}
        own["max_tokens"] = config.max_response_tokens
        own["stop"] = None if config.stop is None else tuple(config.stop)
        given = {name: value for name, value in own.items() if value is not None}
        return self._answers(
            prompts, replace(sampling, cache="evaluation", **given), stream="evaluation"
        )

    def _sampling(self, n: int, temperature: float) -> SamplingParams:
        return SamplingParams(
            n=n,
            temperature=temperature,
            top_p=self.config.top_p,
            top_k=self.config.top_k,
            stop=tuple(self.config.stop),
            max_tokens=self.config.max_response_tokens,
            seed=first_seed(self.seed),  # agent loops count from here by the group id
        )

    def _answers(
        self,
        prompts: Batch,
        sampling: SamplingParams,
        stream: str = TRAIN,
        heard: Heard = lambda found: None,
    ) -> Batch:
        batch = self._collected(prompts, sampling, stream, heard)
        while lost := find_lost_groups([batch]):
            tell_lost(lost)
            again = prompts.take(np.flatnonzero(np.isin(prompts.array("group_ids"), lost)).tolist())
            found = self._collected(again, sampling, stream, heard)
            batch = concat_batches([drop_groups(batch, lost), found])
        place = {int(group): row for row, group in enumerate(prompts.array("group_ids"))}
        places = [place[int(group)] for group in batch.array("group_ids")]
        return batch.take(np.argsort(places, kind="stable").tolist())

    def _collected(
        self, prompts: Batch, sampling: SamplingParams, stream: str, heard: Heard
    ) -> Batch:
        found: list[Batch] = []
        self.servers.begin(prompts, sampling, stream)
        with ACTIVITY.count(len(prompts) * sampling.n, "samples") as came:
            while self.servers.num_outstanding(stream):
                found += (new := self.servers.collect(stream, _WAIT_S, ALL))
                num_groups = sum(len(np.unique(batch.array("group_ids"))) for batch in found)
                came(num_groups * sampling.n)
                heard(new)
        return concat_batches(found)


def tell_lost(group_ids: Sequence[int]) -> None:
    print(f"{len(group_ids)} groups of samples died with their node: they are generated again")


def first_seed(run_seed: int) -> int:
    """The seed of sample 0 of group 0; sample i of group g of n has this plus g * n + i.

    Training's groups count up from 0 and those of held-out prompts down from -1, hence no two
    samples of a run share a seed, but those of evaluations that ask the same prompt again. Their
    lower 32 bits differ too, up to 2**32 samples: torch's CPU generator reads no more.

    Runs with other seeds start at a place drawn by np.random.SeedSequence. They share
    seeds by chance only: two runs of N samples with probability 2N / 2**32 on the CPU, else
    2N / 2**61. All seeds are in [2**62 - 2**32, 2**63), which torch and vLLM take.
    """
    (drawn,) = np.random.SeedSequence(run_seed).generate_state(1, np.uint64)
    return 2**62 + int(drawn >> np.uint64(3))
