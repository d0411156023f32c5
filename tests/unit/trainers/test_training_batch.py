"""Advantages, the weights of tokens in each loss, and metrics of an update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos

from mcore_rl.algorithms.aggregation import compute_loss_weights
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import (
    AlgorithmConfig,
    CorrectionConfig,
    DistillationConfig,
    FilterConfig,
    RewardConfig,
    TrainerConfig,
)
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample
from mcore_rl.trainers import evaluation
from mcore_rl.trainers.policy_checks import (
    PolicyMismatchError,
    check_gaps,
    compute_gaps_and_mismatch,
    compute_logprob_gaps,
)
from mcore_rl.trainers.step_samples import describe_samples
from mcore_rl.trainers.training_batch import (
    StepMetrics,
    add_advantages,
    add_corrections,
    add_loss_weights,
    add_prepared_columns,
    build_training_batch,
    compute_score_metrics,
    find_warnings,
    map_mini_batches,
    mask_truncated,
    merge_update_metrics,
    select_responses,
    split_mini_batches,
)
from tests.unit.data.test_trajectories import cut
from tests.unit.trainers.prepared_losses import PREPARED
from tests.unit.trainers.small_batches import build_rewarded_batch, build_scored_batch

SEED = [3, 1]
# Aggregations of this package, and their names in verl.
MODES = {
    "token_mean": "token-mean",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "sequence_sum_fixed_length": "seq-mean-token-sum-norm",
}
LENGTH = 9
WEIGHTS = (
    "loss_weights", "kl_weights", "entropy_weights", "distillation_weights",
    "cross_entropy_weights",
)  # fmt: skip


def build_large_batch() -> Batch:
    """Four groups of three responses, of which some are cut off."""
    rng = np.random.default_rng(0)
    ids = Jagged.pack([rng.integers(1, 9, n) for n in rng.integers(1, 6, 12)], np.int64)

    def column(values: object) -> Jagged:
        return ids.with_values(np.asarray(values, np.float32))

    num = len(ids.values)
    return Batch(
        {
            "group_ids": np.repeat(np.arange(4), 3),
            "response_ids": ids,
            "response_mask": ids.with_values(rng.integers(0, 4, num).clip(0, 1).astype(np.int8)),
            "log_probs": column(rng.normal(-1, 0.1, num)),
            "rollout_log_probs": column(rng.normal(-1, 0.1, num)),
            "entropy": column(rng.random(num)),
            "rewards": rng.integers(0, 2, 12).astype(np.float32),
            "finish_reasons": np.where(rng.random(12) < 0.3, "length", "stop"),
        }
    )


@pytest.mark.parametrize("which", ["kept", "generated"])
def test_a_training_batch_has_the_columns_that_its_parts_make_one_after_the_other(which: str):
    policy = FilterConfig(keep_responses=2, advantages_of=which, mask_truncated=True)
    correction = CorrectionConfig(level="token", weight_max=1.05)
    algorithm = AlgorithmConfig(
        num_mini_batches=3, filter=policy, correction=correction, top_entropy_share=0.8
    )
    batch = build_large_batch()
    advantages, selected, stats = build_training_batch(
        batch, algorithm, TrainerConfig(max_logprob_gap=9, mean_logprob_gap=9), 1, SEED
    )
    samples = add_advantages(batch, algorithm)
    assert advantages.names == ["advantages"]
    assert advantages.jagged("advantages").values.tolist() == pytest.approx(
        samples.jagged("advantages").values.tolist()
    )
    chosen = select_responses(samples, policy, SEED)
    assert len(chosen) == (8 if which == "generated" else 12)
    corrected, left_out = add_corrections(mask_truncated(chosen, policy), algorithm)
    trained = chosen.union(selected)
    assert {*selected.names} >= {"response_mask", "loss_weights", "correction_weights"}
    assert not {*selected.names} & {"response_ids", "advantages", "rewards", "group_ids"}
    parts = split_mini_batches(chosen, 3, SEED)
    assert len(stats.counts) == len(parts) == 3
    for rows, count in zip(parts, stats.counts, strict=True):
        expected, wanted_count = add_loss_weights(corrected.take(rows), algorithm)
        assert count == wanted_count
        for name in expected.names:
            columns = trained.take(rows)[name], expected[name]
            pair = [getattr(column, "values", column) for column in columns]
            np.testing.assert_array_equal(*pair, err_msg=name)
    assert any(count["loss_weights"] for count in stats.counts)
    gaps, apart = compute_gaps_and_mismatch(batch, correction)
    chosen_by_policy = batch.jagged("response_mask").values != 0
    entropy = batch.jagged("entropy").values[chosen_by_policy].mean(dtype=np.float64)
    assert stats.metrics == apart | left_out | {"actor/entropy": pytest.approx(entropy)}
    assert stats.gaps == gaps
    assert stats.warnings == find_warnings(samples)


def test_nothing_is_made_of_log_probs_that_are_too_far_from_the_servers():
    """Nor of what is no number, which advantages and corrections may refuse in words of theirs."""
    batch = build_large_batch()
    log_probs = batch.jagged("log_probs")
    wrong = log_probs.with_values(np.full(len(log_probs.values), np.nan, np.float32))
    algorithm = AlgorithmConfig(correction=CorrectionConfig(level="token"))
    close, wide = (TrainerConfig(max_logprob_gap=gap, mean_logprob_gap=gap) for gap in (0.01, 9.0))
    for made, trainer in ((batch, close), (batch.with_columns(log_probs=wrong), wide)):
        advantages, selected, stats = build_training_batch(made, algorithm, trainer, 1, SEED)
        assert advantages.names == selected.names == stats.counts == []
        with pytest.raises(
            PolicyMismatchError, match="step 1: max_logprob_gap of trainer and roll"
        ):
            check_gaps(stats.gaps, trainer, 1)


def test_with_staleness_only_samples_of_the_policy_itself_are_held_to_the_bounds():
    batch = build_large_batch()
    ids = batch.jagged("response_ids")
    versions = np.full(len(ids.values), 4)
    versions[ids.offsets[3] :] = 3
    gaps = {}
    for staleness, step in ((0, 5), (1, 5), (1, 4)):
        trainer = TrainerConfig(staleness=staleness, max_logprob_gap=9, mean_logprob_gap=9)
        made = batch.with_columns(weight_versions=ids.with_values(versions))
        gaps[staleness, step] = build_training_batch(made, AlgorithmConfig(), trainer, step, SEED)[
            2
        ].gaps
    assert gaps[0, 5] == compute_logprob_gaps(batch)
    assert gaps[1, 5] == compute_logprob_gaps(batch.take(range(3)))
    assert gaps[1, 4] == compute_logprob_gaps(batch.take(range(3, 12)))


@pytest.mark.parametrize("replayed", [[], [3, 4, 5]])
@pytest.mark.parametrize(("staleness", "step"), [(0, 5), (1, 5), (1, 4)])
def test_without_log_probs_a_mask_says_which_tokens_the_update_compares(staleness, step, replayed):
    """The tokens that a pass before the update compares, truncated samples included."""
    batch = build_large_batch()
    ids = batch.jagged("response_ids")
    versions = np.full(len(ids.values), 4)
    versions[ids.offsets[4] :] = 3
    is_replayed = np.zeros(12, np.int8)
    is_replayed[replayed] = 1
    batch = batch.with_columns(weight_versions=ids.with_values(versions), replayed=is_replayed)
    bounds = dict.fromkeys(("max_logprob_gap", "mean_logprob_gap"), 9.0)
    trainer = TrainerConfig(staleness=staleness, **bounds)
    algorithm = AlgorithmConfig(filter=FilterConfig(mask_truncated=True))
    with_pass = build_training_batch(batch, algorithm, trainer, step, SEED)
    before = batch.drop_columns("log_probs", "entropy")
    advantages, selected, stats = build_training_batch(before, algorithm, trainer, step, SEED)
    assert stats.gaps == stats.metrics == {} and stats.counts == with_pass[2].counts
    assert {*selected.names} == {*with_pass[1].names, "gap_mask"}
    compared = batch.with_columns(response_mask=selected["gap_mask"])
    assert compute_logprob_gaps(compared) == with_pass[2].gaps != {}
    samples = batch.union(advantages)
    metrics = compute_score_metrics(samples, algorithm, trainer, step)
    assert metrics == with_pass[2].gaps | with_pass[2].metrics


def test_advantages_are_those_of_the_group_on_every_token_of_the_response():
    scored = add_advantages(build_rewarded_batch(), AlgorithmConfig()).jagged("advantages")
    high = 0.5 / (np.sqrt(0.5) + 1e-6)
    expected = [[high] * 2, [-high], [0.0] * 3, [0.0], [0.0], [0.0]]
    assert [row.tolist() for row in scored] == [pytest.approx(row) for row in expected]


def test_an_advantage_with_a_critic_gives_the_returns_as_well():
    values = build_scored_batch().jagged("log_probs")
    known = build_rewarded_batch().with_columns(
        values=values, response_mask=values.with_values(values.values != 0)
    )
    scored = add_advantages(known, AlgorithmConfig(advantage="gae"))
    assert scored.jagged("returns").lengths.tolist() == values.lengths.tolist()
    assert "returns" not in add_advantages(build_rewarded_batch(), AlgorithmConfig())


def test_settings_of_the_advantage_count():
    algorithm = AlgorithmConfig(advantage_settings={"normalize_by_std": False})
    scored = add_advantages(build_rewarded_batch(), algorithm).jagged("advantages")
    assert scored[0].tolist() == [0.5, 0.5]


def test_a_truncated_response_has_no_loss_of_any_kind():
    """A token mean over the rest; the token that the policy did not choose keeps its own loss."""
    mask = np.array([1, 0, 1, 1, 0, 1, 1, 1, 1], np.int8)
    reasons = np.array(["stop", "stop", "length", "stop", "length", "stop"])
    made = build_rewarded_batch().with_columns(
        response_mask=build_scored_batch().jagged("log_probs").with_values(mask),
        finish_reasons=reasons,
    )
    settings = dict(cross_entropy_coef=2.0, entropy_coef=1.0, kl_coef=0.5)
    masked = mask_truncated(made, FilterConfig(mask_truncated=True))
    weighted, _ = add_loss_weights(masked, AlgorithmConfig(**settings))
    fourth = [0.25, 0, 0.25, 0, 0, 0, 0.25, 0, 0.25]
    assert weighted.jagged("loss_weights").values.tolist() == fourth
    assert weighted.jagged("entropy_weights").values.tolist() == fourth
    assert weighted.jagged("kl_weights").values.tolist() == [w / 2 for w in fourth]
    assert weighted.jagged("cross_entropy_weights").values.tolist() == [0, 2, *[0] * 7]
    assert mask_truncated(made, FilterConfig()) is made


def test_an_aborted_response_is_neither_cut_off_nor_at_its_end():
    """So it is trained on with mask_truncated, and its only token is no end of a turn."""
    reasons = np.array(["abort", "length", "abort", "abort", "abort", "abort"])
    made = build_rewarded_batch().with_columns(finish_reasons=reasons)
    masked = mask_truncated(made, FilterConfig(mask_truncated=True)).jagged("response_mask")
    assert [row.tolist() for row in masked] == [[1, 1], [0], [1, 1, 1], [1], [1], [1]]
    assert describe_samples(made)["truncated"] == pytest.approx(1 / 6)
    scored = add_advantages(made, AlgorithmConfig())
    assert find_warnings(scored) == {}
    ended = scored.with_columns(finish_reasons=np.array(["stop"] * 6))
    assert [*find_warnings(ended).values()] == ["4 of 6 responses are empty"]


@pytest.mark.parametrize(
    ("reasons", "num_trained"),
    [
        ({(0, 0): ["stop", "length"], (0, 1): ["stop"]}, {(0, 0): 0, (0, 1): 2}),
        # An earlier turn that was cut off is one like others.
        ({(0, 0): ["length", "stop"], (0, 1): ["length"]}, {(0, 0): 4, (0, 1): 0}),
        ({(0, 0): ["stop", "stop", "length"], (1, 0): ["stop", "stop"]}, {(0, 0): 0, (1, 0): 4}),
        # Of another trajectory of the group, and of the same number in another group.
        (
            {(0, 0): ["stop", "stop"], (0, 1): ["stop", "length"], (1, 1): ["stop", "stop"]},
            {(0, 0): 4, (0, 1): 0, (1, 1): 4},
        ),
    ],
)
def test_mask_truncated_masks_all_samples_of_a_trajectory_whose_last_turn_is_cut_off(
    reasons, num_trained
):
    samples = [
        Sample([7], [1, 2], [1, 1], [0.0] * 2, [0, 0], reason, group, trajectory=t, segment=i)
        for (group, t), of_segments in reasons.items()
        for i, reason in enumerate(of_segments)
    ]
    made = Batch.collate(samples[::-1])  # in any order
    masked = mask_truncated(made, FilterConfig(mask_truncated=True))
    num_tokens = dict.fromkeys(reasons, 0)
    rows = zip(masked.array("group_ids"), masked.array("trajectories"), strict=True)
    for key, mask in zip(rows, masked.jagged("response_mask"), strict=True):
        num_tokens[tuple(map(int, key))] += int(mask.sum())
    assert num_tokens == num_trained


@pytest.mark.parametrize("status", ["finished", "truncated", "aborted", "failed"])
def test_a_trajectory_that_a_limit_has_ended_is_masked_and_counted_as_truncated(status):
    # Its turns are complete: only the status says so. One of two segments, and another trajectory.
    ended = [
        Sample([7], [1, 2], [1, 1], [0.0] * 2, [0, 0], "stop", 0, segment=i, status=status)
        for i in range(2)
    ]
    other = Sample([7], [3], [1], [0.0], [0], "stop", 0, trajectory=1)
    made = Batch.collate([other, *ended])
    is_truncated = status in ("truncated", "aborted")
    masked = mask_truncated(made, FilterConfig(mask_truncated=True)).jagged("response_mask")
    expected = [0, 0] if is_truncated else [1, 1]
    assert [row.tolist() for row in masked] == [[1], expected, expected]
    share = 0.5 if is_truncated else 0.0
    assert describe_samples(made)["truncated"] == share
    assert evaluation.compute_scores(made, RewardConfig())["truncated"] == share


def test_an_aggregation_outside_of_the_package_weighs_tokens_by_its_settings(tmp_path):
    """A sum of losses over a fixed number of tokens, as Dr. GRPO has it (arXiv:2503.20783)."""
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n\n"
        "@dataclass(frozen=True)\nclass Settings:\n    num_tokens: int\n\n"
        "def fixed(counts, settings: Settings):\n"
        "    return counts * 0 + 1 / (len(counts) * settings.num_tokens)\n\n"
        "def total(counts):\n    return counts.sum()\n"
    )
    algorithm = AlgorithmConfig(
        loss_aggregation=f"{tmp_path}/own.py:fixed", loss_aggregation_settings={"num_tokens": 4}
    )
    weights = add_loss_weights(build_scored_batch(), algorithm)[0].jagged("loss_weights").values
    assert set(weights.tolist()) == {np.float32(1 / 24)}
    algorithm = AlgorithmConfig(loss_aggregation=f"{tmp_path}/own.py:total")
    with pytest.raises(ConfigError, match=r"own.py:total' returned 9.0 .* a finite weight for ea"):
        add_loss_weights(build_scored_batch(), algorithm)


def test_each_loss_has_weights_of_its_own_times_its_coefficient():
    mask = Jagged.pack([[1, 1, 0], [1], [1, 1]], np.int8)
    made = Batch(
        {
            "response_mask": mask,
            "policy_mask": mask.with_values(np.array([1, 1, 0, 1, 0, 0], np.int8)),
            "correction_weights": mask.with_values(np.array([2, 0, 0, 1, 1, 1], np.float32)),
            "top_entropy_mask": mask.with_values(np.array([1, 1, 0, 0, 1, 1], np.int8)),
        }
    )
    algorithm = AlgorithmConfig(kl_coef=0.5, entropy_coef=0.1, cross_entropy_coef=2.0)
    weighted, _ = add_loss_weights(made, algorithm)
    expected = {
        "loss_weights": [1 / 3, 0, 0, 0, 0, 0],  # a mean over three, of which two are masked
        "kl_weights": [0.1, 0.1, 0, 0.1, 0.1, 0.1],
        "entropy_weights": [0.02, 0.02, 0, 0.02, 0.02, 0.02],
        "cross_entropy_weights": [0, 0, 2, 0, 0, 0],
    }
    for name, weights in expected.items():
        assert weighted.jagged(name).values.tolist() == pytest.approx(weights, rel=1e-6), name
    masked = made.with_columns(cross_entropy_mask=mask)
    weights = add_loss_weights(masked, algorithm)[0].jagged("cross_entropy_weights").values
    assert weights.tolist() == pytest.approx([0.4, 0.4, 0, 0.4, 0.4, 0.4])
    weighted, _ = add_loss_weights(made, AlgorithmConfig(kl_coef=0.5, kl_placement="reward"))
    assert weighted.columns.keys() - made.columns.keys() == {"loss_weights"}


def build_algorithm(mode: str) -> AlgorithmConfig:
    """Return settings under which every loss has a weight."""
    return AlgorithmConfig(
        loss_aggregation=mode,
        loss_aggregation_settings={"length": LENGTH} if "fixed" in mode else {},
        kl_coef=0.5,
        entropy_coef=0.25,
        cross_entropy_coef=2.0,
        distillation=DistillationConfig(loss="forward_kl", coef=4.0, use_reward=True),
    )


def build_batch(lengths: list[int], **columns: list[int]) -> Batch:
    tokens = Jagged.pack([[1] * n for n in lengths], np.int8)
    return Batch(
        {
            "response_ids": tokens,
            "response_mask": tokens,
            **{name: np.array(column) for name, column in columns.items()},
        }
    )


def build_random_batch(rng: np.random.Generator) -> Batch:
    """One sample a trajectory, with a trained token of each kind."""
    rows = [rng.integers(0, 2, rng.integers(0, 9)) for _ in range(6)]
    mask = Jagged.pack([*rows, [0, 1]], np.int8)
    return Batch(
        {
            "response_ids": mask,
            "response_mask": mask,
            "policy_mask": mask.with_values(mask.values * (rng.random(len(mask.values)) < 0.8)),
            "group_ids": np.array([4, 1, 4, 1, 4, 1, 4]),
        }
    )


@pytest.mark.parametrize(
    ("mode", "of_token"),
    [
        ("token_mean", 1 / 24),
        ("sequence_mean_token_mean", 1 / 24),
        ("sequence_mean_token_sum", 1 / 2),
        ("sequence_sum_fixed_length", 1 / 18),
    ],
)
def test_a_trajectory_of_three_samples_weighs_as_much_as_one_of_one(mode: str, of_token: float):
    """Both have 12 tokens. The second trajectory of the group is the first of another."""
    cut_up = build_batch(
        [4, 12, 4, 4], group_ids=[7] * 4, trajectories=[1, 0, 1, 1], segments=[2, 0, 0, 1]
    )
    weighted, _ = add_loss_weights(cut_up, build_algorithm(mode))
    np.testing.assert_allclose(weighted.jagged("loss_weights").values, of_token, rtol=1e-6)
    separate = cut_up.with_columns(group_ids=np.array([7, 3, 7, 7]), trajectories=np.zeros(4, int))
    weighted, _ = add_loss_weights(separate, build_algorithm(mode))
    np.testing.assert_allclose(weighted.jagged("loss_weights").values, of_token, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_weights_do_not_depend_on_where_trajectories_were_cut(mode: str):
    """Bit for bit, of every loss."""
    rng, algorithm = np.random.default_rng(0), build_algorithm(mode)
    for _ in range(50):
        uncut, _ = add_loss_weights(build_random_batch(rng), algorithm)
        parts, rows = cut(uncut.drop_columns(*WEIGHTS), rng)
        weighted, _ = add_loss_weights(parts, algorithm)
        for name in WEIGHTS:
            for row in range(len(uncut)):
                pieces = [i for i, of in enumerate(rows) if of == row]
                pieces.sort(key=lambda i: parts.array("segments")[i])
                joined = np.concatenate([weighted.jagged(name)[i] for i in pieces])
                np.testing.assert_array_equal(joined, uncut.jagged(name)[row])


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_that_of_verl_on_the_joined_trajectories(mode: str):
    rng = np.random.default_rng(1)
    for _ in range(50):
        uncut = build_random_batch(rng).drop_columns("policy_mask")
        mask = uncut.jagged("response_mask")
        losses = mask.with_values(rng.normal(size=len(mask.values)))
        padded = torch.zeros(2, len(mask), int(mask.lengths.max()), dtype=torch.float64)
        for row, n in enumerate(mask.lengths):
            padded[0, row, :n] = torch.from_numpy(losses[row].copy())
            padded[1, row, :n] = torch.from_numpy(mask[row].copy())
        expected = core_algos.agg_loss(*padded, MODES[mode], loss_scale_factor=LENGTH)
        parts, _ = cut(uncut.with_columns(losses=losses), rng)
        weights = add_loss_weights(parts, build_algorithm(mode))[0].jagged("loss_weights")
        loss = weights.values @ parts.jagged("losses").values
        assert loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("segments", [[0, 0, 0], [1, 0, 2]])
def test_trajectories_of_one_sample_have_the_weights_that_samples_have(
    mode: str, segments: list[int]
):
    """Bit for bit, also where a trajectory has lost its first samples; so has a batch of none."""
    algorithm, lengths = build_algorithm(mode), [3, 7, 11]
    mask = build_batch(lengths).jagged("response_mask")
    expected = compute_loss_weights(mask, mode, algorithm.loss_aggregation_settings).values
    made = build_batch(lengths, group_ids=[2, 2, 0], trajectories=[1, 0, 0], segments=segments)
    for batch in (made, build_batch(lengths)):
        weighted, _ = add_loss_weights(batch, algorithm)
        np.testing.assert_array_equal(weighted.jagged("loss_weights").values, expected)


def test_a_sample_says_which_tokens_the_cross_entropy_is_of():
    """The other of two does not say, and has those that the policy did not choose."""
    mask, cross_entropy_mask = [1, 0, 1], [1, 1, 0]
    plain = Sample([7], [1, 2, 3], mask, [0.0] * 3, [0, -1, 0], "stop", 0)
    saying = replace(plain, cross_entropy_mask=cross_entropy_mask, finish_reason="length")
    algorithm = AlgorithmConfig(cross_entropy_coef=3.0)

    def weights(made: Batch) -> list[float]:
        weighted, _ = add_loss_weights(made, algorithm)
        return weighted.jagged("cross_entropy_weights").values.tolist()

    for made in (
        Batch.collate([saying, plain]),
        Batch.concat([Batch.collate([saying]), Batch.collate([plain])]),
    ):
        assert weights(made) == [1, 1, 0, 0, 1, 0]
        masked = mask_truncated(made, FilterConfig(mask_truncated=True))
        assert weights(masked) == [0, 0, 0, 0, 3, 0]
    assert "cross_entropy_mask" not in Batch.collate([plain])
    with pytest.raises(ValueError, match="cross_entropy_mask has 1 entries for 3 response tokens"):
        replace(plain, cross_entropy_mask=[1])


def test_mini_batches_keep_groups_whole_and_use_every_sample_once():
    parts = split_mini_batches(build_scored_batch(), 2, [0, 1])
    groups = [set(build_scored_batch().take(rows).array("group_ids").tolist()) for rows in parts]
    assert sorted(row for rows in parts for row in rows) == list(range(6))
    assert set.union(*groups) == {0, 1, 2}
    assert not set.intersection(*groups)


@pytest.mark.parametrize("seed", range(5))
def test_columns_of_mini_batches_stand_at_the_samples_that_they_are_of(seed: int):
    def add_copies(part: Batch, sign: int) -> tuple[Batch, list[int]]:
        ids, numbers = part.jagged("response_ids"), part.array("numbers")
        copies = ids.with_values(sign * ids.values)
        return part.with_columns(copied_ids=copies, copied_numbers=sign * numbers), numbers.tolist()

    batch = build_large_batch().with_columns(numbers=np.arange(12))
    mapped, numbers = map_mini_batches(batch, 3, [seed], add_copies, -1)
    assert mapped.array("copied_numbers").tolist() == [-number for number in range(12)]
    expected = [(-row).tolist() for row in batch.jagged("response_ids")]
    assert [row.tolist() for row in mapped.jagged("copied_ids")] == expected
    assert numbers == split_mini_batches(batch, 3, [seed])


def test_mini_batches_are_never_empty():
    assert len(split_mini_batches(build_scored_batch(), 5, [0])) == 3
    assert split_mini_batches(build_scored_batch().take([]), 2, [0]) == []


def test_a_metric_is_weighted_by_the_tokens_of_its_own_loss():
    """`mine` has no weights of its own: it takes the policy's, over the steps that have it."""
    first = StepMetrics({"entropy": 1.0, "mine": 1.0}, {"loss_weights": 1, "kl_weights": 9}, 10)
    second = StepMetrics(
        {"entropy": 2.0, "mine": 2.0, "reference_kl": 5.0},
        {"loss_weights": 3, "kl_weights": 1, "entropy_weights": 4},
        10,
    )
    metrics = merge_update_metrics([first, second])
    expected = {"entropy": 9 / 5, "mine": 7 / 4, "reference_kl": 5.0}
    assert metrics == pytest.approx(expected)


def test_a_mean_over_no_token_is_none():
    step = StepMetrics({"ratio": 0.0, "kl_loss": 1.0}, {"loss_weights": 0, "kl_weights": 2}, 5)
    assert merge_update_metrics([step]) == {"kl_loss": 1.0}


def build_batch_before_update() -> Batch:
    log_probs = build_rewarded_batch()["log_probs"]
    return build_rewarded_batch().with_columns(current_log_probs=log_probs, entropy=log_probs)


def test_a_loss_outside_of_the_package_is_prepared_by_its_own_function(tmp_path):
    (tmp_path / "own.py").write_text(PREPARED)
    algorithm = AlgorithmConfig(loss=f"{tmp_path}/own.py:good")
    prepared = add_prepared_columns(build_batch_before_update(), algorithm, [0, 1, 1])
    expected = np.random.default_rng([0, 1, 1]).integers(0, 99, 9)
    np.testing.assert_array_equal(prepared.jagged("drawn").values, expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taken", r"own.py:taken' prepares rewards, which is a column of the batch already"),
        ("flat", r"own.py:flat' prepares ranks; allowed: a Jagged with the responses' rows"),
        ("nan", r"own.py:nan' prepares ranks; allowed: a finite number for each token"),
    ],
)
def test_columns_of_another_form_are_refused(tmp_path, name, message):
    (tmp_path / "own.py").write_text(PREPARED)
    algorithm = AlgorithmConfig(loss=f"{tmp_path}/own.py:{name}")
    with pytest.raises(ConfigError, match=message):
        add_prepared_columns(build_batch_before_update(), algorithm, [0])


def build_answer(reward: float, response_ids: list[int]) -> Sample:
    n = len(response_ids)
    return Sample([7], response_ids, [1] * n, [0.0] * n, [0] * n, "stop", 0, reward)


def test_a_batch_that_teaches_nothing_has_a_warning():
    def find(samples, advantages):
        batch = Batch.collate(samples)
        values = np.array(advantages, np.float32)
        column = batch.jagged("rollout_log_probs").with_values(values)
        return find_warnings(batch.with_columns(advantages=column))

    good = [build_answer(1.0, [1, 2]), build_answer(0.0, [1, 2])]
    assert find(good, [1, 1, -1, -1]) == {}
    equal = [build_answer(1.0, [1, 2]), build_answer(1.0, [1, 2])]
    [text] = find(equal, [0, 0, 0, 0]).values()
    assert text.startswith("all advantages are 0, with rewards from 1 to 1")
    empty = [build_answer(1.0, [9]), build_answer(0.0, [1, 2])]
    [text] = find(empty, [1, -1, -1]).values()
    assert text == "1 of 2 responses are empty"
