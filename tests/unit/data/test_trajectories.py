"""Trajectories of several samples: joined for statistics, and split again."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.algorithms.advantages import ADVANTAGES, compute_advantages
from mcore_rl.algorithms.sample_choice import choose_responses, filter_groups
from mcore_rl.config.schema import FilterConfig, RewardConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample
from mcore_rl.data.trajectories import Trajectories
from mcore_rl.trainers import evaluation, policy_checks, step_samples
from tests.unit.algorithms import advantage_oracles as oracles


def sample(group: int, trajectory: int, segment: int, ids: list[int], reward: float) -> Sample:
    return Sample(
        prompt_ids=[9] * (segment + 1),
        response_ids=ids,
        response_mask=[int(token > 0) for token in ids],
        rollout_log_probs=[-0.5] * len(ids),
        weight_versions=[3 if token > 0 else -1 for token in ids],
        finish_reason="length" if segment else "stop",
        group_id=group,
        trajectory=trajectory,
        segment=segment,
        reward=reward,
    )


# Two groups of two; the first trajectory of group 5 is three samples, one of them far away.
SAMPLES = [
    sample(5, 0, 1, [3, 0, 4], 1.0),
    sample(5, 1, 0, [6], 0.0),
    sample(2, 0, 0, [7, 8], 4.0),
    sample(5, 0, 0, [1, 2], 1.0),
    sample(2, 1, 0, [0, 9], 2.0),
    sample(5, 0, 2, [5], 1.0),
]


def test_a_joined_trajectory_has_the_tokens_of_its_segments_and_the_rest_of_the_last():
    joined = Trajectories(Batch.collate(SAMPLES)).join()
    rows = [row.tolist() for row in joined.jagged("response_ids")]
    assert rows == [[7, 8], [0, 9], [1, 2, 3, 0, 4, 5], [6]]
    assert joined.array("rewards").tolist() == [4, 2, 1, 0]
    assert joined.array("finish_reasons").tolist() == ["stop", "stop", "length", "stop"]
    assert "prompt_ids" not in joined


def test_a_column_of_the_joined_is_split_to_the_samples():
    batch = Batch.collate(SAMPLES)
    trajectories = Trajectories(batch)
    split = trajectories.split(trajectories.join().jagged("response_ids"))
    assert [row.tolist() for row in split] == [row.tolist() for row in batch.jagged("response_ids")]
    assert trajectories.find_rows(np.array([2])) == [0, 3, 5]


def test_a_batch_of_whole_trajectories_is_itself():
    batch = Batch.collate([item for item in SAMPLES if item.group_id == 2])
    assert Trajectories(batch).join() is batch


def cut(batch: Batch, rng: np.random.Generator) -> tuple[Batch, list[int]]:
    """Cut each response into up to three segments, shuffled; return also the row of each."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in batch.columns}
    rows, segments = [], []
    for row in range(len(batch)):
        length = int(batch.jagged("response_ids").lengths[row])
        cuts = sorted(rng.integers(0, length + 1, rng.integers(0, 3)).tolist())
        for segment, (start, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
            rows.append(row)
            segments.append(segment)
            for name, column in batch.columns.items():
                part = column[row][start:end] if isinstance(column, Jagged) else column[row]
                columns[name].append(part)
    result = {
        name: Jagged.pack(columns[name], column.values.dtype)
        if isinstance(column, Jagged)
        else np.array(columns[name])
        for name, column in batch.columns.items()
    }
    order = rng.permutation(len(rows)).tolist()
    numbers = {"trajectories": np.array(rows), "segments": np.array(segments)}
    return Batch({**result, **numbers}).take(order), [rows[i] for i in order]


@pytest.mark.parametrize(
    ("oracle", "settings"),
    [pytest.param(*p, id=f"{p[0].__name__}-{n}") for n, p in enumerate(oracles.CHECKED)],
)
def test_an_advantage_of_trajectories_does_not_depend_on_where_they_were_cut(oracle, settings):
    rng = np.random.default_rng(0)
    for _, batch in oracles.random_cases(nonnegative=oracle is oracles.maxrl)[:40]:
        batch = Batch({n: c for n, c in batch.columns.items() if n != "prompt_ids"})
        full = compute_advantages(batch, oracle.__name__, settings)
        parts, rows = cut(batch, rng)
        for name, column in compute_advantages(parts, oracle.__name__, settings).items():
            for row in range(len(batch)):
                segments = [i for i, of in enumerate(rows) if of == row]
                segments.sort(key=lambda i: parts.array("segments")[i])
                joined = np.concatenate([column[i] for i in segments])
                np.testing.assert_allclose(joined, full[name][row], 1e-5, 1e-6)


def test_filters_keep_and_drop_whole_trajectories():
    batch = Batch.collate(SAMPLES)
    same = Batch.collate([*SAMPLES, sample(8, 0, 0, [1], 1.0), sample(8, 0, 1, [2], 1.0)])
    selected = filter_groups(same, FilterConfig(group_filter="drop_uniform"))
    assert set(selected.array("group_ids").tolist()) == {2, 5} and len(selected) == len(SAMPLES)
    best = choose_responses(batch, FilterConfig(keep_responses=1, keep_by="best"), [0])
    assert [row.tolist() for row in best.jagged("response_ids")] == [
        [3, 0, 4], [7, 8], [1, 2], [5],
    ]  # fmt: skip


def test_metrics_count_a_trajectory_once():
    batch = Batch.collate(SAMPLES)
    assert step_samples.describe_samples(batch)["reward"] == 7 / 4
    assert step_samples.describe_samples(batch)["samples_per_trajectory"] == 6 / 4
    assert evaluation.compute_scores(batch, RewardConfig())["accuracy"] == 7 / 4


def test_versions_are_those_of_tokens_that_the_policy_chose():
    policy_checks.check_versions(Batch.collate(SAMPLES), 3)
    with pytest.raises(policy_checks.PolicyMismatchError, match=r"version \[3\]; expected 4"):
        policy_checks.check_versions(Batch.collate(SAMPLES), 4)


def test_every_advantage_is_cut():
    assert {oracle.__name__ for oracle, _ in oracles.CHECKED} == set(ADVANTAGES.names)
