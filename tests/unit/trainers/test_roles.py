"""The models of a run: what they add to a batch, and the optimizer steps of actor and critic."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from mcore_rl.algorithms.controllers import Coefficients
from mcore_rl.config.schema import AlgorithmConfig, CriticConfig, RLConfig
from mcore_rl.controller.remote_batch import is_part_column
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.observability.warnings import StepWarnings
from mcore_rl.trainers.device_sharing import DeviceSharing, ExclusiveDevices
from mcore_rl.trainers.policy_checks import compute_gaps_and_mismatch
from mcore_rl.trainers.roles import Actor, Critic, RewardModel, Teachers, TrainingBatch
from mcore_rl.trainers.step_samples import add_teacher_names
from mcore_rl.trainers.training_batch import TokenCounts, add_loss_weights, map_mini_batches
from tests.fakes import LocalWorkers
from tests.unit.data.test_trajectories import SAMPLES
from tests.unit.trainers.prepared_losses import PREPARED
from tests.unit.trainers.small_batches import build_rewarded_batch, build_scored_batch

STEP = 1
# Of the mini-batch with one trained token, and of the one with 99.
FEW = {"ratio": 0.0, "reference_kl": 0.0, "moe/aux_loss": 0.0, "loss": 0.0, "kl_loss": 0.0}
MANY = {"ratio": 1.0, "reference_kl": 1.0, "moe/aux_loss": 1.0, "loss": 1.0, "kl_loss": 1.0}
OF_STEPS = {"grad_norm": 3.0, "lr": 0.1, "moe/max_expert_load": 2.0, "num_skipped_steps": 1.0}


class Model(LocalWorkers):
    """An actor or a critic that records its calls: each batch with its sizes."""

    def __init__(self) -> None:
        self.calls: list[tuple[Batch, list[int]]] = []
        self.applied: list[list[str]] = []  # names of the columns that functions got

    def apply(self, function: Callable[..., Any], batch: Batch, *args: object) -> Any:
        self.applied.append(batch.names)
        return super().apply(function, batch, *args)

    def compute_log_probs(self, batch: Batch, *, temperature: float) -> Batch:
        log_probs = batch.jagged("response_ids")
        return batch.with_columns(log_probs=log_probs, entropy=log_probs)

    def update(
        self, batch: Batch, *, sizes: list[int] | None = None, temperature: float = 1.0
    ) -> list[list[dict[str, float]]]:
        self.calls.append((batch, sizes or [len(batch)]))
        return [[self.report(part) for part in split(*self.calls[-1])]]

    def report(self, batch: Batch) -> dict[str, float]:
        return {"loss": 1.0}

    @property
    def updates(self) -> list[Batch]:
        """The batch of each optimizer step."""
        return [part for call in self.calls for part in split(*call)]


class CountingModel(Model):
    """Reports by the number of trained tokens of a mini-batch."""

    def report(self, batch: Batch) -> dict[str, float]:
        count = np.count_nonzero(batch.jagged("loss_weights").values)
        return {**(FEW if count == 1 else MANY), **OF_STEPS}


def split(batch: Batch, sizes: list[int]) -> list[Batch]:
    ends = np.cumsum(sizes).tolist()
    return [batch.take(range(end - n, end)) for n, end in zip(sizes, ends, strict=True)]


def build_config(algorithm: AlgorithmConfig, seed: int = 0) -> RLConfig:
    config = RLConfig(seed=seed, critic=CriticConfig())
    config.algorithm = algorithm
    return config


def build_actor(workers: Any, config: RLConfig) -> Actor:
    devices: Any = ExclusiveDevices(workers)
    return Actor(workers, devices, config, Coefficients(config.algorithm), StepWarnings())


def update_actor(
    workers: Any, batch: Batch, counts: list[TokenCounts], config: RLConfig, step: int = STEP
) -> dict[str, float]:
    training = TrainingBatch(batch, batch, counts, config.algorithm)
    return build_actor(workers, config).update(training, step)[1]


def update_critic(workers: Any, batch: Batch, config: RLConfig) -> dict[str, float]:
    devices: Any = ExclusiveDevices(workers)
    training = TrainingBatch(batch, batch, [], config.algorithm)
    return Critic(workers, devices, config).update(training, STEP)


def add_weights(
    batch: Batch, config: RLConfig, step: int = STEP
) -> tuple[Batch, list[TokenCounts]]:
    """Add the weights of each of the mini-batches that a step takes."""
    num, seed = config.algorithm.num_mini_batches, [config.seed, step]
    return map_mini_batches(batch, num, seed, add_loss_weights, config.algorithm)


# Log-probs.


def test_the_log_probs_of_the_servers_are_taken_and_nothing_is_checked():
    config = RLConfig()
    config.algorithm.correction.use_rollout_log_probs = True
    scored = build_actor(None, config).compute_log_probs(build_scored_batch())
    expected = build_scored_batch().jagged("rollout_log_probs").values
    np.testing.assert_array_equal(scored.jagged("log_probs").values, expected)
    assert compute_gaps_and_mismatch(scored, config.algorithm.correction) == ({}, {})


def test_log_probs_are_computed_where_a_setting_needs_them_before_the_update():
    batch = build_rewarded_batch().drop_columns("log_probs")
    for name, is_scored in (("auto", False), ("always", True)):
        config = build_config(AlgorithmConfig(log_prob_pass=name))
        assert ("log_probs" in build_actor(Model(), config).compute_log_probs(batch)) == is_scored


# Optimizer steps.


def build_two_groups() -> Batch:
    """Return two groups of one response: 1 token and 99, after prompts of 3 tokens and of 1."""
    responses = Jagged.pack([[1], [1] * 99], np.int64)
    prompts = Jagged.pack([[1, 1, 1], [1]], np.int64)
    of_tokens = responses.with_values(np.ones(100, np.float32))
    return Batch(
        {
            "group_ids": np.array([0, 1]),
            "prompt_ids": prompts,
            "response_ids": responses,
            "response_mask": responses.with_values(np.ones(100, np.int8)),
            "log_probs": of_tokens,
            "values": of_tokens,
            "returns": of_tokens,
        }
    )


def test_mini_batches_of_1_and_of_99_tokens_have_the_mean_of_100_tokens():
    config = build_config(AlgorithmConfig(num_mini_batches=2, kl_coef=0.1))
    weighted, counts = add_weights(build_two_groups(), config)
    assert update_actor(CountingModel(), weighted, counts, config) == pytest.approx(
        {
            "actor/ratio": 0.99,
            "actor/reference_kl": 0.99,
            "actor/moe/aux_loss": 100 / 104,  # over prompts, too
            "actor/loss": 0.5,  # sums that belong to a mini-batch
            "actor/kl_loss": 0.5,
            "actor/grad_norm": 3.0,
            "actor/lr": 0.1,
            "actor/moe/max_expert_load": 2.0,
            "actor/num_skipped_steps": 2.0,
        }
    )


def test_metrics_of_a_critic_are_means_over_its_tokens_too():
    config = build_config(AlgorithmConfig(num_mini_batches=2))
    metrics = update_critic(CountingModel(), build_two_groups(), config)
    assert (metrics["critic/ratio"], metrics["critic/loss"]) == pytest.approx((0.99, 0.5))


def test_a_mini_batch_without_a_token_to_train_on_is_no_step():
    column = build_scored_batch().jagged("response_mask")
    policy_mask = np.ones(9, np.int8)
    policy_mask[:3] = 0  # the first group
    batch = build_scored_batch().with_columns(
        policy_mask=column.with_values(policy_mask),
        correction_weights=column.with_values(np.ones(9, np.float32)),
        prompt_ids=column,
        response_ids=column,
    )
    order = np.random.default_rng([0, STEP]).permutation(3).tolist()
    assert order != [0, 1, 2]
    for algorithm, num in ((AlgorithmConfig(), 2), (AlgorithmConfig(kl_coef=0.1), 3)):
        algorithm.num_mini_batches = 3
        workers, config = Model(), build_config(algorithm)
        weighted, counts = add_weights(batch, config)
        update_actor(workers, weighted, counts, config)
        [(trained, sizes)] = workers.calls
        assert sizes == [2] * num and len(trained) == 2 * num
        assert "loss_weights" in trained
        groups = trained.array("group_ids").reshape(num, 2)
        trained_groups = [group for group in order if num == 3 or group]
        assert groups.tolist() == [[group, group] for group in trained_groups]
    no_counts = [dict.fromkeys(count, 0) for count in counts]
    assert update_actor(workers, weighted, no_counts, config) == {}
    assert len(workers.calls) == 1


@pytest.mark.parametrize(("masked", "num_steps"), [([0], 1), ([1], 1), ([0, 1], 0)])
def test_a_critic_takes_no_step_on_a_mini_batch_without_a_token(masked, num_steps):
    batch = build_two_groups()
    mask = Jagged.pack([[0 not in masked], [1 not in masked] * 99], np.int8)
    config = build_config(AlgorithmConfig(num_mini_batches=2))
    workers = CountingModel()
    metrics = update_critic(workers, batch.with_columns(response_mask=mask), config)
    assert len(workers.updates) == num_steps
    for update in workers.updates:
        assert update.array("group_ids").tolist() == [1 - masked[0]]
        assert update.jagged("loss_weights").values.sum() == pytest.approx(1.0)
    ratio = {"critic/ratio": FEW["ratio"] if masked == [1] else MANY["ratio"]}
    assert {n: v for n, v in metrics.items() if n in ratio} == (ratio if num_steps else {})


def test_an_actor_takes_no_step_before_its_critic_is_warm():
    config = build_config(AlgorithmConfig(num_mini_batches=2))
    config.critic.warmup_steps = 1
    weighted, counts = add_weights(build_two_groups(), config)
    workers = CountingModel()
    assert update_actor(workers, weighted, counts, config, step=1) == {} and not workers.calls
    assert update_actor(workers, weighted, counts, config, step=2) and workers.calls


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_update_knows_trajectories(role: str):
    """Two mini-batches: one has four samples of two trajectories, the other two of two."""
    batch, workers = Batch.collate(SAMPLES), Model()
    zeros = batch.jagged("rollout_log_probs")
    batch = batch.with_columns(advantages=zeros, log_probs=zeros, values=zeros, returns=zeros)
    aggregation = "sequence_mean_token_sum"
    config = build_config(AlgorithmConfig(num_mini_batches=2, loss_aggregation=aggregation))
    config.critic.loss_aggregation = aggregation
    if role == "actor":
        weighted, counts = add_weights(batch, config)
        update_actor(workers, weighted, counts, config)
    else:
        update_critic(workers, batch, config)
        [names] = workers.applied  # rank 0 gets the columns that weights are made of, and no others
        assert {*names} == {"group_ids", "trajectories", "segments", "response_mask"}
    assert sorted(len(part) for part in workers.updates) == [2, 4]
    for part in workers.updates:
        mask = part.jagged("response_mask").values
        assert part.jagged("loss_weights").values.tolist() == (mask / 2).tolist()


def test_each_mini_batch_is_prepared_with_a_seed_of_its_own(tmp_path):
    """Made of its number, which does not change where another mini-batch has nothing to train."""
    (tmp_path / "own.py").write_text(PREPARED)
    algorithm = AlgorithmConfig(loss=f"{tmp_path}/own.py:good", num_mini_batches=3)
    config, batch = build_config(algorithm, seed=5), build_rewarded_batch()
    batch = batch.with_columns(entropy=batch["log_probs"], prompt_ids=batch["response_ids"])
    weighted, counts = add_weights(batch, config, step=7)
    for left_out in (None, 1):
        workers, trained = Model(), list(counts)
        if left_out is not None:
            trained[left_out] = dict.fromkeys(counts[left_out], 0)
        update_actor(workers, weighted, trained, config, step=7)
        numbers = [number for number in range(3) if number != left_out]
        for number, part in zip(numbers, workers.updates, strict=True):
            drawn = part.jagged("drawn").values
            expected = np.random.default_rng([5, 7, 1 + number]).integers(0, 99, len(drawn))
            np.testing.assert_array_equal(drawn, expected)


CURRENT = """
from mcore_rl.algorithms.inputs import prepared_by

@prepared_by(lambda inputs: {"current": inputs.log_probs})
def own(inputs):
    return inputs.prepared("current") * inputs.log_probs, {}
"""


def test_mini_batches_after_the_first_are_prepared_with_the_policy_that_has_been_updated(tmp_path):
    (tmp_path / "own.py").write_text(CURRENT)
    algorithm = AlgorithmConfig(loss=f"{tmp_path}/own.py:own", num_mini_batches=3)
    config, batch = build_config(algorithm), build_rewarded_batch()
    updated = batch["response_ids"]  # what `Model` gives as log-probs
    before = updated.with_values(updated.values - 100)
    batch = batch.with_columns(log_probs=before, entropy=before, prompt_ids=updated)
    weighted, counts = add_weights(batch, config)
    workers = Model()
    update_actor(workers, weighted, counts, config)
    first, *later_parts = workers.updates
    assert (first.jagged("current").values < 0).all() and len(later_parts) == 2
    assert all((part.jagged("current").values > 0).all() for part in later_parts)


# Models that only score.


class Scorer(LocalWorkers):
    """Gives each token its id, times a factor; `places` are where it was moved."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.places: list[str] = []

    def to(self, place: str, **parts: bool) -> None:
        self.places.append(place)

    def compute_log_probs(self, batch: Batch, *, temperature: float) -> Batch:
        ids = batch.jagged("response_ids")
        values = (ids.values * self.factor * temperature).astype(np.float32)
        top = np.stack([values, values - 1], 1)
        tops = {"top_ids": np.stack([ids.values] * 2, 1), "top_log_probs": top}
        columns = {name: ids.with_values(column) for name, column in tops.items()}
        return batch.with_columns(log_probs=ids.with_values(values), **columns)

    def compute_scores(self, batch: Batch) -> Batch:
        """Add the sum of the conversation's ids."""
        rows = zip(batch.jagged("prompt_ids"), batch.jagged("response_ids"), strict=True)
        sums = [(prompt.sum() + response.sum()) * self.factor for prompt, response in rows]
        return batch.with_columns(scores=np.array(sums, np.float32))


class Servers:
    """Servers that may sleep."""

    def sleep(self, keep: bool) -> None: ...


def build_responses() -> Batch:
    ids = Jagged.pack([[1, 2], [3], [4, 5, 6], [7]], np.int64)
    return Batch(
        {
            "prompt_ids": Jagged.pack([[10], [10], [20], [20]], np.int64),
            "response_ids": ids,
            "group_ids": np.array([5, 5, 6, 6]),
            "rewards": np.array([1, 0, 0.5, 0], np.float32),
            "reward_errors": np.array(["", "", "", "it raised"]),
            "finish_reasons": np.array(["stop"] * 4),
        }
    )


def build_devices(config: RLConfig, models: Mapping[str, Any]) -> DeviceSharing:
    servers: Any = Servers()
    pools = dict.fromkeys([*models, "rollout"], "shared")
    return DeviceSharing(pools, models, servers, servers)


def build_teachers(config: RLConfig) -> Teachers:
    names = {"math": -1.0, "code": -2.0}
    teachers: dict[str, Any] = {name: Scorer(factor) for name, factor in names.items()}
    actor: Any = Model()
    models = {"actor": actor} | {f"teacher.{name}": model for name, model in teachers.items()}
    return Teachers(teachers, actor, build_devices(config, models), config)


def build_teacher_config(column: str, loss: str) -> RLConfig:
    config = RLConfig()
    config.teacher.models = {"math": {"weight": 0.5}, "code": {"weight": 2}}
    config.teacher.column, config.algorithm.distillation.loss = column, loss
    config.rollout.temperature = 0.5
    return config


def test_all_teachers_score_all_rows_and_leave_their_devices_to_the_next():
    teachers = build_teachers(build_teacher_config("", "reverse_kl"))
    scored, _ = teachers.score(build_responses())
    ids = np.arange(1, 8)
    for name, expected in {
        "teacher_log_probs": np.stack([-0.5 * ids, -ids], 1),
        "teacher_shares": np.tile([0.5, 2], (7, 1)),
        "teacher_ids": np.tile(ids[:, None, None], (1, 2, 2)),
        "teacher_top_log_probs": np.stack([-0.5 * ids, -ids], 1)[..., None] - [0, 1],
    }.items():
        np.testing.assert_array_equal(scored.jagged(name).values, expected)
        assert scored.jagged(name).lengths.tolist() == [2, 1, 3, 1]
    assert teachers.workers["math"].places == ["host"]
    assert teachers.workers["code"].places == []
    teachers.devices.use("actor")
    assert teachers.workers["code"].places == ["host"]


def test_columns_of_several_teachers_reach_the_rank_that_merges_them():
    """A column with a slash in its name would belong to some pipeline ranks only."""
    teachers = build_teachers(build_teacher_config("", "sampled_kl"))
    scored, _ = teachers.score(build_responses())
    [names] = teachers.actor.applied
    assert len(names) >= 5 and not any(map(is_part_column, names))
    assert not [name for name in scored.names if "." in name]


@pytest.mark.parametrize("names", [["math", "code"], ["code", "math"], ["code", "code"]])
def test_a_prompt_with_a_teacher_of_its_own_has_no_other(names):
    fields = [json.dumps({"subject": name}) for name in names]
    prompts = Batch({"group_ids": np.array([6, 5]), "fields": Jagged.pack_texts(fields)})
    batch = add_teacher_names(build_responses(), prompts, "subject")
    check_own_teachers(batch, [names[1]] * 3 + [names[0]] * 4)  # groups 5, then 6


def test_responses_of_alternating_teachers_have_their_own_scores():
    batch = build_responses().with_columns(teacher=np.array(["code", "math", "code", "math"]))
    check_own_teachers(batch, ["code"] * 2 + ["math"] + ["code"] * 3 + ["math"])


def check_own_teachers(batch: Batch, of_tokens: list[str]) -> None:
    scored, _ = build_teachers(build_teacher_config("subject", "sampled_kl")).score(batch)
    factors = {"math": (-0.5, 0.5), "code": (-1.0, 2.0)}
    expected = [[factors[name][0] * id_] for id_, name in enumerate(of_tokens, 1)]
    np.testing.assert_array_equal(scored.jagged("teacher_log_probs").values, expected)
    shares = [[factors[name][1]] for name in of_tokens]
    np.testing.assert_array_equal(scored.jagged("teacher_shares").values, shares)
    assert "teacher_ids" not in scored


def test_a_score_is_added_by_weight_but_not_where_a_reward_failed():
    config = RLConfig()
    config.reward_model.model_path, config.reward_model.weight = "rm", 0.5
    workers: Any = Scorer(0.25)
    devices = build_devices(config, {"actor": workers, "reward_model": workers})
    model = RewardModel(workers, devices, config.reward_model.weight)
    scored, metrics = model.score(build_responses())
    scores = np.array([13, 13, 35, np.nan]) * 0.25
    np.testing.assert_array_equal(scored.array("reward/model"), scores)
    rewards = [*(np.array([1, 0, 0.5]) + 0.5 * scores[:3]), 0]
    np.testing.assert_array_equal(scored.array("rewards"), rewards)
    assert scored.array("rewards").dtype == np.float32
    assert metrics["reward"] == pytest.approx(np.mean(rewards))
    assert metrics["reward/model"] == pytest.approx(np.nanmean(scores))
