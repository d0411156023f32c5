"""What `mcore-rl eval` tells of its data sets, and of responses without a reward."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.eval_schema import EvalConfig, ScoringConfig, as_run, resolve_eval
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.data.prompt_batches import held_out_batch
from mcore_rl.data.sample import Sample
from mcore_rl.jobs.eval_report import SetSamples
from mcore_rl.jobs.evaluate import _tell_of_short_sets


def test_a_set_with_fewer_rows_than_were_asked_for_is_told(capsys):
    sets = {name: PromptDataset([PromptRow([1], {})] * size) for name, size in (("a", 3), ("b", 5))}
    config = EvalConfig()
    for asked in (0, 3):
        config.data.num_prompts = asked
        _tell_of_short_sets(config, sets)
    assert capsys.readouterr().err == ""
    config.data.num_prompts = 5
    _tell_of_short_sets(config, sets)
    told = "mcore-rl: warning: data.num_prompts=5: data.sets.a has 3 rows, and all are taken\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("load_format", ["auto", "checkpoint", "dummy"])
def test_servers_that_nobody_sends_weights_read_them(load_format):
    config = EvalConfig()
    config.model.path, config.output_dir, config.data.sets = "m", "out", {"a": "a.jsonl"}
    config.rollout.load_format = load_format
    if load_format != "dummy":
        return resolve_eval(config)
    with pytest.raises(ConfigError, match=r"rollout.load_format='dummy': an evaluation has no tr"):
        resolve_eval(config)


def test_an_evaluation_whose_batches_are_too_small_for_a_prompt_is_refused_on_a_cpu():
    config = EvalConfig()
    config.rollout.max_num_batched_tokens = 64
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=64: the CPU lane"):
        as_run(config, "cpu", "m", "")
    as_run(config, "cuda", "m", "")


class Tokenizer:
    eos_token_id = 1

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


def test_a_set_whose_rewards_have_all_failed_has_no_correct_response():
    """Then the term that says what is correct has no column."""
    prompts = held_out_batch(PromptDataset([PromptRow([7], {"answer": "7"})]), 1)
    group = int(prompts.array("group_ids")[0])
    failed = Sample([7], [1], [1], [0.0], [0], "stop", group, reward_error="late")
    samples = Batch.of([failed, failed])
    found = SetSamples.of(prompts, samples, Tokenizer(), None, ScoringConfig(term="right"))
    assert found.columns["correct"] == [False, False]
    parts = samples.with_columns(**{"reward/right": np.array([np.nan, 1.0], np.float32)})
    parts = parts.with_columns(reward_errors=np.array(["late", ""]))
    found = SetSamples.of(prompts, parts, Tokenizer(), None, ScoringConfig(term="right"))
    assert found.columns["correct"] == [False, True]
