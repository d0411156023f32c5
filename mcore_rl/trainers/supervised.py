"""Training on examples: conversations to imitate, pairs to prefer by."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_rl.data.batch import Batch
from mcore_rl.observability.activity import Stopwatch
from mcore_rl.observability.metrics import Report
from mcore_rl.trainers.checkpointing import CheckpointManager
from mcore_rl.trainers.evaluation import SupervisedEvaluation
from mcore_rl.trainers.objectives import Objective
from mcore_rl.trainers.step_recorder import StepRecorder


def train(
    objective: Objective,
    batches: Iterator[Batch],
    num_steps: int,
    report: Report,
    checkpoints: CheckpointManager | None = None,
    evaluation: SupervisedEvaluation | None = None,
    recorder: StepRecorder | None = None,
) -> None:
    """Take one optimizer step a batch up to `num_steps`, from 1 or from a restored checkpoint.

    Raises:
        RunStopped: A signal has ended the run; the last step is saved.
    """
    first = 1 if checkpoints is None else checkpoints.next_step
    for step in range(first, num_steps + 1):
        clock = Stopwatch(step)
        if recorder is not None:
            recorder.begin(step)
        with clock("data"):
            batch = next(batches)
        metrics = objective.step(batch, clock)
        if checkpoints is not None and checkpoints.is_due(step):
            with clock("save"):
                checkpoints.save(step)
        metrics["tokens_per_s"] = int(batch.num_tokens.sum()) / clock.total_s
        if evaluation is not None and evaluation.is_due(step):
            with clock("evaluate"):
                metrics |= evaluation.run(step)
        metrics |= clock.seconds
        if recorder is not None:
            metrics |= recorder.finish(step)
        report(step, metrics)
        if checkpoints is not None:
            checkpoints.finish_step(step, metrics)
