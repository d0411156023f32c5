"""Generation as a trainer sees it: a batch of prompts in, a batch of samples out."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch
from mcore_rl.rollout.protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class RolloutPool:
    """All servers of a run."""

    servers: WorkerGroup
    config: RolloutConfig
    seed: int

    def generate(self, prompts: Batch, n: int) -> Batch:
        """`n` samples a prompt; the prompts of one call are spread over the servers.

        A response depends on the seed, its group id and the weights, not on the server.
        """
        sampling = SamplingParams(
            n=n,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            max_tokens=self.config.max_response_tokens,
            seed=self.seed << 24,  # agent loops add the group id
        )
        return Batch.concat([samples for (samples,) in self.servers.generate(prompts, sampling)])
