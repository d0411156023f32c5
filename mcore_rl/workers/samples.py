"""What a step trains on: generated until enough groups pass the filter, and replayed."""

from __future__ import annotations

import numpy as np

from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.inputs import needs_of
from mcore_rl.algorithms.replay import ReplayBuffer
from mcore_rl.algorithms.sample_choice import (
    CHOICE_STREAM,
    kept_groups,
    kept_responses,
    reward_or_part,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.batch import Array, Batch
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.data.trajectories import Trajectories
from mcore_rl.workers import policy_checks, steps
from mcore_rl.workers.rollout_pool import RolloutPool
from mcore_rl.workers.scoring import with_teacher_names


def samples_of_step(
    config: RLConfig,
    rollout: RolloutPool,
    prompts: PromptBatches,
    replay: ReplayBuffer,
    step: int,
    age: int = 0,
) -> tuple[Batch, dict[str, float]]:
    """The samples of a step with their rewards, and metrics of all that were generated.

    The servers have the weights of the policy that the step trains, or those of `age` versions
    before it. Round after round is generated until the groups that pass
    algorithm.samples.group_filter and those that are replayed make trainer.prompts_per_step. The
    last round's groups beyond that are dropped. The batch is empty if no group has passed, and
    if_short is not stop.

    Raises:
        PolicyMismatchError: samples came from other weights.
        ConfigError: no response got a reward; too few groups have passed, and if_short is stop.
    """
    policy, seed = config.algorithm.samples, [config.seed, step]
    per_step = config.trainer.prompts_per_step
    replayed = replay.draw(min(round(policy.replay.share * per_step), per_step - 1), step)
    wanted = per_step - (_num_groups(replayed) if replayed is not None else 0)
    rounds: list[Batch] = []
    while True:
        rounds.append(_round(config, rollout, prompts.take(policy.prompts_per_round or wanted)))
        policy_checks.check_versions(rounds[-1], step - 1 - age)
        batch, metrics = steps.judged(Batch.concat(rounds), config.reward.on_error)
        metrics |= steps.describe(batch)
        if config.reward.shuffle:
            batch = steps.shuffled_rewards(batch, seed)
        passed = kept_groups(batch, policy)
        if _num_groups(passed) >= wanted or len(rounds) == policy.max_rounds:
            break
    _observe(config, prompts, batch)
    if policy.group_filter:
        metrics |= _of_filter(len(rounds), batch, passed, wanted)
    if _num_groups(passed) < wanted and policy.if_short == "stop":
        raise ConfigError(
            f"step {step}: {_num_groups(passed)} of {_num_groups(batch)} groups have passed "
            f"algorithm.samples.group_filter={policy.group_filter!r} in {len(rounds)} rounds, of "
            f"{wanted} that the step needs; allowed: more algorithm.samples.max_rounds or "
            "prompts_per_round, or if_short='train'"
        )
    kept = passed.take(np.flatnonzero(_is_first(passed.array("group_ids"), wanted)).tolist())
    if policy.advantages_of == "kept":
        kept = kept_responses(kept, policy, [*seed, CHOICE_STREAM])
    if policy.replay.share:
        kept, found = _with_replayed(kept, replayed, replay, policy.replay.max_age, step)
        metrics |= found
    generated = int(Batch.concat(rounds).num_tokens.sum())
    return kept, metrics | {"generated_tokens": float(generated)}


def _round(config: RLConfig, rollout: RolloutPool, asked: Batch) -> Batch:
    batch = rollout.generate(asked, n=config.algorithm.group_size)
    if "baseline_rewards" in needs_of(ADVANTAGES[config.algorithm.advantage]):
        greedy = rollout.generate(asked, n=1, is_greedy=True)
        batch = steps.with_baseline_rewards(batch, greedy)
    if config.teacher.column:
        batch = with_teacher_names(batch, asked, config.teacher.column)
    return batch


def _observe(config: RLConfig, prompts: PromptBatches, batch: Batch) -> None:
    curriculum = config.data.curriculum
    if curriculum.name:
        batch = Trajectories(batch).joined()
        rewards = reward_or_part(batch, curriculum.success, "data.curriculum.success")
        prompts.observe(batch.array("group_ids"), rewards >= curriculum.min_reward)


def _of_filter(num_rounds: int, batch: Batch, passed: Batch, wanted: int) -> dict[str, float]:
    num, num_passed = _num_groups(batch), _num_groups(passed)
    found = {"rounds": num_rounds, "groups": num, "passed": num_passed / num}
    found["dropped_surplus"] = max(num_passed - wanted, 0)
    return {f"samples/{name}": float(value) for name, value in found.items()}


def _with_replayed(
    fresh: Batch, replayed: Batch | None, replay: ReplayBuffer, max_age: int, step: int
) -> tuple[Batch, dict[str, float]]:
    """Both; and the buffer has the fresh ones from now on."""
    replay.add(fresh, step)
    fresh = fresh.with_columns(replayed=np.zeros(len(fresh), np.int8))
    if replayed is None:
        return fresh, {"samples/replayed": 0.0}
    policy_checks.check_versions(replayed, step - 1, max_age)
    metrics = {"samples/replayed": float(_num_groups(replayed))}
    ages = step - 1 - policy_checks.chosen(replayed, "weight_versions")
    if len(ages):
        metrics["samples/replayed_age"] = float(ages.mean())
    return Batch.concat([fresh, replayed]), metrics


def _num_groups(batch: Batch) -> int:
    return len(np.unique(batch.array("group_ids")))


def _is_first(group_ids: Array, num: int) -> Array:
    """[samples]: of the `num` groups that were asked for first."""
    return np.asarray(np.isin(group_ids, np.unique(group_ids)[:num]))
