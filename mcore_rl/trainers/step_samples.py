"""The samples that a step trains on: rounds of generation, rewards, group filters, replay."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_rl.algorithms.sample_choice import (
    CHOICE_STREAM,
    choose_responses,
    filter_groups,
    get_reward_or_part,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.batch_ops import (
    B,
    concat_batches,
    drop_groups,
    find_lost_groups,
    get_sample_columns,
    select_rows,
)
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.data.trajectories import Trajectories, find_truncated
from mcore_rl.rollout.manager import RolloutPool, report_lost_groups
from mcore_rl.trainers import policy_checks
from mcore_rl.trainers.policy_loss import reads_greedy
from mcore_rl.trainers.replay_buffer import ReplayBuffer

REJECTED = "left_out"  # a column of samples that are logged, and not trained on


@dataclass(frozen=True, slots=True)
class StepSampler:
    """Generates the samples of a step."""

    config: RLConfig
    rollout: RolloutPool
    prompts: PromptBatches
    replay: ReplayBuffer

    def collect(self, step: int, age: int = 0) -> tuple[Samples, dict[str, float]]:
        """Return the samples of a step with their rewards, and metrics of all that were generated.

        The servers have the weights of the policy that the step trains, or those of `age` versions
        before it. Round after round is generated until the groups that pass
        algorithm.filter.group_filter and those that are replayed make trainer.prompts_per_step.
        The last round's groups beyond that are dropped. A round that has lost samples with a node
        meanwhile is generated again, and lost groups of the replay buffer are left out. If no group
        has passed, and if_short is not stop, there is nothing to train on: the batch has the first
        groups, to be logged, with the column REJECTED.

        Raises:
            PolicyMismatchError: Samples came from other weights.
            ConfigError: No response got a reward; too few groups have passed, and if_short is stop.
        """
        policy, (replayed, num_needed) = self.config.algorithm.filter, self.draw_replayed(step)
        prompts: list[Batch] = []
        rounds: list[Samples] = []
        while True:
            prompts.append(self.prompts.take(policy.prompts_per_round or num_needed))
            rounds.append(self._generate(prompts[-1]))
            while lost := find_lost_groups(rounds):
                report_lost_groups(lost)
                for number, samples in enumerate(rounds):
                    if np.isin(samples.array("group_ids"), lost).any():
                        rounds[number] = self._generate(prompts[number])
            generated = concat_batches(rounds)
            policy_checks.check_versions(generated, step - 1 - age)
            batch, metrics = self.apply_rewards(generated, step)
            passed = _drop_without_baseline(select_rows(filter_groups, batch, policy))
            if count_groups(passed) >= num_needed or len(rounds) == policy.max_rounds:
                break
        self.update_curriculum(prompts, batch)
        if policy.group_filter:
            metrics |= _describe_filter(len(rounds), batch, passed, num_needed)
        if count_groups(passed) < num_needed and policy.if_short == "stop":
            raise ConfigError(
                f"step {step}: {count_groups(passed)} of {count_groups(batch)} groups have passed "
                f"algorithm.filter.group_filter={policy.group_filter!r} in {len(rounds)} rounds, "
                f"of {num_needed} that the step needs; allowed: more algorithm.filter.max_rounds "
                "or prompts_per_round, or if_short='train'"
            )
        selected, replay_metrics = self.add_replayed(
            _take_groups(passed, num_needed), replayed, step
        )
        if not len(selected):
            selected = _take_groups(batch, num_needed)
            selected = selected.with_columns(**{REJECTED: np.ones(len(selected), np.int8)})
        metrics |= replay_metrics | {"generated_tokens": float(generated.num_tokens.sum())}
        return selected, metrics

    def draw_replayed(self, step: int) -> tuple[Samples | None, int]:
        """Return the replayed groups of a step, and how many new groups it needs."""
        per_step = self.config.trainer.prompts_per_step
        replayed = self.replay.draw(per_step - count_new_groups(self.config), step)
        return replayed, per_step - (count_groups(replayed) if replayed is not None else 0)

    def apply_rewards(self, batch: Samples, step: int) -> tuple[Samples, dict[str, float]]:
        """Drop what has no reward, shuffle rewards (reward.shuffle); return metrics too.

        Raises:
            ConfigError: No response got a reward.
        """
        batch, metrics = drop_failed_rewards(batch, self.config.reward.on_error)
        metrics |= describe_samples(batch)
        if self.config.reward.shuffle:
            batch = shuffle_rewards(batch, [self.config.seed, step])
        return batch, metrics

    def update_curriculum(self, generated: Iterable[Samples], batch: Samples) -> None:
        """Report successes of all groups that were generated.

        Args:
            generated: Batches with the ids of these groups.
            batch: Their samples that got a reward.
        """
        curriculum = self.config.data.curriculum
        if curriculum.name:
            trajectories = Trajectories(get_sample_columns(batch)).join()
            rewards = get_reward_or_part(
                trajectories, curriculum.success, "data.curriculum.success"
            )
            has_succeeded = rewards >= curriculum.min_reward
            rewarded_groups = trajectories.array("group_ids")
            group_ids = {i for part in generated for i in part.array("group_ids").tolist()}
            self.prompts.observe(group_ids, rewarded_groups, has_succeeded)

    def add_replayed(
        self, fresh: Samples, replayed: Samples | None, step: int
    ) -> tuple[Samples, dict[str, float]]:
        """Select the responses that advantages compare, and join the replayed groups.

        The replay buffer has the fresh groups from then on.
        """
        policy, replay = self.config.algorithm.filter, self.config.algorithm.filter.replay
        if policy.advantages_of == "kept":
            seed = [self.config.seed, step, CHOICE_STREAM]
            fresh = select_rows(choose_responses, fresh, policy, seed)
        if not replay.share:
            return fresh, {}
        self.replay.add(fresh, step)
        fresh = fresh.with_columns(replayed=np.zeros(len(fresh), np.int8))
        if replayed is not None:
            replayed = drop_groups(replayed, find_lost_groups([replayed]))
        if replayed is None or not len(replayed):
            return fresh, {"samples/replayed": 0.0}
        policy_checks.check_versions(replayed, step - 1, replay.max_age)
        metrics = {"samples/replayed": float(count_groups(replayed))}
        if len(ages := policy_checks.compute_ages(replayed, step - 1)):
            metrics["samples/replayed_age"] = float(ages.mean())
        return concat_batches([fresh, replayed]), metrics

    def _generate(self, prompts: Batch) -> Samples:
        config = self.config
        batch: Samples = self.rollout.generate(prompts, n=config.algorithm.group_size)
        if reads_greedy(config.algorithm):
            greedy = self.rollout.generate(prompts, n=1, is_greedy=True)
            batch = add_baseline_rewards(batch, greedy, config.reward.on_error)
        if config.teacher.column:
            batch = add_teacher_names(batch, prompts, config.teacher.column)
        return batch


def count_new_groups(config: RLConfig) -> int:
    """Return the new groups that a step needs at least: the others are replayed, if there are."""
    per_step = config.trainer.prompts_per_step
    share = round(config.algorithm.filter.replay.share * per_step)
    return max(per_step - share, 1)


def count_groups(batch: Samples) -> int:
    """Return the number of groups that have a sample in the batch."""
    return len(np.unique(batch.array("group_ids")))


def _take_groups(batch: Samples, num: int) -> Samples:
    """Return the `num` groups whose prompts were drawn first."""
    group_ids = batch.array("group_ids")
    is_first = np.isin(group_ids, np.unique(group_ids)[:num])
    return batch.take(np.flatnonzero(is_first).tolist())


def drop_failed_rewards(batch: B, on_error: str) -> tuple[B, dict[str, float]]:
    """Drop samples whose reward failed (reward.on_error=drop). Return the batch and metrics.

    Groups may then differ in size, and a group may be gone.

    Raises:
        ConfigError: None is left.
    """
    if on_error == "stop":  # the servers have raised
        return batch, {}
    errors = batch.array("reward_errors")
    rows = np.flatnonzero(errors == "").tolist()
    metrics = {"reward_errors": compute_failure_rate(batch)}
    if on_error != "drop":
        return batch, metrics
    if not rows:
        raise ConfigError(
            f"reward.on_error='drop': none of the {len(batch)} responses of a step got a reward; "
            f"the first: {errors[0]}"
        )
    return batch.take(rows), metrics | {"dropped": float(len(batch) - len(rows))}


def compute_failure_rate(batch: Samples) -> float:
    """Return the share of samples that got no reward."""
    return float((batch.array("reward_errors") != "").mean())


def shuffle_rewards(batch: B, seed: Sequence[int]) -> B:
    """Permute rewards over the samples and drop those of tokens: no signal is left."""
    rewards = np.random.default_rng(seed).permutation(batch.array("rewards"))
    return batch.drop_columns("process_rewards").with_columns(rewards=rewards)


def add_baseline_rewards(batch: B, greedy: Samples, on_error: str = "drop") -> B:
    """Add baseline_rewards: of the greedy response to the same prompt, in the same role (ReMax).

    Drops the samples of prompts whose greedy response got no reward, which says nothing about what
    the policy earns there. If none got one, all have NaN with reward.on_error=zero.

    Raises:
        ConfigError: None of the greedy responses got one.
    """
    has_reward = greedy.array("reward_errors") == ""
    triples = zip(_list_groups_and_roles(greedy), greedy.array("rewards"), has_reward, strict=True)
    rewards = {key: reward for key, reward, is_rewarded in triples if is_rewarded}
    keys = _list_groups_and_roles(batch)
    rows = [row for row, key in enumerate(keys) if key in rewards]
    if not rows and on_error == "zero":
        return batch.with_columns(baseline_rewards=np.full(len(batch), np.nan, np.float32))
    if not rows:
        first = greedy.array("reward_errors")[0]
        raise ConfigError(f"none of {len(greedy)} greedy responses got a reward; first: {first}")
    baselines = np.array([rewards[keys[row]] for row in rows], np.float32)
    return batch.take(rows).with_columns(baseline_rewards=baselines)


def _drop_without_baseline(batch: Samples) -> Samples:
    """Drop the samples of rounds in which no greedy response got a reward."""
    if "baseline_rewards" not in batch:
        return batch
    return batch.take(np.flatnonzero(~np.isnan(batch.array("baseline_rewards"))).tolist())


def _list_groups_and_roles(batch: Samples) -> list[tuple[int, str]]:
    """Return the group id and the role of each sample."""
    groups = batch.array("group_ids").tolist()
    roles = batch.array("roles").tolist() if "roles" in batch else [""] * len(groups)
    return list(zip(groups, roles, strict=True))


def add_teacher_names(batch: B, prompts: Batch, column: str) -> B:
    """Add the column teacher: the teacher that the row of each sample's prompt names."""
    pairs = zip(prompts.array("group_ids"), prompts.jagged("fields").texts, strict=True)
    names = {int(group): json.loads(fields)[column] for group, fields in pairs}
    teachers = [names[int(group)] for group in batch.array("group_ids")]
    return batch.with_columns(teacher=np.array(teachers))


def describe_samples(batch: Samples) -> dict[str, float]:
    """Return metrics of generated samples, over trajectories."""
    num_samples, num_turns = len(batch), batch.array("turns").sum() if "turns" in batch else 0
    batch = Trajectories(get_sample_columns(batch)).join()
    lengths = batch.array("response_tokens")
    metrics: dict[str, Any] = {
        "reward": batch.array("rewards").mean(),
        "response_tokens": lengths.mean(),
        "response_tokens_max": lengths.max(),
        "truncated": find_truncated(batch).mean(),
    }
    if num_turns > len(batch):
        metrics["turns"] = num_turns / len(batch)
    if num_samples > len(batch):
        metrics["samples_per_trajectory"] = num_samples / len(batch)
    if "roles" in batch:
        roles = batch.array("roles")
        for role in np.unique(roles[roles != ""]):
            metrics[f"role/{role}/reward"] = batch.array("rewards")[roles == role].mean()
    for name in [name for name in batch.columns if name.startswith("reward/")]:
        values = batch.array(name)
        if not np.isnan(values).all():  # else each reward failed
            metrics[name] = np.nanmean(values)
    return {name: float(value) for name, value in metrics.items()}


def _describe_filter(
    num_rounds: int, batch: Samples, passed: Samples, num_needed: int
) -> dict[str, float]:
    num, num_passed = count_groups(batch), count_groups(passed)
    metrics = {"rounds": num_rounds, "groups": num, "passed": num_passed / num}
    metrics["dropped_surplus"] = max(num_passed - num_needed, 0)
    return {f"samples/{name}": float(value) for name, value in metrics.items()}
