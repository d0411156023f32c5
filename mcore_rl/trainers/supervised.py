"""Training on examples that are there: conversations to imitate, pairs to prefer by."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_rl.data.batch import Batch
from mcore_rl.observability.activity import Stopwatch
from mcore_rl.observability.metrics import Report
from mcore_rl.trainers.checkpointing import Checkpointer
from mcore_rl.trainers.held_out import HeldOut
from mcore_rl.trainers.objectives import Objective


def train(
    objective: Objective,
    batches: Iterator[Batch],
    num_steps: int,
    report: Report,
    checkpointer: Checkpointer | None = None,
    held_out: HeldOut | None = None,
) -> None:
    """One optimizer step a batch up to `num_steps`, from 1 or from where the checkpointer goes on.

    Raises:
        RunStopped: a signal has asked for it; the last step is saved.
    """
    first = 1 if checkpointer is None else checkpointer.next_step
    for step in range(first, num_steps + 1):
        clock = Stopwatch(step)
        with clock("data"):
            batch = next(batches)
        metrics = objective.step(batch, clock)
        if checkpointer is not None and checkpointer.is_due(step):
            with clock("save"):
                checkpointer.save(step)
        metrics["tokens_per_s"] = int(batch.num_tokens.sum()) / clock.total_s
        if held_out is not None and held_out.is_due(step):
            with clock("evaluate"):
                metrics |= held_out.run(step)
        metrics |= clock.seconds
        report(step, metrics)
        if checkpointer is not None:
            checkpointer.step_ended(step, metrics)
