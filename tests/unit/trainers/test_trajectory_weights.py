"""A sequence of a loss is a trajectory, however many samples it has."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos

from mcore_rl.algorithms.aggregation import loss_weights
from mcore_rl.config.schema import AlgorithmConfig, DistillationConfig, FilterConfig, RLConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample
from mcore_rl.trainers import steps, updates
from tests.unit.data.test_trajectories import SAMPLES, cut

# Ours, and what verl calls them.
MODES = {
    "token_mean": "token-mean",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "sequence_sum_fixed_length": "seq-mean-token-sum-norm",
}
LENGTH = 9
COLUMNS = (
    "loss_weights", "kl_weights", "entropy_weights", "distillation_weights",
    "cross_entropy_weights",
)  # fmt: skip


def algorithm_of(mode: str) -> AlgorithmConfig:
    """With a weight for each loss there is."""
    return AlgorithmConfig(
        loss_aggregation=mode,
        loss_aggregation_settings={"length": LENGTH} if "fixed" in mode else {},
        kl_coef=0.5,
        entropy_coef=0.25,
        cross_entropy_coef=2.0,
        distillation=DistillationConfig(loss="forward_kl", coef=4.0, use_reward=True),
    )


def batch_of(lengths: list[int], **columns: list[int]) -> Batch:
    tokens = Jagged.of([[1] * n for n in lengths], np.int8)
    return Batch(
        {
            "response_ids": tokens,
            "response_mask": tokens,
            **{name: np.array(column) for name, column in columns.items()},
        }
    )


def random_batch(rng: np.random.Generator) -> Batch:
    """One sample a trajectory, with a trained token of each kind."""
    rows = [rng.integers(0, 2, rng.integers(0, 9)) for _ in range(6)]
    mask = Jagged.of([*rows, [0, 1]], np.int8)
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
    cut_up = batch_of(
        [4, 12, 4, 4], group_ids=[7] * 4, trajectories=[1, 0, 1, 1], segments=[2, 0, 0, 1]
    )
    found, _ = steps.with_loss_weights(cut_up, algorithm_of(mode))
    np.testing.assert_allclose(found.jagged("loss_weights").values, of_token, rtol=1e-6)
    others = cut_up.with_columns(group_ids=np.array([7, 3, 7, 7]), trajectories=np.zeros(4, int))
    found, _ = steps.with_loss_weights(others, algorithm_of(mode))
    np.testing.assert_allclose(found.jagged("loss_weights").values, of_token, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_weights_do_not_depend_on_where_trajectories_were_cut(mode: str):
    """Bit for bit, of every loss."""
    rng, algorithm = np.random.default_rng(0), algorithm_of(mode)
    for _ in range(50):
        whole, _ = steps.with_loss_weights(random_batch(rng), algorithm)
        parts, rows = cut(whole.without(*COLUMNS), rng)
        found, _ = steps.with_loss_weights(parts, algorithm)
        for name in COLUMNS:
            for row in range(len(whole)):
                mine = [i for i, of in enumerate(rows) if of == row]
                mine.sort(key=lambda i: parts.array("segments")[i])
                joined = np.concatenate([found.jagged(name)[i] for i in mine])
                np.testing.assert_array_equal(joined, whole.jagged(name)[row])


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_that_of_verl_on_the_joined_trajectories(mode: str):
    rng = np.random.default_rng(1)
    for _ in range(50):
        whole = random_batch(rng).without("policy_mask")
        mask = whole.jagged("response_mask")
        losses = mask.with_values(rng.normal(size=len(mask.values)))
        padded = torch.zeros(2, len(mask), int(mask.lengths.max()), dtype=torch.float64)
        for row, n in enumerate(mask.lengths):
            padded[0, row, :n] = torch.from_numpy(losses[row].copy())
            padded[1, row, :n] = torch.from_numpy(mask[row].copy())
        wanted = core_algos.agg_loss(*padded, MODES[mode], loss_scale_factor=LENGTH)
        parts, _ = cut(whole.with_columns(losses=losses), rng)
        weights = steps.with_loss_weights(parts, algorithm_of(mode))[0].jagged("loss_weights")
        found = weights.values @ parts.jagged("losses").values
        assert found == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("segments", [[0, 0, 0], [1, 0, 2]])
def test_trajectories_of_one_sample_have_the_weights_that_samples_have(
    mode: str, segments: list[int]
):
    """Bit for bit, also where a trajectory has lost its first samples; so has a batch of none."""
    algorithm, lengths = algorithm_of(mode), [3, 7, 11]
    mask = batch_of(lengths).jagged("response_mask")
    wanted = loss_weights(mask, mode, algorithm.loss_aggregation_settings).values
    made = batch_of(lengths, group_ids=[2, 2, 0], trajectories=[1, 0, 0], segments=segments)
    for batch in (made, batch_of(lengths)):
        found, _ = steps.with_loss_weights(batch, algorithm)
        np.testing.assert_array_equal(found.jagged("loss_weights").values, wanted)


class Model:
    """An actor or a critic, which keeps what it is given."""

    def __init__(self) -> None:
        self.updates: list[Batch] = []

    def update(self, batch: Batch, *, sizes: list[int], **_: float) -> list[list[dict[str, float]]]:
        ends = np.cumsum(sizes).tolist()
        self.updates += [batch.take(range(e - n, e)) for n, e in zip(sizes, ends, strict=True)]
        return [[{"loss": 1.0}] * len(sizes)]


def elsewhere(
    _: object,
    function: Callable[..., tuple[Batch, object]],
    batch: Batch,
    *args: object,
    reads: Collection[str],
) -> tuple[Batch, object]:
    """Rank 0 of a worker, which is sent the columns that `reads` names."""
    sent = batch.select(*(name for name in batch.names if name in reads))
    found, value = function(sent, *args)
    return batch.union(found), value


@pytest.mark.parametrize("of", ["actor", "critic"])
def test_an_update_of_columns_elsewhere_knows_trajectories(
    of: str, monkeypatch: pytest.MonkeyPatch
):
    """Two mini-batches: one has four samples of two trajectories, the other two of two."""
    monkeypatch.setattr(updates, "with_near", elsewhere)
    batch, model = Batch.of(SAMPLES), Model()
    zeros = batch.jagged("rollout_log_probs")
    batch = batch.with_columns(advantages=zeros, values=zeros, returns=zeros)
    mode, config = "sequence_mean_token_sum", RLConfig()
    config.algorithm.num_mini_batches = 2
    config.algorithm.loss_aggregation = config.critic.loss_aggregation = mode
    if of == "actor":
        algorithm = config.algorithm
        weighed, counts = steps.with_each(batch, 2, [0], steps.with_loss_weights, algorithm)
        updates.update(model, weighed, counts, algorithm, temperature=1.0, seed=[0])
    else:
        updates.update_critic(model, batch, config, seed=[0])
    assert sorted(len(part) for part in model.updates) == [2, 4]
    for part in model.updates:
        mask = part.jagged("response_mask").values
        assert part.jagged("loss_weights").values.tolist() == (mask / 2).tolist()


def test_a_sample_says_which_tokens_the_cross_entropy_is_of():
    """The other of two does not say, and has those that the policy did not choose."""
    mask, said = [1, 0, 1], [1, 1, 0]
    plain = Sample([7], [1, 2, 3], mask, [0.0] * 3, [0, -1, 0], "stop", 0)
    saying = replace(plain, cross_entropy_mask=said, finish_reason="length")
    algorithm = AlgorithmConfig(cross_entropy_coef=3.0)

    def weights(made: Batch) -> list[float]:
        found, _ = steps.with_loss_weights(made, algorithm)
        return found.jagged("cross_entropy_weights").values.tolist()

    for made in (Batch.of([saying, plain]), Batch.concat([Batch.of([saying]), Batch.of([plain])])):
        assert weights(made) == [1, 1, 0, 0, 1, 0]
        whole = steps.without_truncated(made, FilterConfig(mask_truncated=True))
        assert weights(whole) == [0, 0, 0, 0, 3, 0]
    assert "cross_entropy_mask" not in Batch.of([plain])
    with pytest.raises(ValueError, match="cross_entropy_mask has 1 entries for 3 response tokens"):
        replace(plain, cross_entropy_mask=[1])
