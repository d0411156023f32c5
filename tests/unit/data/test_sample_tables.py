"""Tables of samples: which trajectories they have, what of a batch, and which of a run's stay."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from mcore_rl.data.batch import Batch
from mcore_rl.data.sample import Sample, TurnSpan
from mcore_rl.data.sample_tables import (
    build_summary_columns,
    build_token_columns,
    drop_server_log_probs,
    get_table_path,
    list_tables,
    resume_tables,
    select_first_trajectories,
    write_table,
)


def sample(group: int, trajectory: int = 0, segment: int = 0, ids=(1, 2), **fields) -> Sample:
    columns = {"response_mask": [1] * len(ids), "rollout_log_probs": [-1.0] * len(ids)} | fields
    return Sample(
        prompt_ids=[7, 8],
        response_ids=[*ids],
        weight_versions=[3 if mask else -1 for mask in columns["response_mask"]],
        finish_reason="stop",
        group_id=group,
        trajectory=trajectory,
        segment=segment,
        **columns,
    )


def with_log_probs(batch: Batch, values: list[float]) -> Batch:
    column = batch.jagged("rollout_log_probs").with_values(np.array(values, np.float32))
    return batch.with_columns(log_probs=column)


# (group, trajectory, segment) of four tokens each; the first trajectory is in two places.
APART = [(5, 0, 1), (5, 1, 0), (5, 0, 0), (2, 0, 0)]


@pytest.mark.parametrize(
    ("max_samples", "max_tokens", "rows"),
    [
        (0, 0, [0, 1, 2, 3]),
        (4, 16, [0, 1, 2, 3]),
        (3, 0, [0, 1, 2]),
        (2, 0, [0, 2]),
        (1, 0, [0, 2]),  # one at least, and whole
        (0, 15, [0, 1, 2]),
        (0, 11, [0, 2]),
        (0, 1, [0, 2]),
    ],
)
def test_a_bound_keeps_the_first_trajectories_and_cuts_none(max_samples, max_tokens, rows):
    batch = Batch.collate([sample(*keys) for keys in APART])
    assert select_first_trajectories(batch, max_samples, max_tokens) == rows


ROWS = [
    ({"answer": "42", "level": 5, "source": "math"}, "42", '{"level": 5, "source": "math"}'),
    ({"answer": ["é", 1]}, '["é", 1]', "{}"),
    ({"answer": "\ud83d", "tests": "x" * 5000}, "\\ud83d", None),
    ({}, "", "{}"),
]


@pytest.mark.parametrize("kind", ["here", "joined"])
def test_a_table_has_the_answer_and_the_other_columns_of_the_data_row(kind):
    samples = [sample(number, fields=fields) for number, (fields, *_) in enumerate(ROWS)]
    batch = Batch.collate(samples)
    if kind == "joined":  # with samples that have no row, as of an earlier version
        batch = Batch.concat([batch, Batch.collate([sample(9)])])
    result = {name: column.to_pylist() for name, column in build_summary_columns(batch).items()}
    assert result["answer"] == [row[1] for row in ROWS] + [""] * (kind == "joined")
    for text, (_, _, columns) in zip(result["columns"], ROWS, strict=False):
        assert text == columns or len(json.loads(text)["tests"]) == 4004
    assert result["columns"][-1] == "{}"


def test_a_table_tells_of_each_sample_and_of_each_token():
    spans = (TurnSpan("a", 0, 1), TurnSpan("b", 2, 4))
    mask, servers = [1, 0, 1, 1], [-1.0, 0.0, -2.0, -0.5]
    process = [0.0, 0.0, 0.0, 0.25]
    agent = sample(
        4, 1, ids=(1, 2, 3, 4), response_mask=mask, rollout_log_probs=servers, turn_spans=spans,
        status="truncated", process_rewards=process, role="guesser", reward=0.25,
    )  # fmt: skip
    batch = with_log_probs(Batch.collate([sample(4), agent]), [-1, -1, -1.5, 9, -2, -0.75])
    advantages = batch.jagged("log_probs").with_values(np.array([1, 3, 1, 9, 1, 4], np.float32))
    batch = batch.with_columns(advantages=advantages, replayed=np.array([0, 1], np.int8))
    result = {name: column.to_pylist() for name, column in build_summary_columns(batch).items()}
    assert result == {
        "group": [4, 4], "trajectory": [0, 1], "segment": [0, 0], "num_turns": [1, 2],
        "status": ["finished", "truncated"], "replayed": [False, True], "reward": [0, 0.25],
        "finish_reason": ["stop", "stop"], "num_tokens": [2, 4], "reward_error": ["", ""],
        "role": ["", "guesser"], "advantage": [2, 2], "max_logprob_gap": [0, 0.5],
    }  # fmt: skip
    result = {name: column.to_pylist()[1] for name, column in build_token_columns(batch).items()}
    assert result == {
        "prompt_ids": [7, 8], "response_ids": [1, 2, 3, 4], "response_mask": mask,
        "turn_numbers": [0, -1, 1, 1], "weight_versions": [3, -1, 3, 3],
        "log_probs": [-1.5, 9, -2, -0.75], "rollout_log_probs": servers,
        "token_advantages": [1, 9, 1, 4], "process_rewards": process,
    }  # fmt: skip


def test_a_response_without_a_chosen_token_has_no_gap_and_a_nan_gap_stays():
    none = sample(0, response_mask=[0, 0])
    batch = with_log_probs(Batch.collate([none, sample(1)]), [-5, -5, math.nan, -1])
    first, second = build_summary_columns(batch)["max_logprob_gap"].to_pylist()
    assert first is None and math.isnan(second)


def test_log_probs_of_the_servers_in_place_of_the_trainers_are_not_compared():
    batch = Batch.collate([sample(0)])
    same = batch.with_columns(log_probs=batch["rollout_log_probs"])
    assert "log_probs" not in drop_server_log_probs(same)
    trainer_batch = with_log_probs(batch, [-1, -1])  # equal, but the trainer's
    assert drop_server_log_probs(trainer_batch) is trainer_batch
    assert "max_logprob_gap" not in build_summary_columns(batch)
    assert "rollout_log_probs" not in build_token_columns(batch)


def test_what_is_written_is_read_again_and_log_probs_to_the_bit(tmp_path):
    rng = np.random.default_rng(0)
    batch = Batch.collate([sample(group, ids=range(group)) for group in range(100)])
    batch = with_log_probs(batch, rng.normal(size=len(batch.jagged("response_ids").values)))
    columns = build_summary_columns(batch) | build_token_columns(batch)
    path = get_table_path(tmp_path, 12)
    write_table(path, columns, 200)
    file = pq.ParquetFile(path)
    assert {name: file.read([name])[name].to_pylist() for name in columns} == {
        name: column.to_pylist() for name, column in columns.items()
    }
    assert file.metadata.num_row_groups == 2  # so that one trajectory is not all of the table
    assert [entry.name for entry in path.parent.iterdir()] == ["step_000012.parquet"]


def test_a_table_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch):
    path = get_table_path(tmp_path, 1, "math")
    write_table(path, build_summary_columns(Batch.collate([sample(0)])), 1)
    before = path.read_bytes()

    def full(table, where, **options):
        where.write_bytes(b"PAR1 and no more")
        raise OSError("no space left")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="no space"):
        write_table(path, build_summary_columns(Batch.collate([sample(1)])), 1)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["math.parquet"]


def tables(run, content: str, steps) -> None:
    for step in steps:
        for path in (get_table_path(run, step), get_table_path(run, step, "test")):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    (run / "samples" / "tokenizer.json").write_text("{}")
    (run / "samples" / ".step_000009.parquet.partial").touch()


def list_steps(run) -> list[list[int]]:
    return [list(list_tables(run, evaluation)) for evaluation in ("", "test")]


def test_a_run_that_goes_on_has_each_step_once_and_none_of_a_future_that_is_no_more(tmp_path):
    tables(tmp_path, "first", range(1, 6))
    resume_tables(tmp_path, 3, tmp_path)
    assert list_steps(tmp_path) == [[1, 2, 3], [1, 2, 3]]
    assert (tmp_path / "samples" / "tokenizer.json").exists()
    resume_tables(tmp_path, -1, tmp_path)  # it had saved no checkpoint and starts anew
    assert list_steps(tmp_path) == [[], []]


def test_a_run_that_goes_on_in_another_folder_has_the_steps_of_the_first(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    tables(first, "first", range(1, 5))
    (first / "images").mkdir()
    (first / "images" / "0a").write_bytes(b"image")
    for _ in range(2):  # it goes on, has saved nothing, and goes on again
        resume_tables(second, 2, first)
        assert list_steps(second) == [[1, 2], [1, 2]]
        assert (second / "samples" / "tokenizer.json").read_text() == "{}"
        assert (second / "images" / "0a").read_bytes() == b"image"
        write_table(get_table_path(second, 3), {}, 0)
    assert list_steps(first) == [[1, 2, 3, 4]] * 2
    write_table(get_table_path(second, 2), {}, 0)  # in place of one that both have
    assert get_table_path(first, 2).read_text() == "first"
    assert not list(second.rglob(".*"))
