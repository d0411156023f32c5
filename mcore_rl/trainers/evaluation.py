"""Held-out prompts, answered before training, while it goes on, and after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.inputs import reward_part
from mcore_rl.config.schema import RewardConfig, RLConfig
from mcore_rl.controller.batch_ops import per_sample
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.prompt_batches import held_out_batch
from mcore_rl.data.trajectories import Trajectories
from mcore_rl.observability.metrics import prefix_eval_metrics
from mcore_rl.rollout.manager import RolloutPool
from mcore_rl.trainers import steps
from mcore_rl.trainers.sample_log import SampleTables

# Rewards that are 1 for a right answer and else 0, whose mean is an accuracy.
ACCURACIES = ("choice", "final_number", "math")
Found = dict[str, dict[str, float]]  # metrics of each set, by name


@dataclass(slots=True)
class Evaluation:
    """The sets of a run and what they are answered with."""

    config: RLConfig
    rollout: RolloutPool
    sets: Mapping[str, Batch]
    tables: SampleTables
    record: Callable[[str, Found], None]  # takes "before" or "after", for the summary
    latest: list[Samples] = field(default_factory=list)  # samples of the last evaluation

    def is_due(self, step: int) -> bool:
        """Step 0 is before training; after the last step there is always one. None without sets."""
        every = self.config.evaluation.every
        if not self.sets:
            return False
        if step == 0:
            return self.config.evaluation.before
        return step == self.config.trainer.num_steps or (bool(every) and step % every == 0)

    def run(self, step: int) -> dict[str, float]:
        """Metrics eval/SET/NAME, of the weights after this step; the samples are saved.

        A response whose reward failed counts as 0, whatever reward.on_error does with it in
        training: without it the others would look better than the policy is.
        """
        found: Found = {}
        self.latest = []
        for name, prompts in self.sets.items():
            samples = self.rollout.evaluate(prompts, self.config.evaluation)
            self.tables.of_evaluation(step, name, samples)
            self.latest.append(samples)
            found[name] = scores(samples, self.config.reward)
            if self.config.reward.on_error != "stop":
                found[name]["reward_errors"] = steps.failed_share(samples)
        for when, at in (("before", 0), ("after", self.config.trainer.num_steps)):
            if step == at:
                self.record(when, found)
        return prefix_eval_metrics(found)

    @property
    def temperature(self) -> float | None:
        """At which a trainer finds the log-probs of these samples; None where it cannot."""
        own, rollout = self.config.evaluation, self.config.rollout
        temperature = rollout.temperature if own.temperature is None else own.temperature
        top_p = rollout.top_p if own.top_p is None else own.top_p
        top_k = rollout.top_k if own.top_k is None else own.top_k
        return temperature if temperature and top_p == 1 and not top_k else None


def held_out(tests: Mapping[str, PromptDataset], num_prompts: int) -> dict[str, Batch]:
    """The prompts of each set, all or the first; no two share a group id."""
    found, num_before = {}, 0
    for name, dataset in tests.items():
        found[name] = held_out_batch(dataset, num_prompts or len(dataset), num_before)
        num_before += len(found[name])
    return found


def scores(batch: Samples, config: RewardConfig) -> dict[str, float]:
    """Mean reward and parts, each with its standard error, tokens, and what else tells of a set.

    All are over trajectories. accuracy is there where the reward is one (`ACCURACIES`): alone, or
    as a term. A response whose reward failed has reward 0, is not right, and has no parts.
    """
    batch = Trajectories(per_sample(batch)).joined()
    groups, rewards = batch.array("group_ids"), batch.array("rewards")
    values = {"reward": rewards}
    if not config.terms and config.name in ACCURACIES:
        values["accuracy"] = rewards
    values |= {name: batch.array(name) for name in batch.columns if name.startswith("reward/")}
    for name, term in config.terms.items():
        is_accuracy = term.get("name", name) in ACCURACIES
        if is_accuracy and (right := reward_part(batch, name)) is not None:
            values[f"accuracy/{name}"] = right
    found = {}
    if "roles" in batch:
        roles = batch.array("roles")
        for role in np.unique(roles[roles != ""]):
            values[f"role/{role}/reward"] = np.where(roles == role, rewards, np.nan)
    for name, column in values.items():
        has_value = ~np.isnan(column)
        if has_value.any():
            found[name] = float(column[has_value].mean())
            found[f"{name}_stderr"] = standard_error(column[has_value], groups[has_value])
    found["response_tokens"] = float(batch.array("response_tokens").mean())
    found["truncated"] = float((batch.array("finish_reasons") == "length").mean())
    found["num_samples"] = float(len(batch))
    return found


def standard_error(values: npt.NDArray[np.floating], groups: npt.NDArray[np.int64]) -> float:
    """Of the mean of all values, where those of a group (the responses to a prompt) hang together.

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
