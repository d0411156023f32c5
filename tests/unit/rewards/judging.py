"""Responses as an agent loop passes them to the reward manager."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mcore_rl.config.schema import RewardConfig
from mcore_rl.data.sample import Sample
from mcore_rl.rewards.manager import RewardManager


def response(answer: object = "7", num_tokens: int = 3, finish_reason: str = "stop") -> Sample:
    unit = [1] * num_tokens
    return Sample(
        prompt_ids=[5],
        response_ids=unit,
        response_mask=unit,
        rollout_log_probs=[0.0] * num_tokens,
        weight_versions=unit,
        finish_reason=finish_reason,
        group_id=0,
        fields={"answer": answer},
    )


async def compute_rewards_with(
    judge: RewardManager, texts: Sequence[str], samples: Sequence[Sample] = (), max_tokens: int = 16
) -> list[Sample]:
    samples = list(samples) or [response() for _ in texts]
    await judge(samples, texts, max_tokens, "row 3 of the data")
    return samples


def compute_rewards(
    config: RewardConfig,
    texts: Sequence[str],
    samples: Sequence[Sample] = (),
    max_tokens: int = 16,
) -> list[Sample]:
    """Compute rewards with a new manager."""

    async def run() -> list[Sample]:
        judge = RewardManager(config, max_tokens)
        try:
            return await compute_rewards_with(judge, texts, samples, max_tokens)
        finally:
            await judge.close()

    return asyncio.run(run())
