"""What a step trains on: generated until enough groups pass the filter, and replayed."""

from __future__ import annotations

import numpy as np

from mcore_rl.algorithms.sample_choice import (
    CHOICE_STREAM,
    kept_groups,
    kept_responses,
    reward_or_part,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.batch_ops import joined, kept, lost_groups, per_sample, without_groups
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.data.trajectories import Trajectories
from mcore_rl.rollout.manager import RolloutPool, tell_lost
from mcore_rl.trainers import policy_checks, steps
from mcore_rl.trainers.policy_loss import reads_greedy
from mcore_rl.trainers.replay_buffer import ReplayBuffer
from mcore_rl.trainers.scoring import with_teacher_names

LEFT_OUT = "left_out"  # a column of samples that are shown, and not trained on


def samples_of_step(
    config: RLConfig,
    rollout: RolloutPool,
    prompts: PromptBatches,
    replay: ReplayBuffer,
    step: int,
    age: int = 0,
) -> tuple[Samples, dict[str, float]]:
    """The samples of a step with their rewards, and metrics of all that were generated.

    The servers have the weights of the policy that the step trains, or those of `age` versions
    before it. Round after round is generated until the groups that pass
    algorithm.filter.group_filter and those that are replayed make trainer.prompts_per_step. The
    last round's groups beyond that are dropped. A round that has lost samples with a node meanwhile
    is generated again, and what was to be replayed is left out. If no group has passed, and
    if_short is not stop, there is nothing to train on: the batch has the first groups to be shown,
    with the column LEFT_OUT.

    Raises:
        PolicyMismatchError: samples came from other weights.
        ConfigError: no response got a reward; too few groups have passed, and if_short is stop.
    """
    policy, (replayed, wanted) = config.algorithm.filter, replayed_and_wanted(config, replay, step)
    asked: list[Batch] = []
    rounds: list[Samples] = []
    while True:
        asked.append(prompts.take(policy.prompts_per_round or wanted))
        rounds.append(_round(config, rollout, asked[-1]))
        while lost := lost_groups(rounds):
            tell_lost(lost)
            for number, of_round in enumerate(rounds):
                if np.isin(of_round.array("group_ids"), lost).any():
                    rounds[number] = _round(config, rollout, asked[number])
        came = joined(rounds)
        policy_checks.check_versions(came, step - 1 - age)
        batch, metrics = rewarded(config, came, step)
        passed = kept(kept_groups, batch, policy)
        if num_groups(passed) >= wanted or len(rounds) == policy.max_rounds:
            break
    observe(config, prompts, came, batch)
    if policy.group_filter:
        metrics |= _of_filter(len(rounds), batch, passed, wanted)
    if num_groups(passed) < wanted and policy.if_short == "stop":
        raise ConfigError(
            f"step {step}: {num_groups(passed)} of {num_groups(batch)} groups have passed "
            f"algorithm.filter.group_filter={policy.group_filter!r} in {len(rounds)} rounds, of "
            f"{wanted} that the step needs; allowed: more algorithm.filter.max_rounds or "
            "prompts_per_round, or if_short='train'"
        )
    first, found = trained_on(config, _first(passed, wanted), replay, replayed, step)
    if not len(first):
        first = _first(batch, wanted)
        first = first.with_columns(**{LEFT_OUT: np.ones(len(first), np.int8)})
    return first, metrics | found | {"generated_tokens": float(came.num_tokens.sum())}


def replayed_and_wanted(
    config: RLConfig, replay: ReplayBuffer, step: int
) -> tuple[Samples | None, int]:
    """The groups of earlier steps that a step trains on, and how many new ones it needs."""
    per_step = config.trainer.prompts_per_step
    replayed = replay.draw(per_step - new_per_step(config), step)
    return replayed, per_step - (num_groups(replayed) if replayed is not None else 0)


def new_per_step(config: RLConfig) -> int:
    """New groups that a step needs at least: it replays the others if the buffer has enough."""
    per_step = config.trainer.prompts_per_step
    share = round(config.algorithm.filter.replay.share * per_step)
    return max(per_step - share, 1)


def rewarded(config: RLConfig, came: Samples, step: int) -> tuple[Samples, dict[str, float]]:
    """What was generated, with the rewards that count, and metrics of it.

    Raises ConfigError: no response got a reward.
    """
    batch, metrics = steps.judged(came, config.reward.on_error)
    metrics |= steps.describe(batch)
    if config.reward.shuffle:
        batch = steps.shuffled_rewards(batch, [config.seed, step])
    return batch, metrics


def trained_on(
    config: RLConfig, fresh: Samples, replay: ReplayBuffer, replayed: Samples | None, step: int
) -> tuple[Samples, dict[str, float]]:
    """The groups of a step with those responses that advantages compare, and replayed groups."""
    policy = config.algorithm.filter
    if policy.advantages_of == "kept":
        fresh = kept(kept_responses, fresh, policy, [config.seed, step, CHOICE_STREAM])
    if not policy.replay.share:
        return fresh, {}
    return _with_replayed(fresh, replayed, replay, policy.replay.max_age, step)


def _round(config: RLConfig, rollout: RolloutPool, asked: Batch) -> Samples:
    batch = rollout.generate(asked, n=config.algorithm.group_size)
    if reads_greedy(config.algorithm):
        greedy = rollout.generate(asked, n=1, is_greedy=True)
        batch = steps.with_baseline_rewards(batch, greedy)
    if config.teacher.column:
        batch = with_teacher_names(batch, asked, config.teacher.column)
    return batch


def observe(config: RLConfig, prompts: PromptBatches, came: Samples, batch: Samples) -> None:
    """Tells a curriculum of the groups that `came`; `batch` has those with a reward."""
    curriculum = config.data.curriculum
    if curriculum.name:
        whole = Trajectories(per_sample(batch)).joined()
        rewards = reward_or_part(whole, curriculum.success, "data.curriculum.success")
        has_succeeded = rewards >= curriculum.min_reward
        prompts.observe(came.array("group_ids"), whole.array("group_ids"), has_succeeded)


def _of_filter(num_rounds: int, batch: Samples, passed: Samples, wanted: int) -> dict[str, float]:
    num, num_passed = num_groups(batch), num_groups(passed)
    found = {"rounds": num_rounds, "groups": num, "passed": num_passed / num}
    found["dropped_surplus"] = max(num_passed - wanted, 0)
    return {f"samples/{name}": float(value) for name, value in found.items()}


def _with_replayed(
    fresh: Samples, replayed: Samples | None, replay: ReplayBuffer, max_age: int, step: int
) -> tuple[Samples, dict[str, float]]:
    """Both; and the buffer has the fresh ones from now on."""
    replay.add(fresh, step)
    fresh = fresh.with_columns(replayed=np.zeros(len(fresh), np.int8))
    if replayed is not None:
        replayed = without_groups(replayed, lost_groups([replayed]))
    if replayed is None or not len(replayed):
        return fresh, {"samples/replayed": 0.0}
    policy_checks.check_versions(replayed, step - 1, max_age)
    metrics = {"samples/replayed": float(num_groups(replayed))}
    if len(found := policy_checks.ages(replayed, step - 1)):
        metrics["samples/replayed_age"] = float(found.mean())
    return joined([fresh, replayed]), metrics


def num_groups(batch: Samples) -> int:
    return len(np.unique(batch.array("group_ids")))


def _first(batch: Samples, num: int) -> Samples:
    """The `num` groups that were asked for first."""
    group_ids = batch.array("group_ids")
    is_first = np.isin(group_ids, np.unique(group_ids)[:num])
    return batch.take(np.flatnonzero(is_first).tolist())
