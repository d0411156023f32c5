"""Supervised training on (prompt, response) pairs."""

from __future__ import annotations

from mcore_rl.algorithms.aggregation import loss_weights
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch
from mcore_rl.data.sampler import IndexSampler
from mcore_rl.observability.metrics import Report


def train(
    model: WorkerGroup,
    examples: Batch,
    *,
    num_steps: int,
    batch_size: int,
    seed: int,
    report: Report,
) -> None:
    """Minimise the mean negative log-likelihood of the response tokens of `load_supervised`.

    At temperature 1: no sampling has a part in it.
    """
    rows = IndexSampler(len(examples), batch_size, seed)
    for step in range(1, num_steps + 1):
        batch = examples.take(next(rows))
        weights = loss_weights(batch.jagged("response_mask"), "token_mean")
        report(step, model.update(batch.with_columns(loss_weights=weights), temperature=1.0)[0])
