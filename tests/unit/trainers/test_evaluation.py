"""What is told of held-out prompts, and the tables of samples."""

import math

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as TokenizerFile
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mcore_rl.config.schema import EvaluationConfig, RewardConfig, RLConfig, SampleLogConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.datasets import PromptRow as Row
from mcore_rl.data.sample import Sample
from mcore_rl.trainers import steps
from mcore_rl.trainers.evaluation import Evaluation, held_out, scores, standard_error
from mcore_rl.trainers.sample_log import SampleTables


def sample(group: int, reward: float, *, ids=(1, 2), finish: str = "stop", **parts) -> Sample:
    n = len(ids)
    zeros = [0.0] * n
    return Sample(
        [7], list(ids), [1] * n, zeros, [0] * n, finish, group, reward, reward_parts=parts
    )


def failed(group: int) -> Sample:
    one = sample(group, 0.0)
    one.reward_error = "raised"
    return one


class Tokenizer:
    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


def test_the_error_with_one_sample_a_prompt_is_that_of_the_mean():
    values = np.random.default_rng(0).random(50)
    wanted = values.std(ddof=1) / math.sqrt(50)
    assert standard_error(values, np.arange(50)) == pytest.approx(wanted, rel=1e-12)


def test_the_error_of_equal_clusters_is_that_of_their_means_and_of_unequal_ones_as_in_the_paper():
    rng = np.random.default_rng(0)
    values, groups = rng.random(60), np.repeat(np.arange(15), 4)
    means = values.reshape(15, 4).mean(axis=1)
    wanted = means.std(ddof=1) / math.sqrt(15)
    assert standard_error(values, groups) == pytest.approx(wanted, rel=1e-12)
    for _ in range(100):
        groups = rng.integers(0, 9, 60)
        total, mean, names = 0.0, sum(values) / 60, sorted(set(groups.tolist()))
        for one in range(60):  # the sum over all pairs of a cluster
            for other in range(60):
                if groups[one] == groups[other]:
                    total += (values[one] - mean) * (values[other] - mean)
        wanted = math.sqrt(len(names) / (len(names) - 1) * total) / 60
        assert standard_error(values, groups) == pytest.approx(wanted, rel=1e-9)
    assert standard_error(values, np.zeros(60, int)) == 0


def test_an_accuracy_is_named_where_the_reward_is_one():
    batch = Batch.of([sample(0, 1.0), sample(0, 0.0), sample(1, 0.5, finish="length")])
    found = scores(batch, RewardConfig(name="final_number"))
    assert found["accuracy"] == found["reward"] == 0.5
    assert found["truncated"] == pytest.approx(1 / 3)
    assert "accuracy" not in scores(batch, RewardConfig(name="own.py:partial_credit"))
    terms = {"right": {"name": "math"}, "brief": {"name": "overlong"}}
    batch = Batch.of([sample(0, 0.9, right=1.0, brief=-0.1), sample(1, 0.0, right=0.0, brief=0.0)])
    found = scores(batch, RewardConfig(terms=terms))
    assert found["accuracy/right"] == 0.5 and "accuracy" not in found
    assert found["reward/brief"] == pytest.approx(-0.05)


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_a_failed_reward_counts_as_0_whatever_training_does_with_it(tmp_path, on_error):
    """1 of 4 is right and 2 have no reward: the accuracy is 1 / 4, and of a set of errors 0."""
    config = RLConfig(reward=RewardConfig(name="final_number", on_error=on_error))
    prompts = held_out({"a": PromptDataset([Row([1], {})]), "b": PromptDataset([Row([1], {})])}, 0)

    class Pool:
        def evaluate(self, prompts, evaluation):
            of_a = [sample(-1, 1.0), sample(-1, 0.0), failed(-1), failed(-1)]
            return Batch.of(of_a if prompts.array("group_ids")[0] == -1 else [failed(-2)])

    tables = SampleTables(tmp_path, Tokenizer(), SampleLogConfig(tokens=False))
    metrics = Evaluation(config, Pool(), prompts, tables, lambda *_: None).run(0)
    assert metrics["eval/a/accuracy"] == 0.25 and metrics["eval/a/reward_errors"] == 0.5
    assert metrics["eval/b/accuracy"] == 0 and metrics["eval/b/reward_errors"] == 1


def test_a_failed_reward_is_not_right_in_the_accuracy_of_a_term():
    config = RewardConfig(terms={"right": {"name": "math"}})
    found = scores(Batch.of([sample(0, 1.0, right=1.0), failed(0)]), config)
    assert found["accuracy/right"] == found["reward"] == 0.5 and found["reward/right"] == 1
    assert scores(Batch.of([failed(0)]), config)["accuracy/right"] == 0


def test_sets_are_evaluated_when_they_are_due_and_saved_with_ids_of_their_own(tmp_path):
    config = RLConfig(evaluation=EvaluationConfig(every=2, num_samples=2))
    config.trainer.num_steps = 5
    tests = {name: PromptDataset([Row([1], {})] * size) for name, size in (("a", 3), ("b", 2))}
    sets, recorded = held_out(tests, 0), {}
    assert [batch.array("group_ids").tolist() for batch in sets.values()] == [
        [-1, -2, -3],
        [-4, -5],
    ]

    class Pool:
        def evaluate(self, prompts, evaluation):
            ids = np.repeat(prompts.array("group_ids"), evaluation.num_samples)
            return Batch.of([sample(int(group), float(group == -1)) for group in ids])

    tables = SampleTables(tmp_path, Tokenizer(), SampleLogConfig(tokens=False))
    made = Evaluation(config, Pool(), sets, tables, recorded.__setitem__)
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
    for name, value, own in (("top_k", 4, 0), ("top_p", 0.9, 1.0)):
        usual = getattr(config.rollout, name)
        setattr(config.rollout, name, value)
        assert evaluation.temperature is None
        setattr(config.evaluation, name, own)
        assert evaluation.temperature == config.rollout.temperature
        setattr(config.rollout, name, usual)


def test_a_table_of_a_step_has_the_mean_advantage_of_each_sample(tmp_path, capsys):
    batch = Batch.of([sample(0, 1.0, tidy=0.5), sample(1, 0.0, tidy=0.0)])
    advantages = batch.jagged("rollout_log_probs").with_values(np.array([1, 3, -2, -2], np.float32))
    batch = batch.with_columns(advantages=advantages)
    tables = SampleTables(tmp_path, Tokenizer(), SampleLogConfig(every=2, max_rows=1, tokens=False))
    tables.of_step(1, batch)
    tables.of_step(2, batch)
    shown = [f"step {step}: sample, reward 1.000  7 -> 1 2" for step in (1, 2)]
    assert capsys.readouterr().out.splitlines() == shown
    [file] = tmp_path.iterdir()
    assert file.name == "samples"
    [row] = pq.read_table(file / "step_000002.parquet").to_pylist()
    assert row["advantage"] == 2 and row["reward/tidy"] == 0.5 and row["finish_reason"] == "stop"
    assert [path.name for path in file.iterdir()] == ["step_000002.parquet"]


@pytest.mark.parametrize(
    ("length", "shown"),
    [(3, "7 7 7"), (29, "7 " * 28 + "7"), (40, "... " + "7 " * 26 + "7"), (1000, None)],
)
def test_the_end_of_a_long_prompt_is_shown_from_a_word_on(tmp_path, capsys, length, shown):
    long = sample(0, 1.0)
    long.prompt_ids = [7] * length
    tables = SampleTables(tmp_path, Tokenizer(), SampleLogConfig(every=0, tokens=False))
    tables.of_step(1, Batch.of([long]))
    prompt = capsys.readouterr().out.removeprefix("step 1: sample, reward 1.000  ")
    prompt = prompt.removesuffix(" -> 1 2\n")
    assert prompt == (shown or "... " + "7 " * 26 + "7") and len(prompt) <= 58


def test_a_table_with_tokens_has_the_tokenizer_beside_it_and_log_probs_of_the_trainer(tmp_path):
    words = {"a": 7, "b": 1, "c": 2}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TokenizerFile(WordLevel(words)))
    batch = Batch.of([sample(0, 1.0)])
    batch = batch.with_columns(advantages=batch["rollout_log_probs"])
    own = batch.jagged("rollout_log_probs").with_values(np.array([-0.5, 0], np.float32))
    tables = SampleTables(tmp_path, tokenizer, SampleLogConfig(num_shown=0))
    tables.of_step(1, batch.with_columns(log_probs=own))
    tables.of_step(2, batch.with_columns(log_probs=batch["rollout_log_probs"]))  # the servers'
    first, second = (
        pq.read_table(tmp_path / f"samples/step_00000{step}.parquet").to_pylist()[0]
        for step in (1, 2)
    )
    assert first["response"] == "b c" and first["response_ids"] == [1, 2]
    assert first["log_probs"] == [-0.5, 0] and first["max_logprob_gap"] == 0.5
    assert "log_probs" not in second and "max_logprob_gap" not in second
    read = TokenizerFile.from_file(str(tmp_path / "samples/tokenizer.json"))
    assert read.decode([7, 1]) == "a b"


def test_a_tokenizer_that_no_file_holds_costs_the_tokens_and_not_the_run(tmp_path, capsys):
    class Slow(Tokenizer):
        is_fast = False

    tables = SampleTables(tmp_path, Slow(), SampleLogConfig(num_shown=0))
    assert "sample_log.tokens: the tokenizer makes no tokenizer.json" in capsys.readouterr().err
    tables.of_evaluation(0, "a", Batch.of([sample(0, 1.0)]))
    [row] = pq.read_table(tmp_path / "evaluations/step_000000/a.parquet").to_pylist()
    assert row["response"] == "1 2" and "response_ids" not in row


def test_a_batch_that_teaches_nothing_is_told():
    def doubts(samples, advantages):
        batch = Batch.of(samples)
        values = np.array(advantages, np.float32)
        column = batch.jagged("rollout_log_probs").with_values(values)
        return steps.doubts(batch.with_columns(advantages=column))

    good = [sample(0, 1.0), sample(0, 0.0)]
    assert doubts(good, [1, 1, -1, -1]) == {}
    [told] = doubts([sample(0, 1.0), sample(0, 1.0)], [0, 0, 0, 0]).values()
    assert told.startswith("all advantages are 0, with rewards from 1 to 1")
    empty = [sample(0, 1.0, ids=(9,)), sample(0, 0.0)]
    [told] = doubts(empty, [1, -1, -1]).values()
    assert told == "1 of 2 responses are empty"
