"""What frozen models say of a batch, as its columns: rewards of a model, log-probs of teachers."""

from __future__ import annotations

import json

import numpy as np

from mcore_rl.config.resolve_distillation import OF_TOP_TOKENS, teachers_of
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.examples import scored_batch
from mcore_rl.workers import steps
from mcore_rl.workers.turns import Turns


def with_scores(batch: Batch, turns: Turns, config: RLConfig) -> tuple[Batch, dict[str, float]]:
    """What all frozen models say, and the metrics of rewards that are complete only now."""
    metrics = {}
    if config.reward_model.model_path:
        batch = with_model_rewards(batch, turns, config)
        metrics = steps.describe(batch)
    return with_teachers(batch, turns, config), metrics


def with_model_rewards(batch: Batch, turns: Turns, config: RLConfig) -> Batch:
    """Adds weight times the reward model's score to the rewards.

    The column reward/model has the scores, of prompt and response to the last token. A response
    whose own reward failed stays at 0 (reward.on_error=zero), as one without parts.
    """
    asked = scored_batch(batch.select("prompt_ids", "response_ids"))
    with turns.on_device("reward_model") as model:
        scores = model.compute_values(asked)["values"].values.astype(np.float32)
    rewards, weight = batch.array("rewards"), np.float32(config.reward_model.weight)
    failed = batch.array("reward_errors") != "" if "reward_errors" in batch else np.False_
    return batch.with_columns(
        rewards=np.where(failed, rewards, rewards + weight * scores),
        **{"reward/model": np.where(failed, np.float32(np.nan), scores)},
    )


def with_teacher_names(batch: Batch, asked: Batch, column: str) -> Batch:
    """Adds the column `teacher`: which one each sample has, by the fields of its prompt."""
    pairs = zip(asked.array("group_ids"), asked.array("fields"), strict=True)
    of_group = {int(group): json.loads(str(fields))[column] for group, fields in pairs}
    names = [of_group[int(group)] for group in batch.array("group_ids")]
    return batch.with_columns(teacher=np.array(names))


def with_teachers(batch: Batch, turns: Turns, config: RLConfig) -> Batch:
    """Adds what the teachers of each prompt say of the response tokens, if there are teachers.

    With T teachers a response: teacher_log_probs [response tokens, T] of the tokens that were
    sampled and, for a loss over the likeliest k, teacher_ids [response tokens, T, k] and their
    teacher_top_log_probs. teacher_shares [response tokens, T] are the weights of the teachers.
    """
    teachers = teachers_of(config.teacher)
    if not teachers:
        return batch
    names = list(teachers)
    parts = []
    rows = {name: list(range(len(batch))) for name in names}
    if config.teacher.column:
        rows = {n: np.flatnonzero(batch.array("teacher") == n).tolist() for n in names}
    with_top = config.algorithm.distillation.loss in OF_TOP_TOKENS
    for name in names:
        if rows[name]:
            mine = batch.select("prompt_ids", "response_ids").take(rows[name])
            with turns.on_device(f"teacher.{name}") as model:
                found = model.compute_log_probs(mine, temperature=config.rollout.temperature)
            parts.append(_columns(found, teachers[name].weight, with_top))
    if config.teacher.column:  # each row has one teacher
        order = np.argsort(np.concatenate([rows[name] for name in names if rows[name]]))
        merged = Batch.concat(parts).take(order.tolist())
        return batch.with_columns(**merged.columns)
    joined = {}
    for name in parts[0].columns:
        values = [part.jagged(name).values for part in parts]
        joined[name] = parts[0].jagged(name).with_values(np.concatenate(values, axis=1))
    return batch.with_columns(**joined)


def _columns(scored: Batch, weight: float, with_top: bool) -> Batch:
    """Of one teacher, each with an axis of one teacher."""
    log_probs = scored.jagged("log_probs")
    shares = np.full((len(log_probs.values), 1), weight, np.float32)
    columns = {
        "teacher_log_probs": log_probs.with_values(log_probs.values[:, None]),
        "teacher_shares": log_probs.with_values(shares),
    }
    if with_top:
        for name, source in {"ids": "top_ids", "top_log_probs": "top_log_probs"}.items():
            values = scored.jagged(source).values[:, None]
            columns[f"teacher_{name}"] = log_probs.with_values(values)
    return Batch(dict(columns))
