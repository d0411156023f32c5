"""The base of reinforcement-learning loops: the parts of a run, and the two ends of a step.

A loop is a subclass with a `train` of its own:

    class MyTrainer(RLTrainer):
        def train(self) -> None:
            for step in self.steps():
                with self.timer("generate"):
                    batch, metrics = self.sampler.collect(step)
                ...  # advantages, updates of self.actor
                self.save_if_due(step)
                with self.timer("weight_sync"):
                    self.devices.update_weights(version=step)
                metrics |= self.evaluate_if_due(step)
                self.finish_step(step, metrics)

`mcore_rl.testing.check_trainer` puts a loop through this contract.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import ray

from mcore_rl.algorithms.controllers import Coefficients
from mcore_rl.algorithms.sample_choice import CURRICULA
from mcore_rl.config.import_path import is_import_path, load_user_class
from mcore_rl.config.rules_algorithm import build_teachers
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.data.routed_experts import ExpertLayers
from mcore_rl.data.sampler import CurriculumSampler
from mcore_rl.engine.base import LossFunction
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.observability.activity import Stopwatch
from mcore_rl.observability.metrics import Report
from mcore_rl.observability.process import exempt_objects_from_gc
from mcore_rl.observability.warnings import StepWarnings
from mcore_rl.rollout.manager import RolloutPool
from mcore_rl.trainers.checkpointing import CheckpointManager, Stateful
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.evaluation import Evaluation, MetricsBySet
from mcore_rl.trainers.policy_loss import PolicyLoss
from mcore_rl.trainers.replay_buffer import ReplayBuffer
from mcore_rl.trainers.roles import (
    Actor,
    Critic,
    ReferenceModel,
    RewardModel,
    ScoringModel,
    Teachers,
)
from mcore_rl.trainers.sample_log import SampleLog
from mcore_rl.trainers.step_recorder import StepRecorder
from mcore_rl.trainers.step_samples import REJECTED, StepSampler, count_groups

# The loops of this package, by trainer.mode. Imported on use: they are subclasses of RLTrainer.
TRAINERS: Mapping[str, str] = {
    "sync": "sync:SyncTrainer",
    "one_step_off": "one_step_off:OneStepOffTrainer",
    "fully_async": "fully_async:FullyAsyncTrainer",
}


@dataclass(frozen=True, slots=True)
class TrainerInputs:
    """The parts that a job builds for its trainer."""

    config: RLConfig
    devices: DeviceSharing  # with the models and servers of the run
    prompts: PromptDataset
    test_sets: Mapping[str, Batch]  # held-out prompts, by name
    sample_log: SampleLog
    thread: Executor  # generates beside a trainer; it has to outlive the servers
    record_evaluation: Callable[[str, MetricsBySet], None]
    # From the parts with a state of their own, by name, in the order in which they are saved.
    build_checkpoints: Callable[[Mapping[str, Stateful]], CheckpointManager]
    experts: ExpertLayers | None = None  # layers whose routing the actor replays
    recorder: StepRecorder | None = None  # of profiles and loads; None: they are not recorded


class RLTrainer(ABC):
    """The models and servers of a run, and the loop over them.

    Attributes:
        mode: The loop of this package whose rules between settings hold for this one.
    """

    mode: ClassVar[str] = "sync"

    def __init__(self, inputs: TrainerInputs) -> None:
        """Build the parts of a loop. The actor has the weights that the servers have."""
        config, devices = inputs.config, inputs.devices
        self.config, self.devices, self.inputs = config, devices, inputs
        self.rollout = RolloutPool(
            devices.servers, config.rollout, config.seed, inputs.experts is not None
        )
        self.prompts = build_prompt_batches(config, inputs.prompts)
        replay = config.algorithm.filter.replay
        self.replay = ReplayBuffer(replay, config.seed, config.timeouts.call_s)
        self.sampler = StepSampler(config, self.rollout, self.prompts, self.replay)
        self.coefficients, self.warnings = Coefficients(config.algorithm), StepWarnings()
        self.actor = Actor(devices.actor, devices, config, self.coefficients, self.warnings)
        self.critic = None if devices.critic is None else Critic(devices.critic, devices, config)
        self.frozen_models = build_frozen_models(config, devices)
        self.sample_log = inputs.sample_log
        self.evaluation = Evaluation(
            config, self.rollout, inputs.test_sets, self.sample_log, inputs.record_evaluation
        )
        self.prepare()
        self.checkpoints = inputs.build_checkpoints(self.list_states())
        self.clock, self._is_finished = Stopwatch(), False
        self._report: Report = lambda step, metrics: None
        devices.servers.resend = devices.resend_weights

    @classmethod
    def build_loss(cls, config: RLConfig) -> LossFunction:
        """Return the loss of the actor's updates; the workers get it pickled."""
        return PolicyLoss(config.algorithm)

    def prepare(self) -> None:  # noqa: B027 - a loop may need none
        """Build the parts that this loop has and others do not."""

    def list_states(self) -> dict[str, Stateful]:
        """Return the parts that a checkpoint has states of, in the order of saving."""
        return {
            "prompts": self.prompts,
            "coefficients": self.coefficients,
            "replay": self.replay,
        }

    def run(self, report: Report) -> None:
        """Run the steps up to trainer.num_steps, from 1 or from a restored checkpoint.

        Raises:
            RunStopped: A signal has ended the run; the last step is saved.
            PolicyMismatchError: Samples came from other weights than the loop allows, or log-probs
                differ by more than trainer.max_logprob_gap or mean_logprob_gap.
            ConfigError: No response of a step got a reward, or too few groups passed the filter.
            WorkerError: A rank or a server failed.
        """
        self._report = report
        with exempt_objects_from_gc():
            self.train()

    @abstractmethod
    def train(self) -> None:
        """Run the loop."""

    def steps(self) -> Iterator[int]:
        """Yield the number of each step that is left; each has a clock of its own.

        Raises:
            RuntimeError: The loop has not called `finish_step` at the end of a step.
        """
        for step in range(self.checkpoints.next_step, self.config.trainer.num_steps + 1):
            self.clock, self._is_finished = Stopwatch(step), False
            if self.inputs.recorder is not None:
                self.inputs.recorder.begin(step)
            yield step
            if not self._is_finished:
                raise RuntimeError(
                    f"{type(self).__name__}.train has not ended step {step}; allowed: "
                    "self.finish_step(step, metrics) at the end of each step"
                )

    def timer(self, phase: str) -> AbstractContextManager[None]:
        """Measure a phase of the step, as the metric time/PHASE_s."""
        return self.clock(phase)

    def drop_rejected(self, batch: Samples, metrics: Mapping[str, float], step: int) -> Samples:
        """Warn of missing samples and groups; return the samples that are trained on.

        Of a step in which no group passed the filter, samples are logged, and none is left.
        """
        if REJECTED in batch:
            self.sample_log.write_step(step, batch)
            batch = batch.take([])
        self._warn_of_missing(count_groups(batch), metrics, step)
        return batch

    def log_samples(self, batch: Samples, step: int) -> None:
        """Write the samples of a step to disk and some to the screen, as sample_log.* says."""
        if len(batch):
            self.sample_log.write_step(step, batch)

    def save_if_due(self, step: int) -> None:
        """Save a checkpoint of the step, in the background: the actor is on its devices still."""
        if self.checkpoints.is_due(step):
            with self.timer("save"):
                self.checkpoints.save(step)

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """Return metrics on held-out prompts, of the weights that the servers have now."""
        if not self.evaluation.is_due(step):
            return {}
        with self.timer("evaluate"):
            return self.evaluation.run(step)

    def finish_step(self, step: int, metrics: dict[str, float]) -> None:
        """Report the metrics, and publish a checkpoint that was saved; servers have the weights.

        Args:
            metrics: Metrics of `sampler.collect`, updates and evaluations. Times are added.

        Raises:
            RunStopped: A signal has ended the run; the step is saved.
        """
        step_s = self.clock.total_s - self.clock.seconds.get("time/evaluate_s", 0.0)
        metrics["tokens_per_s"] = metrics["generated_tokens"] / step_s
        metrics |= self.clock.seconds | self.clock.driver | self.rollout.compute_draft_metrics()
        if self.inputs.recorder is not None:
            metrics |= self.inputs.recorder.finish(step)
        self._report(step, metrics)
        self.checkpoints.finish_step(step, metrics)
        self._is_finished = True

    def _warn_of_missing(self, num: int, metrics: Mapping[str, float], step: int) -> None:
        """Warn of samples and groups that are missing in a step with `num` groups.

        A filter with a single round to fill a step is meant to leave groups out.
        """
        warnings, policy = self.warnings, self.config.algorithm.filter
        warnings.begin_step()
        if dropped := round(metrics.get("dropped", 0)):
            text = f"{dropped} responses are missing, as they got no reward"
            warnings.add("responses got no reward", step, text)
        num_prompts = self.config.trainer.prompts_per_step
        if num >= num_prompts:
            return
        setting = f"algorithm.filter.group_filter={policy.group_filter!r}"
        text = f"{num} groups to train on, of trainer.prompts_per_step={num_prompts}"
        if not policy.group_filter:
            warnings.add("groups were missing", step, text)
        elif not num:
            text = f"no group has passed {setting}: nothing is learned"
            warnings.add(f"no group passed {setting}", step, text)
        elif policy.max_rounds > 1:
            warnings.add(f"too few groups passed {setting}", step, f"{text}, after {setting}")
        elif 2 * num < num_prompts:
            warnings.count(f"fewer than half of {num_prompts} groups passed {setting}")


def load_trainer(mode: str) -> type[RLTrainer]:
    """Return the class of a loop: `sync`, ..., or `path/to/file.py:MyTrainer`.

    Raises:
        ConfigError: There is none of that name, or it is no subclass of RLTrainer.
    """
    trainer: type[RLTrainer]
    if not is_import_path(mode):
        module, name = TRAINERS[mode].split(":")
        trainer = getattr(importlib.import_module(f"mcore_rl.trainers.{module}"), name)
        return trainer
    trainer = load_user_class("trainer.mode", mode, RLTrainer, TRAINERS)
    # Functions of its file that workers apply travel by value: workers cannot import the file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[trainer.__module__])
    return trainer


def build_frozen_models(config: RLConfig, devices: DeviceSharing) -> list[ScoringModel]:
    """Return the models of the run that score its samples, in the order in which they do."""
    models: list[ScoringModel] = []
    workers, temperature = devices.models, config.rollout.temperature
    if config.reward_model.model_path:
        weight = config.reward_model.weight
        models.append(RewardModel(workers["reward_model"], devices, weight))
    if names := list(build_teachers(config.teacher)):
        teachers = {name: workers[f"teacher.{name}"] for name in names}
        models.append(Teachers(teachers, devices.actor, devices, config))
    if config.algorithm.kl_coef:
        if "reference" in workers:
            compute = ModelWorker.compute_log_probs
            models.append(ReferenceModel(devices, "reference", compute, temperature))
        else:  # a LoRA actor without its adapters
            compute_base = ModelWorker.compute_reference_log_probs
            models.append(ReferenceModel(devices, "actor", compute_base, temperature))
    return models


def build_prompt_batches(config: RLConfig, prompts: PromptDataset) -> PromptBatches:
    """Return the batches of training prompts, by success rates with data.curriculum."""
    data, num, curriculum = config.data, config.trainer.prompts_per_step, None
    if name := data.curriculum.name:
        weight = CURRICULA.bind(name, data.curriculum.settings)
        curriculum = CurriculumSampler(len(prompts), num, config.seed, data.curriculum, weight)
    return PromptBatches(prompts, num, config.seed, data.train_weights, curriculum)
