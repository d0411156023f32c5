"""What a step trains on: the parts of it as they are tested elsewhere, one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.config.schema import AlgorithmConfig, CorrectionConfig, FilterConfig, TrainerConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.trainers import steps
from mcore_rl.trainers.advantage_step import compute_score_metrics, training_batch
from mcore_rl.trainers.policy_checks import (
    PolicyMismatchError,
    check_gaps,
    gaps_and_mismatch,
    logprob_gaps,
)

SEED = [3, 1]


def scored() -> Batch:
    """Four groups of three responses, of which some are cut off."""
    rng = np.random.default_rng(0)
    ids = Jagged.of([rng.integers(1, 9, n) for n in rng.integers(1, 6, 12)], np.int64)

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
def test_it_is_what_its_parts_make_one_after_the_other(which: str):
    samples = FilterConfig(keep_responses=2, advantages_of=which, mask_truncated=True)
    correction = CorrectionConfig(level="token", weight_max=1.05)
    algorithm = AlgorithmConfig(
        num_mini_batches=3, filter=samples, correction=correction, top_entropy_share=0.8
    )
    batch = scored()
    advantages, weighed, told = training_batch(
        batch, algorithm, TrainerConfig(max_logprob_gap=9, mean_logprob_gap=9), 1, SEED
    )
    judged = steps.with_advantages(batch, algorithm)
    assert advantages.names == ["advantages"]
    assert advantages.jagged("advantages").values.tolist() == pytest.approx(
        judged.jagged("advantages").values.tolist()
    )
    chosen = steps.chosen_responses(judged, samples, SEED)
    assert len(chosen) == (8 if which == "generated" else 12)
    corrected, left_out = steps.with_correction(steps.without_truncated(chosen, samples), algorithm)
    trained = chosen.union(weighed)
    assert {*weighed.names} >= {"response_mask", "loss_weights", "correction_weights"}
    assert not {*weighed.names} & {"response_ids", "advantages", "rewards", "group_ids"}
    parts = steps.mini_batches(chosen, 3, SEED)
    assert len(told.counts) == len(parts) == 3
    for rows, count in zip(parts, told.counts, strict=True):
        wanted, its = steps.with_loss_weights(corrected.take(rows), algorithm)
        assert count == its
        for name in wanted.names:
            found = trained.take(rows)[name]
            pair = [getattr(c, "values", c) for c in (found, wanted[name])]
            np.testing.assert_array_equal(*pair, err_msg=name)
    assert any(count["loss_weights"] for count in told.counts)
    gaps, apart = gaps_and_mismatch(batch, correction)
    chosen_by_policy = batch.jagged("response_mask").values != 0
    entropy = batch.jagged("entropy").values[chosen_by_policy].mean(dtype=np.float64)
    assert told.metrics == apart | left_out | {"actor/entropy": pytest.approx(entropy)}
    assert told.gaps == gaps
    assert told.doubts == steps.doubts(judged)


def test_nothing_is_made_of_log_probs_that_are_too_far_from_the_servers():
    """Nor of what is no number, which advantages and corrections may refuse in words of theirs."""
    batch = scored()
    log_probs = batch.jagged("log_probs")
    wrong = log_probs.with_values(np.full(len(log_probs.values), np.nan, np.float32))
    algorithm = AlgorithmConfig(correction=CorrectionConfig(level="token"))
    close, wide = (TrainerConfig(max_logprob_gap=gap, mean_logprob_gap=gap) for gap in (0.01, 9.0))
    for made, trainer in ((batch, close), (batch.with_columns(log_probs=wrong), wide)):
        advantages, weighed, told = training_batch(made, algorithm, trainer, 1, SEED)
        assert advantages.names == weighed.names == told.counts == []
        with pytest.raises(
            PolicyMismatchError, match="step 1: max_logprob_gap of trainer and roll"
        ):
            check_gaps(told.gaps, trainer, 1)


def test_with_staleness_only_samples_of_the_policy_itself_are_held_to_the_bounds():
    batch = scored()
    ids = batch.jagged("response_ids")
    versions = np.full(len(ids.values), 4)
    versions[ids.offsets[3] :] = 3
    gaps = {}
    for staleness, step in ((0, 5), (1, 5), (1, 4)):
        trainer = TrainerConfig(staleness=staleness, max_logprob_gap=9, mean_logprob_gap=9)
        made = batch.with_columns(weight_versions=ids.with_values(versions))
        gaps[staleness, step] = training_batch(made, AlgorithmConfig(), trainer, step, SEED)[2].gaps
    assert gaps[0, 5] == logprob_gaps(batch)
    assert gaps[1, 5] == logprob_gaps(batch.take(range(3)))
    assert gaps[1, 4] == logprob_gaps(batch.take(range(3, 12)))


@pytest.mark.parametrize("replayed", [[], [3, 4, 5]])
@pytest.mark.parametrize(("staleness", "step"), [(0, 5), (1, 5), (1, 4)])
def test_without_log_probs_a_mask_says_which_tokens_the_update_compares(staleness, step, replayed):
    """Those of the gaps that are made of log-probs before the update, of truncated samples, too."""
    batch = scored()
    ids = batch.jagged("response_ids")
    versions = np.full(len(ids.values), 4)
    versions[ids.offsets[4] :] = 3
    is_replayed = np.zeros(12, np.int8)
    is_replayed[replayed] = 1
    batch = batch.with_columns(weight_versions=ids.with_values(versions), replayed=is_replayed)
    bounds = dict.fromkeys(("max_logprob_gap", "mean_logprob_gap"), 9.0)
    trainer = TrainerConfig(staleness=staleness, **bounds)
    algorithm = AlgorithmConfig(filter=FilterConfig(mask_truncated=True))
    with_pass = training_batch(batch, algorithm, trainer, step, SEED)
    before = batch.without("log_probs", "entropy")
    advantages, weighed, told = training_batch(before, algorithm, trainer, step, SEED)
    assert told.gaps == told.metrics == {} and told.counts == with_pass[2].counts
    assert {*weighed.names} == {*with_pass[1].names, "gap_mask"}
    compared = batch.with_columns(response_mask=weighed["gap_mask"])
    assert logprob_gaps(compared) == with_pass[2].gaps != {}
    whole = batch.union(advantages)
    found = compute_score_metrics(whole, algorithm, trainer, step)
    assert found == with_pass[2].gaps | with_pass[2].metrics
