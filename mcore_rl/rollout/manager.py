"""Generation for a trainer: a batch of prompts in, a batch of samples out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from mcore_rl.config.schema import EvaluationConfig, RolloutConfig
from mcore_rl.controller.batch_ops import concat_batches, drop_groups, find_lost_groups
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.observability.activity import ACTIVITY
from mcore_rl.rollout.routing import Stream
from mcore_rl.rollout.server_pool import ServerPool

_WAIT_S = 10.0  # for samples, between two reports of progress
TRAIN: Final[Stream] = "train"  # the stream of samples for training
OnSamples = Callable[[Sequence[Samples]], None]


@dataclass(frozen=True, slots=True)
class RolloutPool:
    """Generation on all servers of a run."""

    servers: ServerPool
    config: RolloutConfig
    seed: int
    records_experts: bool = False  # for samples of the stream TRAIN

    def generate(
        self,
        prompts: Batch,
        n: int,
        *,
        is_greedy: bool = False,
        on_samples: OnSamples = lambda batches: None,
    ) -> Samples:
        """Generate `n` samples per prompt, in the order of the prompts.

        A response depends on the run's seed, its group id, its index in the group, `n` and the
        weights, not on the server. Samples lost with a node are generated again.

        Args:
            on_samples: Called with each new list of batches.
        """
        sampling = self._get_training_sampling(n, 0.0 if is_greedy else self.config.temperature)
        return self._generate(prompts, sampling, on_samples=on_samples)

    def begin(self, prompts: Batch, n: int) -> None:
        """Start to generate `n` samples per prompt for `collect`; return at once."""
        sampling = self._get_training_sampling(n, self.config.temperature)
        self.servers.begin(prompts, sampling, stream=TRAIN)

    def collect(self, wait_s: float, at_least: int) -> list[Samples]:
        """Return whole groups that have ended since the last call: see `ServerPool.collect`."""
        return self.servers.collect(TRAIN, wait_s, at_least)

    def poll(self, at_least: int | None) -> list[Samples]:
        """Collect without a wait, while the trainer's weights change: see `ServerPool.poll`."""
        return self.servers.poll(TRAIN, at_least)

    def pop_rerouted(self) -> list[int]:
        """Return, once, the groups that began again on another server."""
        return self.servers.pop_rerouted(TRAIN)

    def abandon(self, group_ids: Sequence[int]) -> None:
        """End these groups: `collect` will not return them."""
        self.servers.abandon(TRAIN, group_ids)

    def abandon_all(self) -> None:
        """End all groups that were begun and not collected."""
        self.servers.abandon_all(TRAIN)

    def idle_s(self) -> float:
        """Return the idle seconds since the last call: the mean over servers that are up, or 0."""
        idle_s = self.servers.idle_s()
        return sum(idle_s) / max(len(idle_s), 1)

    def compute_draft_metrics(self) -> dict[str, float]:
        """Return metrics of speculative decoding since the last call; {} without drafts.

        `drafts/acceptance` is the share of drafted tokens that were accepted, `drafts/step_tokens`
        the mean number of tokens by which a step with drafts extends a response.
        """
        if not self.config.speculative.num_tokens:
            return {}
        counts = self.servers.take_draft_counts()
        if not counts.num_drafts:
            return {}
        return {
            "drafts/acceptance": counts.num_accepted_tokens / counts.num_draft_tokens,
            "drafts/step_tokens": 1 + counts.num_accepted_tokens / counts.num_drafts,
        }

    def evaluate(self, prompts: Batch, config: EvaluationConfig) -> Samples:
        """Generate config.num_samples per prompt, with the evaluation's sampling settings.

        These requests have a prefix cache of their own, so that training's samples are bit for bit
        the same with and without evaluations.
        """
        sampling = self._get_sampling(config.num_samples, self.config.temperature)
        settings = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k")}
        settings["max_tokens"] = config.max_response_tokens
        settings["stop"] = None if config.stop is None else tuple(config.stop)
        changes = {name: value for name, value in settings.items() if value is not None}
        sampling = replace(sampling, cache="evaluation", **changes)
        return self._generate(prompts, sampling, stream="evaluation")

    def _get_training_sampling(self, n: int, temperature: float) -> SamplingParams:
        sampling = self._get_sampling(n, temperature)
        return replace(sampling, experts_from=0) if self.records_experts else sampling

    def _get_sampling(self, n: int, temperature: float) -> SamplingParams:
        return SamplingParams(
            n=n,
            temperature=temperature,
            top_p=self.config.top_p,
            top_k=self.config.top_k,
            stop=tuple(self.config.stop),
            max_tokens=self.config.response_limit,
            seed=draw_first_seed(self.seed),  # agent loops add group id times n plus index
        )

    def _generate(
        self,
        prompts: Batch,
        sampling: SamplingParams,
        stream: Stream = TRAIN,
        on_samples: OnSamples = lambda batches: None,
    ) -> Samples:
        """Generate all samples, and those again that are lost with a node; order them by prompt."""
        batch = self._collect_all(prompts, sampling, stream, on_samples)
        while lost := find_lost_groups([batch]):
            report_lost_groups(lost)
            rows = np.flatnonzero(np.isin(prompts.array("group_ids"), lost)).tolist()
            regenerated = self._collect_all(prompts.take(rows), sampling, stream, on_samples)
            batch = concat_batches([drop_groups(batch, lost), regenerated])
        order = {int(group): row for row, group in enumerate(prompts.array("group_ids"))}
        positions = [order[int(group)] for group in batch.array("group_ids")]
        return batch.take(np.argsort(positions, kind="stable").tolist())

    def _collect_all(
        self, prompts: Batch, sampling: SamplingParams, stream: Stream, on_samples: OnSamples
    ) -> Samples:
        """Begin the groups of these prompts and wait until all have ended."""
        batches: list[Samples] = []
        self.servers.begin(prompts, sampling, stream)
        num_samples, num_groups = len(prompts) * sampling.n, 0
        with ACTIVITY.count(num_samples, "samples") as report_progress:
            while self.servers.num_outstanding(stream):
                arrived = self.servers.collect(stream, _WAIT_S, at_least=None)
                batches += arrived
                num_groups += sum(len(np.unique(batch.array("group_ids"))) for batch in arrived)
                report_progress(num_groups * sampling.n)
                on_samples(arrived)
        return concat_batches(batches)


def report_lost_groups(group_ids: Sequence[int]) -> None:
    """Print that these groups are generated again."""
    print(f"{len(group_ids)} groups of samples died with their node: they are generated again")


def draw_first_seed(run_seed: int) -> int:
    """Draw the seed of sample 0 of group 0; sample i of group g of n adds g * n + i.

    Group ids of training count up from 0 and those of held-out prompts down from -1, so no two
    samples of a run share a seed, except those of evaluations that repeat a prompt. Their lower 32
    bits differ too, up to 2**32 samples: torch's CPU generator reads no more.

    First seeds of different runs are drawn by np.random.SeedSequence. Two runs of N samples share a
    seed with probability 2N / 2**32 on the CPU, else 2N / 2**61. All seeds are in
    [2**62 - 2**32, 2**63), which torch and vLLM accept.
    """
    (drawn,) = np.random.SeedSequence(run_seed).generate_state(1, np.uint64)
    return 2**62 + int(drawn >> np.uint64(3))
