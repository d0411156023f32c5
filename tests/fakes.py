"""Parts of models that several test files put in the place of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.algorithms.correction import find_gaps_beyond
from mcore_rl.data.batch import Batch
from mcore_rl.trainers.policy_checks import logprob_gaps


class ScoringUpdates:
    """ModelWorker.update_with_scores, made of a model's compute_log_probs and update."""

    def update_with_scores(
        self: Any, batch: Batch, *, temperature: float, bounds: Mapping[str, float]
    ) -> tuple[Batch, dict[str, float], dict[str, float]]:
        assert "log_probs" not in batch
        scored = self.compute_log_probs(batch, temperature=temperature)
        scores = scored.select("log_probs", "entropy")
        gaps = logprob_gaps(scored.with_columns(response_mask=batch["gap_mask"]))
        if find_gaps_beyond(gaps, bounds):
            return scores, gaps, {}
        [[metrics]] = self.update(scored, sizes=[len(batch)], temperature=temperature)
        return scores, gaps, metrics
