"""Held-out examples: when they are scored while a model trains on others, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mcore_rl.config.schema import TrainConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.examples import ExampleFiles
from mcore_rl.observability.activity import ACTIVITY
from mcore_rl.observability.metrics import prefix_eval_metrics
from mcore_rl.trainers.objectives import Metrics, Objective


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The sets of a run and what scores them."""

    config: TrainConfig  # with the number of steps of the whole run
    objective: Objective
    sets: Mapping[str, ExampleFiles]
    record: Callable[[str, dict[str, Metrics]], None]  # takes "before" or "after", for the summary

    def is_due(self, step: int) -> bool:
        """Step 0 is before training; after the last step there is always one, if there are sets."""
        when, last = self.config.evaluation, self.config.trainer.num_steps
        if not self.sets:
            return False
        if step == 0:
            return when.before
        return step == last or (bool(when.every) and step % when.every == 0)

    def run(self, step: int) -> Metrics:
        """Metrics eval/SET/NAME, of the weights after this step."""
        found = {name: self.objective.evaluate(self._batches(name)) for name in self.sets}
        for when, at in (("before", 0), ("after", self.config.trainer.num_steps)):
            if step == at:
                self.record(when, found)
        return prefix_eval_metrics(found)

    def _batches(self, name: str) -> Iterator[Batch]:
        """All rows of a set, or eval_samples, a training batch at a time."""
        examples, size = self.sets[name], self.config.trainer.batch_size
        rows = list(range(self.config.trainer.eval_samples or len(examples)))
        with ACTIVITY.count(len(rows), f"rows of {name}") as came:
            for start in range(0, len(rows), size):
                came(start)
                yield examples.batch(rows[start : start + size])
