"""Responses as an agent loop hands them to a judge."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mcore_rl.config.schema import RewardConfig
from mcore_rl.data.sample import Sample
from mcore_rl.rewards.manager import RewardManager


def response(answer: object = "7", num_tokens: int = 3, finish_reason: str = "stop") -> Sample:
    ones = [1] * num_tokens
    return Sample(
        prompt_ids=[5],
        response_ids=ones,
        response_mask=ones,
        rollout_log_probs=[0.0] * num_tokens,
        weight_versions=ones,
        finish_reason=finish_reason,
        group_id=0,
        fields={"answer": answer},
    )


async def judged_by(
    judge: RewardManager, texts: Sequence[str], samples: Sequence[Sample] = (), max_tokens: int = 16
) -> list[Sample]:
    samples = list(samples) or [response() for _ in texts]
    await judge(samples, texts, max_tokens, "row 3 of the data")
    return samples


def judged(
    config: RewardConfig,
    texts: Sequence[str],
    samples: Sequence[Sample] = (),
    max_tokens: int = 16,
) -> list[Sample]:
    """By a judge of their own."""

    async def run() -> list[Sample]:
        judge = RewardManager(config, max_tokens)
        try:
            return await judged_by(judge, texts, samples, max_tokens)
        finally:
            await judge.close()

    return asyncio.run(run())
