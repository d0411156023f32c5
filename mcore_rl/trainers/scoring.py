"""What frozen models say of a batch, as its columns: rewards of a model, log-probs of teachers."""

from __future__ import annotations

import json

import numpy as np

from mcore_rl.config.resolve_algorithm import TOP_TOKEN_LOSSES, build_teachers
from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.batch_ops import B, joined, with_near
from mcore_rl.data.batch import Batch, Column
from mcore_rl.trainers import steps
from mcore_rl.trainers.device_sharing import Turns


def with_scores(batch: B, turns: Turns, config: RLConfig) -> tuple[B, dict[str, float]]:
    """What all frozen models say, and the metrics of rewards that are complete only now."""
    metrics = {}
    if config.reward_model.model_path:
        batch = with_model_rewards(batch, turns, config)
        metrics = steps.describe(batch)
    return with_teachers(batch, turns, config), metrics


def with_model_rewards(batch: B, turns: Turns, config: RLConfig) -> B:
    """Adds weight times the reward model's score to the rewards.

    The column reward/model has the scores, of prompt and response to the last token. A response
    whose own reward failed stays at 0 (reward.on_error=zero), as one without parts.
    """
    asked = batch.select("prompt_ids", "response_ids")
    with turns.on_device("reward_model") as model:
        scores = model.compute_scores(asked).array("scores")
    rewards, weight = batch.array("rewards"), np.float32(config.reward_model.weight)
    failed = batch.array("reward_errors") != "" if "reward_errors" in batch else np.False_
    return batch.with_columns(
        rewards=np.where(failed, rewards, rewards + weight * scores),
        **{"reward/model": np.where(failed, np.float32(np.nan), scores)},
    )


def with_teacher_names(batch: B, asked: Batch, column: str) -> B:
    """Adds the column `teacher`: which one each sample has, by the fields of its prompt."""
    pairs = zip(asked.array("group_ids"), asked.jagged("fields").texts, strict=True)
    of_group = {int(group): json.loads(fields)[column] for group, fields in pairs}
    names = [of_group[int(group)] for group in batch.array("group_ids")]
    return batch.with_columns(teacher=np.array(names))


def with_teachers(batch: B, turns: Turns, config: RLConfig) -> B:
    """Adds what the teachers of each prompt say of the response tokens, if there are teachers.

    With T teachers a response: teacher_log_probs [response tokens, T] of the tokens that were
    sampled and, for a loss over the likeliest k, teacher_ids [response tokens, T, k] and their
    teacher_top_log_probs. teacher_shares [response tokens, T] are the weights of the teachers.
    """
    teachers = build_teachers(config.teacher)
    if not teachers:
        return batch
    names = list(teachers)
    parts: list[B] = []
    rows = {name: list(range(len(batch))) for name in names}
    if config.teacher.column:
        rows = {n: np.flatnonzero(batch.array("teacher") == n).tolist() for n in names}
    with_top = config.algorithm.distillation.loss in TOP_TOKEN_LOSSES
    for name in names:
        if rows[name]:
            mine = batch.select("prompt_ids", "response_ids").take(rows[name])
            with turns.on_device(f"teacher.{name}") as model:
                found = model.compute_log_probs(mine, temperature=config.rollout.temperature)
                part, _ = with_near(model, _columns, found, teachers[name].weight, with_top)
            parts.append(part.select(*(n for n in part.names if n.startswith("teacher_"))))
    if config.teacher.column:  # each row has one teacher
        order = np.argsort(np.concatenate([rows[name] for name in names if rows[name]]))
        return batch.union(joined(parts).take(order.tolist()))
    if len(parts) == 1:
        return batch.union(parts[0])
    of_each = batch.select("response_ids")
    for number, part in enumerate(parts):
        of_each = of_each.union(part.renamed(**{n: f"{n}.{number}" for n in part.names}))
    merged, _ = with_near(turns.actor, _side_by_side, of_each, len(parts))
    names = [n for n in merged.names if n.startswith("teacher_") and "." not in n]
    return batch.union(merged.select(*names))


def _side_by_side(batch: Batch, num_teachers: int) -> tuple[Batch, None]:
    """The columns of all teachers, NAME.0, NAME.1 and so on, as one with an axis of teachers."""
    columns: dict[str, Column] = {}
    for name in (n.removesuffix(".0") for n in batch.names if n.endswith(".0")):
        parts = [batch.jagged(f"{name}.{number}") for number in range(num_teachers)]
        values = np.concatenate([part.values for part in parts], axis=1)
        columns[name] = parts[0].with_values(values)
    return batch.with_columns(**columns), None


def _columns(scored: Batch, weight: float, with_top: bool) -> tuple[Batch, None]:
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
    return scored.with_columns(**columns), None
