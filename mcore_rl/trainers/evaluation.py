"""Evaluation on held-out prompts and examples: when it is due, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.inputs import get_reward_part
from mcore_rl.config.schema import RewardConfig, RLConfig, TrainConfig
from mcore_rl.controller.batch_ops import get_sample_columns
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.examples import ExampleFiles
from mcore_rl.data.prompt_batches import build_held_out_batch
from mcore_rl.data.trajectories import Trajectories, find_truncated
from mcore_rl.observability.activity import ACTIVITY
from mcore_rl.observability.metrics import prefix_eval_metrics
from mcore_rl.rollout.manager import RolloutPool
from mcore_rl.trainers.objectives import Metrics, Objective
from mcore_rl.trainers.sample_log import SampleLog
from mcore_rl.trainers.step_samples import compute_failure_rate

# Rewards that are 1 for a right answer and else 0, whose mean is an accuracy.
ACCURACIES = ("choice", "final_number", "math")
MetricsBySet = dict[str, dict[str, float]]


@dataclass(slots=True)
class Evaluation:
    """Generates for the held-out prompts of a run, and scores the responses."""

    config: RLConfig
    rollout: RolloutPool
    sets: Mapping[str, Batch]
    sample_log: SampleLog
    record: Callable[[str, MetricsBySet], None]  # takes "before" or "after", for the summary
    latest: list[Samples] = field(default_factory=list)  # samples of the last evaluation

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate: step 0 is before training; always after the last step."""
        settings, last = self.config.evaluation, self.config.trainer.num_steps
        return bool(self.sets) and _is_due(step, last, settings.before, settings.every)

    def run(self, step: int) -> dict[str, float]:
        """Return metrics eval/SET/NAME, of the weights after this step; save the samples.

        A response whose reward failed counts as 0, whatever reward.on_error does with it in
        training: without it the others would look better than the policy is.
        """
        metrics: MetricsBySet = {}
        self.latest = []
        for name, prompts in self.sets.items():
            samples = self.rollout.evaluate(prompts, self.config.evaluation)
            self.sample_log.write_evaluation(step, name, samples)
            self.latest.append(samples)
            metrics[name] = compute_scores(samples, self.config.reward)
            if self.config.reward.on_error != "stop":
                metrics[name]["reward_errors"] = compute_failure_rate(samples)
        for when, number in (("before", 0), ("after", self.config.trainer.num_steps)):
            if step == number:
                self.record(when, metrics)
        return prefix_eval_metrics(metrics)

    @property
    def temperature(self) -> float | None:
        """Temperature at which a trainer has the log-probs of these samples; None if it cannot."""
        settings, rollout = self.config.evaluation, self.config.rollout
        temperature = rollout.temperature if settings.temperature is None else settings.temperature
        top_p = rollout.top_p if settings.top_p is None else settings.top_p
        top_k = rollout.top_k if settings.top_k is None else settings.top_k
        return temperature if temperature and top_p == 1 and not top_k else None


@dataclass(frozen=True, slots=True)
class SupervisedEvaluation:
    """Computes the loss of held-out examples."""

    config: TrainConfig  # with the number of steps of the whole run
    objective: Objective
    sets: Mapping[str, ExampleFiles]
    record: Callable[[str, dict[str, Metrics]], None]  # takes "before" or "after", for the summary

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate: step 0 is before training; always after the last step."""
        settings, last = self.config.evaluation, self.config.trainer.num_steps
        return bool(self.sets) and _is_due(step, last, settings.before, settings.every)

    def run(self, step: int) -> Metrics:
        """Return metrics eval/SET/NAME, of the weights after this step."""
        metrics = {name: self.objective.evaluate(self._list_batches(name)) for name in self.sets}
        for when, number in (("before", 0), ("after", self.config.trainer.num_steps)):
            if step == number:
                self.record(when, metrics)
        return prefix_eval_metrics(metrics)

    def _list_batches(self, name: str) -> Iterator[Batch]:
        """Yield all rows of a set, or eval_samples at most, a training batch at a time."""
        examples, size = self.sets[name], self.config.trainer.batch_size
        num = min(self.config.trainer.eval_samples or len(examples), len(examples))
        rows = list(range(num))
        with ACTIVITY.count(len(rows), f"rows of {name}") as show_count:
            for start in range(0, len(rows), size):
                show_count(start)
                yield examples.take(rows[start : start + size])


def _is_due(step: int, last_step: int, before: bool, every: int) -> bool:
    """Return whether evaluation.before and evaluation.every ask for an evaluation at a step."""
    if step == 0:
        return before
    return step == last_step or (every > 0 and step % every == 0)


def build_test_sets(tests: Mapping[str, PromptDataset], num_prompts: int) -> dict[str, Batch]:
    """Return the prompts of each set, all or the first; no two share a group id."""
    sets, num_before = {}, 0
    for name, dataset in tests.items():
        num = min(num_prompts or len(dataset), len(dataset))
        sets[name] = build_held_out_batch(dataset, num, num_before)
        num_before += len(sets[name])
    return sets


def compute_scores(batch: Samples, config: RewardConfig) -> dict[str, float]:
    """Return mean reward and parts, with standard errors, and metrics of lengths.

    All are over trajectories. accuracy is there where the reward is one (`ACCURACIES`): alone, or
    as a term. A response whose reward failed has reward 0, is not right, and has no parts.
    """
    batch = Trajectories(get_sample_columns(batch)).join()
    groups, rewards = batch.array("group_ids"), batch.array("rewards")
    values = {"reward": rewards}
    if not config.terms and config.name in ACCURACIES:
        values["accuracy"] = rewards
    values |= {name: batch.array(name) for name in batch.columns if name.startswith("reward/")}
    for name, term in config.terms.items():
        is_accuracy = term.get("name", name) in ACCURACIES
        if is_accuracy and (right := get_reward_part(batch, name)) is not None:
            values[f"accuracy/{name}"] = right
    if "roles" in batch:
        roles = batch.array("roles")
        for role in np.unique(roles[roles != ""]):
            values[f"role/{role}/reward"] = np.where(roles == role, rewards, np.nan)
    metrics = {}
    for name, column in values.items():
        has_value = ~np.isnan(column)
        if has_value.any():
            metrics[name] = float(column[has_value].mean())
            metrics[f"{name}_stderr"] = compute_standard_error(column[has_value], groups[has_value])
    metrics["response_tokens"] = float(batch.array("response_tokens").mean())
    metrics["truncated"] = float(find_truncated(batch).mean())
    metrics["num_samples"] = float(len(batch))
    return metrics


def compute_standard_error(
    values: npt.NDArray[np.floating], groups: npt.NDArray[np.int64]
) -> float:
    """Return the standard error of the mean, clustered by group (the responses to a prompt).

    sqrt(J / (J - 1) * sum_j (sum_{i in j} (x_i - mean))^2) / N for J groups of N values in all: the
    cluster-robust one (2411.00640, section 2.2), with the correction for few clusters. With one
    value a group it is std / sqrt(N). 0 for a single group, which tells nothing of others.
    """
    names, index = np.unique(groups, return_inverse=True)
    if len(names) < 2:
        return 0.0
    deviations = values.astype(np.float64) - values.mean(dtype=np.float64)
    sums = np.bincount(index, weights=deviations)
    return math.sqrt(len(names) / (len(names) - 1) * float((sums**2).sum())) / len(values)
