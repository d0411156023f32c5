"""Tables of samples, and the samples that are shown."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as TokenizerFile
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mcore_rl.config.schema import SampleLogConfig
from mcore_rl.data.batch import Batch
from mcore_rl.trainers.sample_log import SampleLog
from tests.unit.trainers.test_evaluation import Tokenizer, build_sample


def test_a_table_of_a_step_has_the_mean_advantage_of_each_sample(tmp_path, capsys):
    batch = Batch.collate([build_sample(0, 1.0, tidy=0.5), build_sample(1, 0.0, tidy=0.0)])
    advantages = batch.jagged("rollout_log_probs").with_values(np.array([1, 3, -2, -2], np.float32))
    batch = batch.with_columns(advantages=advantages)
    log = SampleLog(tmp_path, Tokenizer(), SampleLogConfig(every=2, max_rows=1, tokens=False))
    log.write_step(1, batch)
    log.write_step(2, batch)
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
    long = build_sample(0, 1.0)
    long.prompt_ids = [7] * length
    log = SampleLog(tmp_path, Tokenizer(), SampleLogConfig(every=0, tokens=False))
    log.write_step(1, Batch.collate([long]))
    prompt = capsys.readouterr().out.removeprefix("step 1: sample, reward 1.000  ")
    prompt = prompt.removesuffix(" -> 1 2\n")
    assert prompt == (shown or "... " + "7 " * 26 + "7") and len(prompt) <= 58


def test_a_table_with_tokens_has_the_tokenizer_beside_it_and_log_probs_of_the_trainer(tmp_path):
    words = {"a": 7, "b": 1, "c": 2}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TokenizerFile(WordLevel(words)))
    batch = Batch.collate([build_sample(0, 1.0)])
    batch = batch.with_columns(advantages=batch["rollout_log_probs"])
    log_probs = batch.jagged("rollout_log_probs").with_values(np.array([-0.5, 0], np.float32))
    log = SampleLog(tmp_path, tokenizer, SampleLogConfig(num_shown=0))
    log.write_step(1, batch.with_columns(log_probs=log_probs))
    log.write_step(2, batch.with_columns(log_probs=batch["rollout_log_probs"]))  # the servers'
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

    log = SampleLog(tmp_path, Slow(), SampleLogConfig(num_shown=0))
    assert "sample_log.tokens: the tokenizer makes no tokenizer.json" in capsys.readouterr().err
    log.write_evaluation(0, "a", Batch.collate([build_sample(0, 1.0)]))
    [row] = pq.read_table(tmp_path / "evaluations/step_000000/a.parquet").to_pylist()
    assert row["response"] == "1 2" and "response_ids" not in row
