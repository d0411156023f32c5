"""Evaluation: its data sets, samples and metrics, and evaluations that are resumed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_train import build_server_config, validate_eval
from mcore_rl.config.schema import EvalConfig, SamplingConfig, ScoringConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.data.prompt_batches import build_held_out_batch
from mcore_rl.data.sample import Sample
from mcore_rl.jobs import evaluate
from mcore_rl.jobs.evaluate import (
    SetSamples,
    _warn_about_short_sets,
    build_settings,
    check_content,
    compute_metrics,
    read_done_sets,
)
from mcore_rl.jobs.output import STARTED, lock_run_dir, write_json
from mcore_rl.jobs.run_plan import plan_evaluation
from mcore_rl.observability.console import StepProgress
from mcore_rl.rewards.registry import get_answer_finder


def test_sets_with_fewer_rows_than_num_prompts_are_warned_about(capsys):
    sets = {name: PromptDataset([PromptRow([1], {})] * size) for name, size in (("a", 3), ("b", 5))}
    config = EvalConfig()
    for num_prompts in (0, 3):
        config.data.num_prompts = num_prompts
        _warn_about_short_sets(config, sets)
    assert capsys.readouterr().err == ""
    config.data.num_prompts = 5
    _warn_about_short_sets(config, sets)
    message = "mcore-rl: warning: data.num_prompts=5: data.sets.a has 3 rows, and all are taken\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("load_format", ["auto", "checkpoint", "dummy"])
def test_dummy_weights_are_refused_without_a_trainer(load_format):
    config = EvalConfig()
    config.model.path, config.output_dir, config.data.sets = "m", "out", {"a": "a.jsonl"}
    config.rollout.load_format = load_format
    if load_format != "dummy":
        return validate_eval(config)
    with pytest.raises(ConfigError, match=r"rollout.load_format='dummy': an evaluation has no tr"):
        validate_eval(config)


def test_an_evaluation_whose_batches_are_too_small_for_a_prompt_is_refused_on_a_cpu():
    config = EvalConfig()
    config.rollout.max_num_batched_tokens = 64
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=64: vLLM on a CPU"):
        build_server_config(config, "cpu", "m", "")
    build_server_config(config, "cuda", "m", "")


class Tokenizer:
    eos_token_id = 1

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


def test_a_set_whose_rewards_have_all_failed_has_no_correct_response():
    """Then the term that says what is correct has no column."""
    prompts = build_held_out_batch(PromptDataset([PromptRow([7], {"answer": "7"})]), 1)
    group = int(prompts.array("group_ids")[0])
    failed = Sample([7], [1], [1], [0.0], [0], "stop", group, reward_error="late")
    samples = Batch.collate([failed, failed])
    set_samples = SetSamples.build(prompts, samples, Tokenizer(), None, ScoringConfig(term="right"))
    assert set_samples.columns["correct"] == [False, False]
    parts = samples.with_columns(**{"reward/right": np.array([np.nan, 1.0], np.float32)})
    parts = parts.with_columns(reward_errors=np.array(["late", ""]))
    set_samples = SetSamples.build(prompts, parts, Tokenizer(), None, ScoringConfig(term="right"))
    assert set_samples.columns["correct"] == [False, True]


class EndTokenizer:
    def decode(self, token_ids):
        return "".join({0: "<end>"}.get(token, f"{token}.") for token in token_ids)


def responses(*answers: tuple[list[int], str], stop=()) -> list[str]:
    prompt = Batch.collate([Sample([5], [1], [1], [0.0], [0], "stop", 0)]).select("prompt_ids")
    prompt = prompt.with_columns(
        group_ids=np.array([0]),
        rows=np.array([0]),
        fields=Jagged.pack_texts([json.dumps({"answer": "1"})]),
    )
    made = [
        Sample([5], ids, [1] * len(ids), [0.0] * len(ids), [0] * len(ids), end, 0)
        for ids, end in answers
    ]
    samples = SetSamples.build(
        prompt, Batch.collate(made), EndTokenizer(), None, ScoringConfig(), stop
    )
    return samples.columns["response"]


def test_a_response_is_shown_without_the_token_that_ends_it():
    assert responses(([1, 2, 0], "stop"), ([1, 2], "length")) == ["1.2.", "1.2."]


def test_of_a_response_that_a_stop_string_ends_all_is_text():
    assert responses(([1, 2], "stop"), ([1, 0], "stop"), stop=["2."]) == ["1.2.", "1."]


class CharacterTokenizer:
    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


@pytest.mark.parametrize(("text", "answers"), [("answer", ["C", None]), ("response", ["A", "A"])])
def test_votes_are_for_the_answers_that_the_reward_reads(text, answers):
    prompt = [*map(ord, "A or C? <think>")]
    prompts = build_held_out_batch(PromptDataset([PromptRow(prompt, {"answer": "C"})]), 1)
    group = int(prompts.array("group_ids")[0])
    samples = []
    for response in ("answer: A?</think>C", "answer: A"):  # the second was cut off
        ids = [*map(ord, response)]
        nulls = [0] * len(ids)
        samples.append(Sample(prompt, ids, nulls, [0.0] * len(ids), nulls, "length", group))
    table = SetSamples.build(
        prompts,
        Batch.collate(samples),
        CharacterTokenizer(),
        get_answer_finder("reward", "choice", {}),
        ScoringConfig(),
        reward_text=text,
    )
    assert table.columns["extracted_answer"] == answers
    assert table.columns["response"] == ["answer: A?</think>C", "answer: A"]


N, PROMPTS = 2, 3


class JoiningTokenizer:
    def decode(self, token_ids):
        return " ".join(map(str, token_ids))


class Pool:
    """Answers group by group; the first response to each prompt is right."""

    def generate(self, prompts, n, on_samples):
        made = [
            Batch.collate([replace(sample(int(group)), reward=float(not i)) for i in range(n)])
            for group in prompts.array("group_ids")
        ]
        for batch in made:
            on_samples([batch])
        return Batch.concat(made)


class Rows(list):
    """Rows of a file, with its digest."""

    def __init__(self, rows: list, digest: str):
        super().__init__(rows)
        self.digest = digest


def sample(group: int) -> Sample:
    return Sample([5], [1, 2], [1, 1], [0.0, 0.0], [0, 0], "length", group)


def inputs(digests: str = "ab", **changes) -> evaluate.EvaluationInputs:
    config = EvalConfig(rollout=SamplingConfig(n=N), **changes)
    config.model.path = "model"
    rows = [PromptRow([1, row], {"answer": "1"}) for row in range(PROMPTS)]
    sets = {name: PromptDataset(Rows(rows, d)) for name, d in zip("ab", digests, strict=True)}
    config.data.sets = {name: f"{name}.jsonl" for name in sets}
    run = build_server_config(config, "cpu", "model/checkpoint", "2024-07-26")
    return evaluate.EvaluationInputs(
        config, run, plan_evaluation(run), JoiningTokenizer(), sets, lambda text, end: text
    )


def begun(folder: Path, *names: str) -> dict:
    """Write the folder of an evaluation that ended after these sets; return their metrics."""
    made = inputs()
    (folder / "samples").mkdir()
    write_json(folder / STARTED, build_settings(made.config, made.run, made.digests))
    return {name: evaluate._evaluate_set(name, made, Pool(), folder / "samples") for name in names}


def done(folder: Path, made: evaluate.EvaluationInputs) -> dict:
    sizes = dict.fromkeys(made.sets, PROMPTS)
    return read_done_sets(made.config, made.run, folder, sizes, made.digests)


def test_sets_that_are_done_have_the_numbers_that_they_had(tmp_path):
    metrics = begun(tmp_path, "a")
    again = done(tmp_path, inputs())
    assert {name: compute_metrics(samples, [1, 2]) for name, samples in again.items()} == metrics
    assert metrics["a"]["pass@1"]["mean"] == 0.5 and metrics["a"]["majority@1"]["mean"] == 0.5


def test_a_new_folder_has_none(tmp_path):
    assert done(tmp_path, inputs()) == {}


@pytest.mark.parametrize("fault", ["cut short", "fewer rows"])
def test_a_set_that_is_not_whole_is_sampled_again(tmp_path, capsys, fault):
    begun(tmp_path, "a", "b")
    file = tmp_path / "samples" / "a.parquet"
    made = inputs()
    if fault == "cut short":
        file.write_bytes(file.read_bytes()[:-10])
    else:
        made.sets["a"] = PromptDataset([PromptRow([1, 0], {"answer": "1"})])
        evaluate._evaluate_set("a", made, Pool(), file.parent)
    assert list(done(tmp_path, inputs())) == ["b"]
    assert ("sampled again" in capsys.readouterr().err) == (fault == "cut short")


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("seed", 7, "seed=7, there 0"),
        ("run", "model/hf/step_000010", "evaluated.model='model/hf/step_000010', there 'model/"),
        ("model.chat_date", "2025-03-09", "model.chat_date='2025-03-09', there ''"),
        ("data.sets", {"a": "other.jsonl"}, "data.sets.a='other.jsonl', there 'a.jsonl'"),
        ("scoring.correct_from", 0.5, "scoring.correct_from=0.5, there 1.0"),
    ],
)
def test_a_folder_of_another_evaluation_is_refused_by_what_differs(
    tmp_path, setting, value, message
):
    begun(tmp_path, "a")
    made = inputs()
    if setting == "run":
        made.run.model.path = value
    else:
        *parts, name = setting.split(".")
        holder = made.config
        for part in parts:
            holder = getattr(holder, part)
        setattr(holder, name, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        done(tmp_path, made)


def test_a_folder_of_an_evaluation_of_other_rows_behind_the_same_path_is_refused(tmp_path):
    begun(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"evaluated\.rows\.b='c', there 'b'; allowed: the same"):
        done(tmp_path, inputs("ac"))


def test_what_changes_no_response_may_differ(tmp_path):
    begun(tmp_path, "a")
    made = inputs()
    made.config.scoring.ks, made.config.rollout.num_servers = [2], 4
    made.config.data.sets["new"] = "new.jsonl"
    made.config.timeouts.call_s, made.config.resume = 1.0, "auto"
    assert list(done(tmp_path, made)) == ["a"]


def test_who_asks_for_a_new_evaluation_gets_none_in_the_folder_of_another(tmp_path):
    begun(tmp_path, "a")
    with (
        pytest.raises(ConfigError, match="or resume=auto to go on with the evaluation in it"),
        lock_run_dir(str(tmp_path), "never", check_content),
    ):
        pass
    with lock_run_dir(str(tmp_path), "auto", check_content):
        pass
    assert (tmp_path / "samples" / "a.parquet").exists()


def test_the_folder_of_something_else_is_refused(tmp_path):
    write_json(tmp_path / STARTED, {"seed": 0})  # of a run
    with (
        pytest.raises(ConfigError, match="holds no evaluation; allowed: a new folder"),
        lock_run_dir(str(tmp_path), "auto", check_content),
    ):
        pass


def test_the_bar_follows_responses_as_they_come(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(StepProgress, "draw", lambda self, num, report: drawn.append((num, report)))
    begun(tmp_path, "a")
    assert [num for num, _ in drawn] == [N * (i + 1) for i in range(PROMPTS)]
    assert all(re.fullmatch(r"reward 0\.500  [\d,]+ tok/s", report) for _, report in drawn)


def test_samples_keep_parts_of_rewards_that_are_missing(tmp_path):
    made = inputs()
    (tmp_path / "samples").mkdir()

    class Parts(Pool):
        def generate(self, prompts, n, on_samples):
            batch = super().generate(prompts, n, on_samples)
            parts = np.where(np.arange(len(batch)) % 2, np.nan, 1.0)
            return batch.with_columns(**{"reward/form": parts})

    metrics = evaluate._evaluate_set("a", made, Parts(), tmp_path / "samples")
    write_json(tmp_path / STARTED, build_settings(made.config, made.run, made.digests))
    assert compute_metrics(done(tmp_path, made)["a"], [1, 2]) == metrics
