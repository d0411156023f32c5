"""Evaluations of held-out prompts and examples: when they are due, and their metrics."""

import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.schema import (
    EvaluationConfig,
    HeldOutConfig,
    RewardConfig,
    RLConfig,
    SampleLogConfig,
    SFTConfig,
    StepsConfig,
)
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.datasets import PromptRow as Row
from mcore_rl.data.sample import Sample
from mcore_rl.observability.activity import ACTIVITY
from mcore_rl.trainers import supervised
from mcore_rl.trainers.evaluation import (
    Evaluation,
    SupervisedEvaluation,
    build_test_sets,
    compute_scores,
    compute_standard_error,
)
from mcore_rl.trainers.sample_log import SampleLog


def build_sample(group: int, reward: float, *, ids=(1, 2), finish: str = "stop", **parts) -> Sample:
    n = len(ids)
    zeros = [0.0] * n
    return Sample(
        [7], list(ids), [1] * n, zeros, [0] * n, finish, group, reward, reward_parts=parts
    )


def build_failed_sample(group: int) -> Sample:
    sample = build_sample(group, 0.0)
    sample.reward_error = "raised"
    return sample


class Tokenizer:
    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


def test_the_error_with_one_sample_a_prompt_is_that_of_the_mean():
    values = np.random.default_rng(0).random(50)
    expected = values.std(ddof=1) / math.sqrt(50)
    assert compute_standard_error(values, np.arange(50)) == pytest.approx(expected, rel=1e-12)


def test_the_error_of_equal_clusters_is_that_of_their_means_and_of_unequal_ones_as_in_the_paper():
    rng = np.random.default_rng(0)
    values, groups = rng.random(60), np.repeat(np.arange(15), 4)
    means = values.reshape(15, 4).mean(axis=1)
    expected = means.std(ddof=1) / math.sqrt(15)
    assert compute_standard_error(values, groups) == pytest.approx(expected, rel=1e-12)
    for _ in range(100):
        groups = rng.integers(0, 9, 60)
        total, mean, names = 0.0, sum(values) / 60, sorted(set(groups.tolist()))
        for row in range(60):  # the sum over all pairs of a cluster
            for other in range(60):
                if groups[row] == groups[other]:
                    total += (values[row] - mean) * (values[other] - mean)
        expected = math.sqrt(len(names) / (len(names) - 1) * total) / 60
        assert compute_standard_error(values, groups) == pytest.approx(expected, rel=1e-9)
    assert compute_standard_error(values, np.zeros(60, int)) == 0


def test_an_accuracy_is_named_where_the_reward_is_one():
    batch = Batch.collate(
        [build_sample(0, 1.0), build_sample(0, 0.0), build_sample(1, 0.5, finish="length")]
    )
    scores = compute_scores(batch, RewardConfig(name="final_number"))
    assert scores["accuracy"] == scores["reward"] == 0.5
    assert scores["truncated"] == pytest.approx(1 / 3)
    assert "accuracy" not in compute_scores(batch, RewardConfig(name="own.py:partial_credit"))
    terms = {"right": {"name": "math"}, "brief": {"name": "overlong"}}
    batch = Batch.collate(
        [build_sample(0, 0.9, right=1.0, brief=-0.1), build_sample(1, 0.0, right=0.0, brief=0.0)]
    )
    scores = compute_scores(batch, RewardConfig(terms=terms))
    assert scores["accuracy/right"] == 0.5 and "accuracy" not in scores
    assert scores["reward/brief"] == pytest.approx(-0.05)


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_a_failed_reward_counts_as_0_whatever_training_does_with_it(tmp_path, on_error):
    """1 of 4 is right and 2 have no reward: the accuracy is 1 / 4, and of a set of errors 0."""
    config = RLConfig(reward=RewardConfig(name="final_number", on_error=on_error))
    prompts = build_test_sets(
        {"a": PromptDataset([Row([1], {})]), "b": PromptDataset([Row([1], {})])}, 0
    )

    class Pool:
        def evaluate(self, prompts, evaluation):
            of_a = [
                build_sample(-1, 1.0),
                build_sample(-1, 0.0),
                build_failed_sample(-1),
                build_failed_sample(-1),
            ]
            return Batch.collate(
                of_a if prompts.array("group_ids")[0] == -1 else [build_failed_sample(-2)]
            )

    log = SampleLog(tmp_path, Tokenizer(), SampleLogConfig(tokens=False))
    metrics = Evaluation(config, Pool(), prompts, log, lambda *_: None).run(0)
    assert metrics["eval/a/accuracy"] == 0.25 and metrics["eval/a/reward_errors"] == 0.5
    assert metrics["eval/b/accuracy"] == 0 and metrics["eval/b/reward_errors"] == 1


def test_a_failed_reward_is_not_right_in_the_accuracy_of_a_term():
    config = RewardConfig(terms={"right": {"name": "math"}})
    scores = compute_scores(
        Batch.collate([build_sample(0, 1.0, right=1.0), build_failed_sample(0)]), config
    )
    assert scores["accuracy/right"] == scores["reward"] == 0.5 and scores["reward/right"] == 1
    assert compute_scores(Batch.collate([build_failed_sample(0)]), config)["accuracy/right"] == 0


def test_sets_are_evaluated_when_they_are_due_and_saved_with_ids_of_their_own(tmp_path):
    config = RLConfig(evaluation=EvaluationConfig(every=2, num_samples=2))
    config.trainer.num_steps = 5
    tests = {name: PromptDataset([Row([1], {})] * size) for name, size in (("a", 3), ("b", 2))}
    sets, recorded = build_test_sets(tests, 0), {}
    assert [batch.array("group_ids").tolist() for batch in sets.values()] == [
        [-1, -2, -3],
        [-4, -5],
    ]

    class Pool:
        def evaluate(self, prompts, evaluation):
            ids = np.repeat(prompts.array("group_ids"), evaluation.num_samples)
            return Batch.collate([build_sample(int(group), float(group == -1)) for group in ids])

    log = SampleLog(tmp_path, Tokenizer(), SampleLogConfig(tokens=False))
    made = Evaluation(config, Pool(), sets, log, recorded.__setitem__)
    assert [step for step in range(6) if made.is_due(step)] == [0, 2, 4, 5]
    metrics = made.run(0)
    made.run(2)
    assert metrics["eval/a/reward"] == pytest.approx(1 / 3) and metrics["eval/b/reward"] == 0
    assert recorded == {"before": {"a": recorded["before"]["a"], "b": recorded["before"]["b"]}}
    rows = pq.read_table(tmp_path / "evaluations/step_000000/a.parquet").to_pylist()
    assert [row["group"] for row in rows] == [-1, -1, -2, -2, -3, -3]
    assert rows[0]["prompt"] == "7" and rows[0]["response"] == "1 2" and rows[0]["reward"] == 1


def test_without_a_held_out_set_no_evaluation_is_due():
    config = RLConfig()
    evaluation = Evaluation(config, None, {}, None, None)
    assert not any(map(evaluation.is_due, (0, 1, config.trainer.num_steps)))


def test_a_trainer_scores_only_what_comes_of_the_whole_distribution():
    def temperature(**settings):
        config = RLConfig(evaluation=EvaluationConfig(**settings))
        return Evaluation(config, None, {}, None, None).temperature

    assert temperature() == 1.0 and temperature(temperature=0.5) == 0.5
    assert temperature(temperature=0.0) is None and temperature(top_p=0.9) is None
    assert temperature(top_k=4) is None


def test_an_evaluation_samples_as_training_does_where_it_has_no_setting_of_its_own():
    config = RLConfig()
    evaluation = Evaluation(config, None, {}, None, None)
    for name, value, explicit in (("top_k", 4, 0), ("top_p", 0.9, 1.0)):
        usual = getattr(config.rollout, name)
        setattr(config.rollout, name, value)
        assert evaluation.temperature is None
        setattr(config.evaluation, name, explicit)
        assert evaluation.temperature == config.rollout.temperature
        setattr(config.rollout, name, usual)


EXAMPLE = Sample([5], [1], [1], [0.0], [0], "stop", 0)


class Rows:
    def __init__(self, num: int) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num

    def take(self, rows):
        return Batch.collate([EXAMPLE] * len(rows))


class Objective:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.shown: list[str] = []

    def step(self, batch, clock):
        return {"loss": 1.0}

    def evaluate(self, batches):
        for batch in batches:
            self.sizes.append(len(batch))
            self.shown.append(str(ACTIVITY).partition(",")[0])
        return {"loss": float(len(self.sizes))}


def build_evaluation(objective, recorded=None, *, num_steps=5, **settings) -> SupervisedEvaluation:
    recorded = {} if recorded is None else recorded
    steps = StepsConfig(num_steps=num_steps, batch_size=2, eval_samples=3)
    config = SFTConfig(trainer=steps, evaluation=HeldOutConfig(**settings))
    return SupervisedEvaluation(
        config, objective, {"a": Rows(4), "b": Rows(2)}, recorded.__setitem__
    )


def test_an_evaluation_of_examples_is_due_before_training_every_so_many_steps_and_at_the_end():
    made = build_evaluation(Objective(), every=2)
    assert [step for step in range(6) if made.is_due(step)] == [0, 2, 4, 5]
    made = build_evaluation(Objective(), every=2, before=False)
    assert [step for step in range(6) if made.is_due(step)] == [2, 4, 5]
    nothing = SupervisedEvaluation(made.config, Objective(), {}, lambda when, metrics: None)
    assert not any(nothing.is_due(step) for step in range(6))


def test_a_loop_reports_held_out_losses_by_set_in_the_row_of_their_step():
    objective, recorded, rows = Objective(), {}, {}
    made = build_evaluation(objective, recorded, num_steps=2, every=1)
    batches = iter([Batch.collate([EXAMPLE])] * 2)
    supervised.train(objective, batches, 2, rows.__setitem__, None, made)
    assert rows[1]["eval/a/loss"] == 2 and rows[2]["eval/b/loss"] == 6
    assert rows[1]["time/evaluate_s"] >= 0
    assert recorded == {"after": {"a": {"loss": 5.0}, "b": {"loss": 6.0}}}
    assert objective.sizes == [2, 1, 2] * 2  # 3 of 4 rows and all of 2, a batch at a time
    assert objective.shown[:2] == [
        "step 1: evaluate 0/3 rows of a",
        "step 1: evaluate 2/3 rows of a",
    ]


@pytest.mark.parametrize(("step", "when"), [(0, "before"), (5, "after"), (2, None)])
def test_the_summary_has_losses_of_before_and_after(step, when):
    recorded = {}
    build_evaluation(Objective(), recorded).run(step)
    assert list(recorded) == ([when] if when else [])
