"""One step of the synchronous trainer, with models and servers that keep what they are asked."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_placement
from mcore_rl.config.schema import (
    AlgorithmConfig,
    CorrectionConfig,
    FilterConfig,
    RLConfig,
    TrainerConfig,
)
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample
from mcore_rl.observability.activity import Stopwatch
from mcore_rl.trainers.base import RLTrainer
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.policy_checks import PolicyMismatchError
from mcore_rl.trainers.step_samples import StepSampler, add_baseline_rewards
from tests.fakes import LocalWorkers, build_trainer

REPORTED: dict[str, float] = {}  # metrics of the last step


class Model(LocalWorkers):
    """A worker group whose model gives every token the same log-prob; keeps what it is asked."""

    def __init__(self, log_prob: float):
        self.log_prob = log_prob
        self.temperatures: list[float] = []
        self.updates: list[Batch] = []
        self.places: list[str] = []

    def to(self, place, **parts):
        self.places.append(place)

    def compute_log_probs(self, batch, *, temperature):
        self.temperatures.append(temperature)
        responses = batch.jagged("response_ids")
        values = np.full(len(responses.values), self.log_prob, np.float32)
        entropy = np.arange(len(responses.values), dtype=np.float32)
        return batch.with_columns(
            log_probs=responses.with_values(values), entropy=responses.with_values(entropy)
        )

    def update(self, batch, *, sizes, temperature):
        self.temperatures.append(temperature)
        self.updates.append(batch)
        return [[{"loss": 0.0}]]


class Servers:
    """A pool that answers with `batch`, whatever is asked; takes new weights."""

    def __init__(self, batch: Batch):
        self.batch, self.versions = batch, []

    greedy_error = ""  # why the greedy response to the prompt of group 0 got no reward
    has_joining, num_up = False, 1

    def follow_desired(self): ...

    def take(self, num):
        """As the prompts of a run, too."""
        return None

    def generate(self, prompts, n, *, is_greedy=False):
        if not is_greedy:
            return self.batch
        rewards = np.array([0.0, 0.25, 0.0], np.float32)
        failed = np.array(["", "", self.greedy_error])
        ids = np.array([2, 1, 0])
        return Batch({"group_ids": ids, "rewards": rewards, "reward_errors": failed})

    def sleep(self, keep):
        assert self.versions == []

    def wake(self, tag):
        assert (tag == "kv_cache") == bool(self.versions)

    def push(self, version):
        self.versions.append(version)


def answered() -> Batch:
    """Three groups of two; the policy has not chosen the third token of the third response."""
    column = Jagged.pack([[0, 1], [2], [3, 4, 5], [6], [7], [8]], np.int64)
    mask = np.ones(9, np.int8)
    mask[5] = 0
    return Batch(
        dict(
            group_ids=np.array([0, 0, 1, 1, 2, 2]),
            prompt_ids=Jagged.pack([[1, 2]] * 6, np.int64),
            response_ids=column,
            response_mask=column.with_values(mask),
            rollout_log_probs=column.with_values(np.full(9, -1.0, np.float32)),
            weight_versions=column.with_values(np.zeros(9, np.int64)),
            rewards=np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], np.float32),
            finish_reasons=np.array(["stop"] * 6),
        )
    )


@pytest.fixture
def one_step(tmp_path):
    """The actor, the reference and the batch of the only update, after one step."""
    return after_one_step(tmp_path, {"kl_coef": 0.1, "loss_aggregation": "sequence_mean_token_sum"})


def one_step_of(
    tmp_path, settings, models, warmup_steps=0, made=None, tables=None, on_error="stop"
):
    bounds = {"max_logprob_gap": 9.0, "mean_logprob_gap": 9.0}
    config = RLConfig(trainer=TrainerConfig(num_steps=1, prompts_per_step=3, **bounds))
    config.rollout.temperature, config.critic.warmup_steps = 0.7, warmup_steps
    config.algorithm, config.reward.on_error = AlgorithmConfig(**settings), on_error
    servers = Servers(answered() if made is None else made)
    devices = DeviceSharing(resolve_placement(config), models, servers, servers)
    trainer = build_trainer(config, tmp_path, devices, sample_log=tables)
    trainer.sampler = StepSampler(config, servers, servers, trainer.replay)
    trainer.run(lambda step, metrics: REPORTED.update(metrics))
    assert servers.versions == [1]
    return trainer.coefficients, trainer.warnings.summary()


def after_one_step(tmp_path, settings):
    actor, reference = Model(-1.0625), Model(-3.5)
    one_step_of(tmp_path, settings, {"actor": actor, "reference": reference})
    [update] = actor.updates
    if not settings.get("kl_coef"):
        return actor, reference, update
    assert reference.places == ["host"]
    assert actor.places == ["host", "host"]
    return actor, reference, update


def test_an_update_has_the_log_probs_of_the_actor_and_those_of_the_reference(one_step):
    _, reference, update = one_step
    assert set(update.jagged("log_probs").values.tolist()) == {-1.0625}
    assert set(update.jagged("reference_log_probs").values.tolist()) == {-3.5}
    assert reference.updates == []


def test_every_call_has_the_temperature_of_the_sampling(one_step):
    actor, reference, _ = one_step
    assert actor.temperatures == [0.7, 0.7]
    assert reference.temperatures == [0.7]


@pytest.mark.parametrize("with_critic", [False, True])
def test_a_policy_that_is_not_the_servers_stops_the_run_before_any_update(tmp_path, with_critic):
    models = {"actor": Model(-20.0)} | ({"critic": ValueModel(0.0)} if with_critic else {})
    settings = {"advantage": "gae" if with_critic else "grpo"}
    with pytest.raises(PolicyMismatchError, match="step 1: max_logprob_gap of trainer and rollout"):
        one_step_of(tmp_path, settings, models)
    assert [model.updates for model in models.values()] == [[]] * len(models)


SAME_WITHOUT_PASS = {
    "plain": ({}, {}),
    "reference and entropy": (dict(kl_coef=0.1, entropy_coef=0.1, loss="decoupled_ppo"), {}),
    "truncated": (
        dict(filter=FilterConfig(mask_truncated=True)),
        {"finish_reasons": np.array(["stop", "length", "stop", "stop", "length", "stop"])},
    ),
    "nothing trained": (
        dict(filter=FilterConfig(mask_truncated=True)),
        {"finish_reasons": np.array(["length"] * 6)},
    ),
}


@pytest.mark.parametrize("case", SAME_WITHOUT_PASS)
def test_a_step_that_gives_its_own_log_probs_is_one_with_a_pass_of_them(tmp_path, case):
    """The metrics, what the update gets, and the table of samples."""
    settings, columns = SAME_WITHOUT_PASS[case]
    results = {}
    for when in ("always", "auto"):
        REPORTED.clear()
        actor, tables = Model(-1.0625), Tables()
        models = {"actor": actor, "reference": Model(-3.5)}
        made = answered().with_columns(**columns)
        given = settings | {"log_prob_pass": when}
        one_step_of(tmp_path / when, given, models, made=made, tables=tables)
        metrics = {name: v for name, v in REPORTED.items() if name in OF_SAMPLES}
        results[when] = metrics, actor, tables.batches
    (metrics, actor, shown), (other_metrics, without, same_shown) = (
        results["always"],
        results["auto"],
    )
    assert other_metrics == metrics and metrics["max_logprob_gap"] == pytest.approx(0.0625)
    assert len(without.updates) == len(actor.updates) == (case != "nothing trained")
    for before, after in zip(actor.updates, without.updates, strict=True):
        assert {*after.names} == {*before.names, "gap_mask"}
        _same_columns(before, after)
    [before], [after] = shown, same_shown
    assert {*after.names} == {*before.names}
    _same_columns(before, after)


OF_SAMPLES = (
    "max_logprob_gap", "mean_logprob_gap", "mismatch/kl", "mismatch/k3_kl",
    "mismatch/effective_sample_size_sequences", "actor/entropy", "actor/loss",
)  # fmt: skip


class Tables:
    """Keep the samples of each step."""

    def __init__(self):
        self.batches: list[Batch] = []

    def write_step(self, step, batch):
        self.batches.append(batch)


def _same_columns(before: Batch, after: Batch) -> None:
    for name in before.names:
        pair = (getattr(batch[name], "values", batch[name]) for batch in (before, after))
        np.testing.assert_array_equal(*pair, err_msg=name)


def test_tokens_that_the_policy_did_not_choose_have_no_weight(one_step):
    """Each of the six sequences weighs a sixth, and so does each of its tokens: a sum, no mean."""
    update = one_step[2]
    weights, mask = update.jagged("loss_weights"), update.jagged("response_mask")
    assert 0 in mask.values
    np.testing.assert_allclose(weights.values, mask.values / 6, rtol=1e-6)


def test_a_step_with_all_that_is_between_generation_and_update(tmp_path):
    """KL in the reward, its controller, importance weights and the tokens of highest entropy."""
    settings = dict(
        kl_coef=0.1, kl_placement="reward", kl_target=1.0, kl_horizon=10, kl_estimator="k1",
        top_entropy_share=0.5, advantage_settings={"normalize_by_std": False},
        correction=CorrectionConfig(level="token", weight_max=0.5),
    )  # fmt: skip
    update = after_one_step(tmp_path, settings)[2]
    kl = -1.0625 + 3.5  # a token
    tokens = np.array([2, 1, 2, 1, 1, 1])  # that the policy has chosen
    rewards = np.array([1.0, 0, 1, 1, 0, 0]) - 0.1 * kl * tokens
    sums = [row.sum() for row in update.jagged("token_rewards")]
    np.testing.assert_allclose(sums, rewards, rtol=1e-5)
    advantages = (rewards.reshape(3, 2) - rewards.reshape(3, 2).mean(1, keepdims=True)).ravel()
    actual = [row[0] for row in update.jagged("advantages")]
    np.testing.assert_allclose(actual, advantages, atol=1e-6)
    weights, mask = update.jagged("loss_weights").values, update.jagged("response_mask").values
    assert weights.tolist() == pytest.approx([0, 0, 0, 0, 1 / 8, 0, 1 / 8, 1 / 8, 1 / 8])
    corrected = update.jagged("correction_weights").values
    assert corrected.tolist() == pytest.approx((mask * 0.5).tolist())
    assert REPORTED["algorithm/kl_coef"] == 0.1
    assert REPORTED["algorithm/reference_kl"] == pytest.approx(kl)
    assert REPORTED["correction/clipped"] == 1.0
    assert REPORTED["mismatch/kl"] == pytest.approx(0.0625)


@pytest.mark.parametrize("num_samples", [6, 4])
def test_the_kl_coefficient_follows_its_target_by_the_number_of_samples(tmp_path, num_samples):
    """Not by that of groups, of two each. The KL is above 1.2 times its target, 0.5."""
    settings = dict(kl_coef=0.1, kl_target=0.5, kl_horizon=10, kl_estimator="k1")
    made = answered().take(list(range(num_samples)))
    models = {"actor": Model(-1.0625), "reference": Model(-3.5)}
    coefficients, _ = one_step_of(tmp_path, settings, models, made=made)
    assert coefficients.state_dict()["kl"] == pytest.approx(0.1 * (1 + 0.2 * num_samples / 10))


def test_the_speed_of_a_step_is_in_tokens_of_all_that_was_generated(tmp_path, monkeypatch):
    """With the prompt of each of six responses, and groups that the filter leaves out."""
    monkeypatch.setattr(Stopwatch, "total_s", 2.0)
    samples = FilterConfig(group_filter="drop_uniform")
    one_step_of(tmp_path, {"filter": samples}, {"actor": Model(-1.0625)})
    assert REPORTED["tokens_per_s"] == (6 * 2 + 9) / 2.0


def test_the_speed_of_a_step_leaves_out_the_time_of_its_evaluation(tmp_path, monkeypatch):
    def evaluate(trainer, step):
        trainer.clock.seconds |= {"time/evaluate_s": 5.0, "time/save_s": 1.0}
        return {"eval/x": 1.0}

    monkeypatch.setattr(Stopwatch, "total_s", 7.0)
    monkeypatch.setattr(RLTrainer, "evaluate_if_due", evaluate)
    one_step_of(tmp_path, {}, {"actor": Model(-1.0625)})
    assert REPORTED["tokens_per_s"] == (6 * 2 + 9) / 2.0
    assert (REPORTED["time/evaluate_s"], REPORTED["eval/x"]) == (5.0, 1.0)


def test_a_step_with_the_log_probs_of_the_servers_computes_none(tmp_path):
    REPORTED.clear()
    settings = {"correction": CorrectionConfig(use_rollout_log_probs=True)}
    actor, _, update = after_one_step(tmp_path, settings)
    assert actor.temperatures == [0.7]  # of the update
    assert set(update.jagged("log_probs").values.tolist()) == {-1.0}
    assert not any("gap" in name or "mismatch" in name for name in REPORTED)


class ValueModel(Model):
    """Each token is worth half a reward."""

    def compute_values(self, batch):
        responses = batch.jagged("response_ids")
        return batch.with_columns(
            values=responses.with_values(np.full(len(responses.values), 0.5, np.float32))
        )

    def update(self, batch, *, sizes, temperature):
        assert temperature == 1.0
        self.updates.append(batch)
        return [[{"loss": 0.25}]]


@pytest.mark.parametrize(("warmup_steps", "num_updates"), [(0, 1), (1, 0)])
def test_a_critic_learns_from_all_samples_and_the_actor_when_it_is_warm(
    tmp_path, warmup_steps, num_updates
):
    """Lambda and gamma are 1: the return of a token is the reward, whatever the values."""
    settings = dict(advantage="gae", advantage_settings={"whiten": False})
    settings["advantage_settings"]["lam"] = 1.0
    actor, critic = Model(-1.0625), ValueModel(0.0)
    one_step_of(tmp_path, settings, {"actor": actor, "critic": critic}, warmup_steps)
    [learned] = critic.updates
    rewards = np.repeat([1.0, 0, 1, 1, 0, 0], [2, 1, 3, 1, 1, 1]).astype(np.float32)
    chosen = learned.jagged("response_mask").values != 0
    assert learned.jagged("returns").values[chosen].tolist() == rewards[chosen].tolist()
    assert learned.jagged("loss_weights").values.tolist() == pytest.approx((chosen / 8).tolist())
    assert critic.places == ["host"]
    assert REPORTED["critic/loss"] == 0.25
    assert len(actor.updates) == num_updates
    for update in actor.updates:
        advantages = update.jagged("advantages").values
        assert advantages[chosen].tolist() == (rewards[chosen] - 0.5).tolist()


@pytest.mark.parametrize(("rewards", "num_updates"), [([1, 0, 1, 1, 0, 0], 1), ([1] * 6, 0)])
def test_groups_that_do_not_pass_are_neither_scored_nor_trained_on(tmp_path, rewards, num_updates):
    """If none passes, the step ends without an update, and the servers get its weights."""
    actor, samples = Model(-1.0625), FilterConfig(group_filter="drop_uniform")
    made = answered().with_columns(rewards=np.array(rewards, np.float32))
    one_step_of(tmp_path, {"filter": samples}, {"actor": actor}, made=made)
    assert [set(update.array("group_ids").tolist()) for update in actor.updates] == [{0}] * (
        num_updates
    )
    assert len(actor.temperatures) == 2 * num_updates
    assert REPORTED["samples/passed"] == num_updates / 3
    assert REPORTED["reward"] == pytest.approx(sum(rewards) / 6)


class Shown:
    """Tables that keep the group ids of what they show, and nothing on disk."""

    def __init__(self):
        self.group_ids: list[list[int]] = []

    def write_step(self, step, batch):
        assert "advantages" not in batch
        self.group_ids.append(batch.array("group_ids").tolist())


def test_a_step_of_which_no_group_passes_is_reported_and_its_samples_are_shown(tmp_path, capsys):
    actor, samples, tables = Model(-1.0625), FilterConfig(group_filter="drop_uniform"), Shown()
    made = answered().with_columns(rewards=np.ones(6, np.float32))
    one_step_of(tmp_path, {"filter": samples}, {"actor": actor}, made=made, tables=tables)
    assert actor.updates == [] and tables.group_ids == [[0, 0, 1, 1, 2, 2]]
    message = "step 1: no group has passed algorithm.filter.group_filter='drop_uniform': nothing is"
    assert f"mcore-rl: warning: {message} learned\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_passing", "max_rounds", "is_reported", "summary"),
    [
        (3, 1, False, ""),
        (2, 1, False, ""),
        (1, 1, False, "fewer than half of 3 groups passed "),
        (2, 2, True, "too few groups passed "),
        (3, 2, False, ""),
    ],
)
def test_a_short_step_is_reported_unless_the_filter_is_meant_to_leave_groups_out(
    tmp_path, capsys, num_passing, max_rounds, is_reported, summary
):
    """Of three prompts. Only several rounds are there to fill a step."""
    rewards = np.array([1.0, 0, 1, 0, 1, 0], np.float32)
    rewards[2 * num_passing :] = 0
    samples = FilterConfig(group_filter="drop_uniform", max_rounds=max_rounds)
    made = answered().with_columns(rewards=rewards)
    models = {"actor": Model(-1.0625)}
    _, summed_up = one_step_of(tmp_path, {"filter": samples}, models, made=made)
    message = (
        f"step 1: {num_passing} groups to train on, of trainer.prompts_per_step=3, after algorithm"
    )
    assert (message in capsys.readouterr().err) == is_reported
    setting = "algorithm.filter.group_filter='drop_uniform'"
    assert (f"in 1 of 1 {summary}{setting}" in summed_up) == bool(summary)
    assert summary or setting not in summed_up


def test_dropped_responses_and_groups_that_are_gone_with_them_are_reported(tmp_path, capsys):
    errors = np.array(["late", "late", "late", "", "", ""])
    made = answered().with_columns(reward_errors=errors)
    one_step_of(tmp_path, {}, {"actor": Model(-1.0625)}, made=made, on_error="drop")
    output = capsys.readouterr().err
    assert "step 1: 3 responses are missing, as they got no reward\n" in output
    assert "step 1: 2 groups to train on, of trainer.prompts_per_step=3\n" in output


# Advantages that read no more than the samples have.
OF_FAILED_SAMPLES = (
    "gpg", "grpo_passk", "lite_ppo", "maxrl", "opo",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo",
)  # fmt: skip


def build_failed_samples(num_tokens: int = 0) -> Batch:
    """Return three groups that failed; the policy chose none of their tokens."""
    tokens = [[7] * num_tokens, [0] * num_tokens, [0.0] * num_tokens, [-1] * num_tokens]
    return Batch.collate(
        [
            Sample([1], *tokens, "abort", group, reward_error="no turn", status="failed")
            for group in (0, 0, 1, 1, 2, 2)
        ]
    )


@pytest.mark.parametrize("num_tokens", [0, 2], ids=["no token", "tokens of others"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_mini_batches": 3, "log_prob_pass": "always", "entropy_target": 0.5},
        {"kl_coef": 0.1, "kl_placement": "reward", "kl_target": 0.1, "top_entropy_share": 0.5},
        {"correction": CorrectionConfig(level="sequence", weight_max=2.0)},
        {"filter": FilterConfig(mask_truncated=True, keep_responses=1)},
        {"advantage": "gae", "num_mini_batches": 2},
        *[{"advantage": name} for name in OF_FAILED_SAMPLES],
    ],
    ids=str,
)
def test_a_step_whose_every_group_has_failed_trains_nothing_and_the_run_goes_on(
    tmp_path, settings, num_tokens
):
    """With reward.on_error=zero."""
    models = {"actor": Model(-1.0625), "critic": ValueModel(0.0), "reference": Model(-3.5)}
    made = build_failed_samples(num_tokens)
    one_step_of(tmp_path, settings, models, made=made, on_error="zero")
    assert [model.updates for model in models.values()] == [[], [], []]
    assert (REPORTED["reward"], REPORTED["reward_errors"]) == (0.0, 1.0)


def test_a_step_whose_every_group_has_failed_says_why_where_failed_samples_are_dropped(tmp_path):
    with pytest.raises(ConfigError, match=r"none of the 6 responses of a step got .*: no turn$"):
        made = build_failed_samples()
        one_step_of(tmp_path, {}, {"actor": Model(-1.0)}, made=made, on_error="drop")


def test_advantages_may_compare_responses_that_are_not_trained_on(tmp_path):
    advantages = {}
    for which in ("kept", "generated"):
        samples = FilterConfig(keep_responses=1, keep_by="best", advantages_of=which)
        settings = {"filter": samples, "advantage_settings": {"normalize_by_std": False}}
        update = after_one_step(tmp_path, settings)[2]
        pairs = zip(update.array("group_ids"), update.jagged("advantages"), strict=True)
        advantages[which] = {int(group): float(row[0]) for group, row in pairs}
    assert advantages == {"kept": {0: 0, 1: 0, 2: 0}, "generated": {0: 0.5, 1: 0, 2: 0}}


def test_remax_takes_off_the_reward_of_a_greedy_response(tmp_path):
    update = after_one_step(tmp_path, {"advantage": "remax"})[2]
    advantages = [float(row[0]) for row in update.jagged("advantages")]
    assert sorted(advantages) == [0.0, 0.0, 0.0, 0.75, 0.75, 1.0]


def test_remax_leaves_out_a_prompt_whose_greedy_response_got_no_reward(tmp_path, monkeypatch):
    """Its reward of 0 is no baseline."""
    monkeypatch.setattr(Servers, "greedy_error", "too late")
    update = after_one_step(tmp_path, {"advantage": "remax"})[2]
    assert set(update.array("group_ids").tolist()) == {1, 2}
    with pytest.raises(ConfigError, match="none of 1 greedy responses got a reward; first: x"):
        greedy = {"group_ids": [0], "rewards": [0.0], "reward_errors": ["x"]}
        greedy = Batch({name: np.array(column) for name, column in greedy.items()})
        add_baseline_rewards(answered(), greedy)
