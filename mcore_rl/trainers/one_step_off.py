"""Training one step off: the next samples are generated while these are trained on.

    servers   | samples 1 | samples 2  |  push 1 | samples 3   | push 2 |
    trainer   |           | update 1   |         | update 2    |

Step k trains on samples of version k - 2; its policy has version k - 1. The servers need devices of
their own. With trainer.staleness=0 generation waits for the push, as in trainers/sync.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.schema import RLConfig
from mcore_rl.observability.activity import Stopwatch
from mcore_rl.observability.metrics import Report
from mcore_rl.trainers import policy_checks
from mcore_rl.trainers.checkpointing import Checkpointer
from mcore_rl.trainers.device_sharing import Turns
from mcore_rl.trainers.evaluation import Evaluation
from mcore_rl.trainers.learner import Learner
from mcore_rl.trainers.prefetch import SamplesAhead


@dataclass(frozen=True, slots=True)
class OneStepOffTrainer:
    """The models and servers of a run, and the loop over them."""

    config: RLConfig
    turns: Turns  # of roles that share devices, of which the servers are none
    ahead: SamplesAhead
    learner: Learner
    checkpointer: Checkpointer
    evaluation: Evaluation

    def train(self, report: Report) -> None:
        """Run the steps up to trainer.num_steps, from 1 or from where the checkpointer goes on.

        What stops the generation of a step is raised when the step before has been trained.

        Raises:
            RunStopped, PolicyMismatchError, ConfigError: as SyncTrainer; and PolicyMismatchError
                for samples that are more than trainer.staleness versions old.
        """
        self.ahead.start()
        last, staleness = self.config.trainer.num_steps, self.config.trainer.staleness or 0
        for step in range(self.checkpointer.next_step, last + 1):
            clock = Stopwatch(step)
            with clock("generate"):  # what the trainer waits for it
                batch, metrics = self.ahead.take(step, version=step - 1)
            metrics |= policy_checks.checked_age(batch, step - 1, staleness)
            self.turns.keep_actor()
            if staleness and step < last:
                self.ahead.begin(step + 1, version=step - 1)
            metrics |= self.learner.learn(batch, metrics, step, clock)
            if self.checkpointer.is_due(step):
                with clock("save"):
                    self.checkpointer.save(step)
            with clock("generate"):  # a server takes no weights while it answers
                self.ahead.wait()
            with clock("weight_sync"):
                self.turns.serve(version=step)
            metrics["tokens_per_s"] = metrics["generated_tokens"] / clock.total_s
            if self.evaluation.is_due(step):
                with clock("evaluate"):
                    metrics |= self.evaluation.run(step)
            metrics |= clock.seconds | clock.driver
            metrics["time/servers_idle_s"] = self.ahead.idle_s()
            report(step, metrics)
            self.checkpointer.step_ended(step, metrics)
