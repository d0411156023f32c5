"""The loop of a reinforcement-learning job, by trainer.mode, and the state that it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

from mcore_rl.algorithms.controllers import Coefficients
from mcore_rl.algorithms.sample_choice import CURRICULA
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.curriculum import CurriculumSampler
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.observability.metrics import Report
from mcore_rl.rollout.manager import RolloutPool
from mcore_rl.trainers.async_rollout import AsyncRollout
from mcore_rl.trainers.checkpointing import Checkpointer, Stateful
from mcore_rl.trainers.device_sharing import Turns
from mcore_rl.trainers.evaluation import Evaluation
from mcore_rl.trainers.fully_async import FullyAsyncTrainer
from mcore_rl.trainers.learner import Learner
from mcore_rl.trainers.one_step_off import OneStepOffTrainer
from mcore_rl.trainers.prefetch import SamplesAhead
from mcore_rl.trainers.replay_buffer import ReplayBuffer
from mcore_rl.trainers.sample_log import SampleTables
from mcore_rl.trainers.step_warnings import StepWarnings
from mcore_rl.trainers.sync import SyncTrainer


@dataclass(frozen=True, slots=True)
class Loop:
    """What a loop has besides models, servers and outputs."""

    config: RLConfig
    turns: Turns
    rollout: RolloutPool
    prompts: PromptBatches
    coefficients: Coefficients
    replay: ReplayBuffer
    ahead: SamplesAhead | AsyncRollout | None  # None: samples are generated when they are needed
    warnings: StepWarnings = field(default_factory=StepWarnings)

    @staticmethod
    def of(config: RLConfig, turns: Turns, train: PromptDataset, thread: Executor) -> Loop:
        """`thread` generates while another one trains; it has to outlive the servers.

        The actor has the weights that servers have, as both begin with the same checkpoint.
        """
        turns.servers.resend = turns.serve_again
        replays = config.actor.moe.router_replay == "rollout"
        rollout = RolloutPool(turns.servers, config.rollout, config.seed, replays)
        prompts = _prompts(config, train)
        ahead: SamplesAhead | AsyncRollout | None = None
        kept = config.algorithm.filter.replay
        replay = ReplayBuffer(kept, config.seed, config.timeouts.call_s)
        if config.trainer.mode == "one_step_off":
            ahead = SamplesAhead(config, rollout, prompts, replay, thread)
        if config.trainer.mode == "fully_async":
            ahead = AsyncRollout(config, rollout, prompts, replay)
        coefficients = Coefficients(config.algorithm)
        return Loop(config, turns, rollout, prompts, coefficients, replay, ahead)

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """Of a training checkpoint, in the order in which their states are taken.

        First what is ahead: samples that it has lost it generates again, which draws prompts and
        changes the buffer.
        """
        found: dict[str, Stateful] = {} if self.ahead is None else {"ahead": self.ahead}
        found |= {"prompts": self.prompts, "coefficients": self.coefficients}
        return found | {"replay": self.replay}

    def train(
        self,
        checkpointer: Checkpointer,
        evaluation: Evaluation,
        tables: SampleTables,
        report: Report,
    ) -> None:
        """Raises what the trainer raises."""
        config, turns = self.config, self.turns
        learner = Learner(config, turns, self.coefficients, tables, self.warnings)
        own = learner, checkpointer, evaluation
        if isinstance(self.ahead, AsyncRollout):
            FullyAsyncTrainer(config, turns, self.ahead, *own).train(report)
        elif self.ahead is not None:
            OneStepOffTrainer(config, turns, self.ahead, *own).train(report)
        else:
            source = self.rollout, self.prompts, self.replay
            SyncTrainer(config, turns, *source, *own).train(report)


def _prompts(config: RLConfig, train: PromptDataset) -> PromptBatches:
    data, num, curriculum = config.data, config.trainer.prompts_per_step, None
    if asked := data.curriculum.name:
        weight = CURRICULA.bound(asked, data.curriculum.settings)
        curriculum = CurriculumSampler(len(train), num, config.seed, data.curriculum, weight)
    return PromptBatches(train, num, config.seed, data.train_weights, curriculum)
