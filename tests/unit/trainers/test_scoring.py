"""Columns that frozen models give: each row by its teacher, and scores beside rewards."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.resolve import resolve_placement
from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.batch_ops import with_near
from mcore_rl.controller.remote_batch import is_of_part
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.trainers.device_sharing import Turns
from mcore_rl.trainers.scoring import with_model_rewards, with_teacher_names, with_teachers


class Scorer:
    """Gives each token its id, times a factor; its places in order."""

    def __init__(self, factor: float) -> None:
        self.factor, self.places = factor, []

    def with_next(self, method: str, place: str) -> None:
        getattr(self, method)(place)

    def to(self, place: str) -> None:
        self.places.append(place)

    def compute_log_probs(self, batch: Batch, *, temperature: float) -> Batch:
        ids = batch.jagged("response_ids")
        values = (ids.values * self.factor * temperature).astype(np.float32)
        top = np.stack([values, values - 1], 1)
        tops = {"top_ids": np.stack([ids.values] * 2, 1), "top_log_probs": top}
        columns = {name: ids.with_values(column) for name, column in tops.items()}
        return batch.with_columns(log_probs=ids.with_values(values), **columns)

    def compute_scores(self, batch: Batch) -> Batch:
        """The sum of the conversation's ids."""
        rows = zip(batch.jagged("prompt_ids"), batch.jagged("response_ids"), strict=True)
        sums = [(prompt.sum() + response.sum()) * self.factor for prompt, response in rows]
        return batch.with_columns(scores=np.array(sums, np.float32))


def answered() -> Batch:
    ids = Jagged.of([[1, 2], [3], [4, 5, 6], [7]], np.int64)
    return Batch(
        {
            "prompt_ids": Jagged.of([[10], [10], [20], [20]], np.int64),
            "response_ids": ids,
            "group_ids": np.array([5, 5, 6, 6]),
            "rewards": np.array([1, 0, 0.5, 0], np.float32),
            "reward_errors": np.array(["", "", "", "it raised"]),
        }
    )


def asked(names: list[str]) -> Batch:
    fields = [json.dumps({"subject": name}) for name in names]
    return Batch({"group_ids": np.array([6, 5]), "fields": Jagged.of_texts(fields)})


def turns_of(config: RLConfig, **models: Scorer) -> Turns:
    servers: Any = None
    return Turns(resolve_placement(config), {"actor": servers, **models}, servers, servers)


def config_of(column: str, loss: str) -> RLConfig:
    config = RLConfig()
    config.teacher.models = {"math": {"weight": 0.5}, "code": {"weight": 2}}
    config.teacher.column, config.algorithm.distillation.loss = column, loss
    config.rollout.temperature = 0.5
    return config


def test_all_teachers_score_all_rows():
    config = config_of("", "reverse_kl")
    models = {"teacher.math": Scorer(-1), "teacher.code": Scorer(-2)}
    found = with_teachers(answered(), turns_of(config, **models), config)
    ids = np.arange(1, 8)
    for name, wanted in {
        "teacher_log_probs": np.stack([-0.5 * ids, -ids], 1),
        "teacher_shares": np.tile([0.5, 2], (7, 1)),
        "teacher_ids": np.tile(ids[:, None, None], (1, 2, 2)),
        "teacher_top_log_probs": np.stack([-0.5 * ids, -ids], 1)[..., None] - [0, 1],
    }.items():
        np.testing.assert_array_equal(found.jagged(name).values, wanted)
        assert found.jagged(name).lengths.tolist() == [2, 1, 3, 1]
    assert models["teacher.math"].places == ["device", "host"]


def test_columns_of_several_teachers_reach_who_joins_them(monkeypatch):
    """Those with a slash would be for some pipeline ranks only."""
    sent: list[str] = []

    def seen(group: Any, function: Any, batch: Batch, *args: Any) -> tuple[Batch, Any]:
        sent.extend(batch.names)
        return with_near(group, function, batch, *args)

    monkeypatch.setattr("mcore_rl.trainers.scoring.with_near", seen)
    models = {"teacher.math": Scorer(-1), "teacher.code": Scorer(-2)}
    config = config_of("", "sampled_kl")
    with_teachers(answered(), turns_of(config, **models), config)
    assert len(sent) > 6 and not any(map(is_of_part, sent))


@pytest.mark.parametrize("names", [["math", "code"], ["code", "math"], ["code", "code"]])
def test_a_prompt_with_a_teacher_of_its_own_has_no_other(names):
    config = config_of("subject", "sampled_kl")
    models = {"teacher.math": Scorer(-1), "teacher.code": Scorer(-2)}
    batch = with_teacher_names(answered(), asked(names), "subject")
    found = with_teachers(batch, turns_of(config, **models), config)
    of = {"math": (-0.5, 0.5), "code": (-1.0, 2.0)}
    chosen = [names[1]] * 3 + [names[0]] * 4  # by token: groups 5, then 6
    wanted = [[of[name][0] * id_] for id_, name in enumerate(chosen, 1)]
    np.testing.assert_array_equal(found.jagged("teacher_log_probs").values, wanted)
    shares = [[of[name][1]] for name in chosen]
    np.testing.assert_array_equal(found.jagged("teacher_shares").values, shares)
    assert "teacher_ids" not in found


def test_a_score_is_added_by_weight_but_not_where_a_reward_failed():
    config = RLConfig()
    config.reward_model.model_path, config.reward_model.weight = "rm", 0.5
    model = Scorer(0.25)
    found = with_model_rewards(answered(), turns_of(config, reward_model=model), config)
    scores = np.array([13, 13, 35, np.nan]) * 0.25
    np.testing.assert_array_equal(found.array("reward/model"), scores)
    rewards = np.array([1, 0, 0.5]) + 0.5 * scores[:3]
    np.testing.assert_array_equal(found.array("rewards"), [*rewards, 0])
    assert found.array("rewards").dtype == np.float32
