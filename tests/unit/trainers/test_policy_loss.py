"""The loss of an update: the sum of its parts, and which settings need log-probs before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.advantages import ADVANTAGES, compute_advantages
from mcore_rl.algorithms.inputs import LossInputs, is_prepared
from mcore_rl.algorithms.losses import LOSSES
from mcore_rl.cli.compose import compose_config
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.schema import AlgorithmConfig, CorrectionConfig, DistillationConfig, RLConfig
from mcore_rl.controller.remote_batch import RemoteBatch, RemoteColumn, RowLocations
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.trainers.policy_loss import (
    COLUMN_OF_METRIC,
    PolicyLoss,
    check_functions,
    check_greedy,
    find_log_prob_pass_reason,
    needs_log_prob_pass,
)
from mcore_rl.trainers.roles import EARLIER_COLUMNS, select_read_columns
from mcore_rl.trainers.training_batch import add_prepared_columns

LOG_PROBS = torch.tensor([-1.0, -2.0, -0.5])
SCORES = {"log_probs": LOG_PROBS, "entropy": torch.tensor([0.3, 0.6, 0.1])}
OF_ALL_LOSSES = (
    "log_probs", "rollout_log_probs", "reference_log_probs", "advantages", "response_mask",
    "loss_weights", "kl_weights", "entropy_weights", "cross_entropy_weights",
)  # fmt: skip
COLUMNS = {
    "log_probs": LOG_PROBS.clone(),  # on-policy: ratios are 1
    "advantages": torch.tensor([1.0, -1.0, 2.0]),
    "reference_log_probs": LOG_PROBS - 0.5,
}


def inputs(**changes: dict[str, torch.Tensor]) -> LossInputs:
    ids = torch.tensor([0, 0, 1])
    given = {"scores": SCORES, "columns": COLUMNS} | changes
    return LossInputs(**given, sequence_ids=ids, num_sequences=2)


def test_on_policy_it_is_minus_the_advantage():
    losses, metrics = PolicyLoss(AlgorithmConfig())(inputs())
    assert losses.keys() == {"loss_weights"}
    torch.testing.assert_close(losses["loss_weights"], -COLUMNS["advantages"])
    assert "entropy" not in metrics and "reference_kl" not in metrics


def test_each_loss_has_weights_of_its_own_and_the_policy_alone_is_corrected():
    names = ("kl_weights", "entropy_weights", "cross_entropy_weights")
    weights = {name: torch.ones(3) for name in names}
    correction = torch.tensor([0.5, 0.0, 2.0])
    columns = COLUMNS | weights | {"correction_weights": correction}
    losses, metrics = PolicyLoss(AlgorithmConfig(entropy_coef=0.5, kl_coef=2.0))(
        inputs(columns=columns)
    )
    kl = 2.718281828459045**-0.5 - 1 + 0.5  # k3 at a log-ratio of -0.5
    torch.testing.assert_close(losses["loss_weights"], -COLUMNS["advantages"] * correction)
    torch.testing.assert_close(losses["kl_weights"], torch.full((3,), kl))
    torch.testing.assert_close(losses["entropy_weights"], -SCORES["entropy"])
    torch.testing.assert_close(losses["cross_entropy_weights"], -LOG_PROBS)
    assert metrics["reference_kl"][0] == "kl_weights"
    assert metrics["reference_kl"][1][0].item() == pytest.approx(kl, rel=1e-6)
    assert metrics["entropy"][0] == "entropy_weights"
    assert torch.equal(metrics["entropy"][1], SCORES["entropy"])
    assert metrics["cross_entropy"][0] == "cross_entropy_weights"
    assert torch.equal(metrics["cross_entropy"][1], -LOG_PROBS)


def test_an_unbiased_kl_has_the_gradient_of_the_kl_to_the_reference():
    """d(r k3) / d log pi = r (log pi - log pi_ref), r = pi / pi_server: the KL's on average."""
    log_probs = LOG_PROBS.clone().requires_grad_()
    columns = {"rollout_log_probs": LOG_PROBS - 0.25, "kl_weights": torch.ones(3)}
    config = AlgorithmConfig(kl_coef=1.0, correction=CorrectionConfig(unbiased_kl=True))
    given = inputs(scores={"log_probs": log_probs}, columns=COLUMNS | columns)
    kl = PolicyLoss(config)(given)[0]["kl_weights"]
    ratio = torch.full((3,), 0.25).exp()
    torch.testing.assert_close(kl, ratio * (torch.exp(torch.tensor(-0.5)) - 1 + 0.5))
    (gradient,) = torch.autograd.grad(kl.sum(), log_probs)
    torch.testing.assert_close(gradient, ratio * 0.5)


@pytest.mark.parametrize("name", LOSSES.names)
def test_a_loss_of_the_package_reads_only_columns_that_an_update_sends(name):
    """Here all that samples may have, each a number of its own."""
    settings = {"dro": {"beta": 0.1}, "kimi": {"tau": 0.1}}.get(name, {})  # without a default
    algorithm, batch = AlgorithmConfig(loss=name, loss_settings=settings), all_columns()
    if is_prepared(LOSSES[name]):
        batch = add_prepared_columns(batch, algorithm, [0])
    sent = batch.select(*select_read_columns(build_remote_batch(batch), name).names)
    assert {*batch.names} - {*sent.names} == {*EARLIER_COLUMNS, "rewards"}
    results = [PolicyLoss(algorithm)(inputs(columns=tensors(columns))) for columns in (batch, sent)]
    for with_all, with_sent in zip(results[0][0].values(), results[1][0].values(), strict=True):
        torch.testing.assert_close(with_all, with_sent)
    assert results[0][1].keys() == results[1][1].keys()


def all_columns() -> Batch:
    """Two responses, of two tokens and one."""
    names = (*OF_ALL_LOSSES, *EARLIER_COLUMNS)
    values = np.random.default_rng(0).random((len(names), 3)).astype(np.float32)
    rows = {name: [row[:2], row[2:]] for name, row in zip(names, values, strict=True)}
    columns = {name: Jagged.pack(row, np.float32) for name, row in rows.items()}
    return Batch(columns | {"response_ids": columns["advantages"], "rewards": np.ones(2)})


def build_remote_batch(batch: Batch) -> RemoteBatch:
    locations = RowLocations.create_missing(len(batch))
    columns = {n: RemoteColumn(locations, n, np.zeros(0, np.float32)) for n in tensors(batch)}
    return RemoteBatch(Batch({"rewards": batch["rewards"]}), columns)


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    jagged = (name for name in batch.names if isinstance(batch[name], Jagged))
    return {name: torch.from_numpy(batch.jagged(name).values) for name in jagged}


def test_a_loss_of_ones_own_gets_all_columns_along_tokens():
    batch = build_remote_batch(all_columns())
    sent = select_read_columns(batch, "own.py:loss").names
    assert {*batch.names} - {*sent} == {"rewards"}  # one value a sample


def test_a_metric_is_a_mean_over_the_column_that_stands_in_the_table():
    columns = {name: torch.ones(3) for name in COLUMN_OF_METRIC.values()}
    top = LOG_PROBS[:, None, None]
    teacher = {"teacher_top_log_probs": top, "teacher_shares": torch.ones(3, 1)}
    config = AlgorithmConfig(distillation=DistillationConfig("forward_kl"))
    loss_inputs = inputs(
        scores=SCORES | {"chosen_log_probs": top}, columns=COLUMNS | columns | teacher
    )
    _, metrics = PolicyLoss(config)(loss_inputs)
    named = {name: metric[0] for name, metric in metrics.items() if isinstance(metric, tuple)}
    assert named == COLUMN_OF_METRIC


def test_the_kl_in_the_reward_is_none_of_the_loss():
    config = AlgorithmConfig(kl_coef=2.0, kl_placement="reward")
    assert PolicyLoss(config).needs == set()


def test_the_entropy_is_needed_where_it_counts_only():
    assert PolicyLoss(AlgorithmConfig()).needs == set()
    both = AlgorithmConfig(entropy_coef=0.5, kl_coef=2.0)
    assert PolicyLoss(both).needs == {"entropy", "reference_log_probs"}
    assert PolicyLoss(AlgorithmConfig(entropy_target=0.2)).needs == {"entropy"}


def test_an_update_that_nothing_has_scored_before_measures_the_entropy():
    algorithm = AlgorithmConfig(correction=CorrectionConfig(use_rollout_log_probs=True))
    assert PolicyLoss(algorithm).needs == {"entropy"}
    _, metrics = PolicyLoss(algorithm)(inputs())
    assert metrics["entropy"][0] == "loss_weights"
    assert torch.equal(metrics["entropy"][1], SCORES["entropy"])


CUSTOM_FUNCTIONS = """
from __future__ import annotations
import torch
from mcore_rl.algorithms.advantages import ADVANTAGES, compute_advantages
from mcore_rl.algorithms.inputs import LossInputs, LossResult, needs

@needs("entropy", "reference_log_probs")
def far(inputs: LossInputs) -> LossResult:
    return inputs.log_probs - inputs.reference_log_probs, {"entropy": inputs.entropy.detach()}

def undeclared(inputs):
    return inputs.log_probs - inputs.reference_log_probs, {}

@needs("values")
def gae(inputs):
    return inputs.values

@needs("baseline_rewards")
def greedy(inputs):
    return inputs.rewards - inputs.baseline_rewards

def scalar(inputs):
    return inputs.log_probs.mean(), {}

def short(inputs):
    return inputs.log_probs, {"ratio": inputs.log_probs[1:]}

def alone(inputs):
    return inputs.log_probs

def total(log_probs, reference_log_probs):
    return (log_probs - reference_log_probs).sum()

def loss(inputs):
    return inputs.log_probs, {}

def advantage(inputs):
    return inputs.rewards
"""


@pytest.fixture
def custom_functions(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(CUSTOM_FUNCTIONS)
    monkeypatch.chdir(tmp_path)


def test_a_loss_outside_of_the_package_is_used_and_says_what_it_needs(custom_functions):
    loss = PolicyLoss(AlgorithmConfig(loss="own.py:far", kl_coef=1e-9))
    assert loss.needs == {"entropy", "reference_log_probs"}
    losses, metrics = loss(inputs())
    torch.testing.assert_close(losses["loss_weights"], torch.full((3,), 0.5))
    assert torch.equal(metrics["entropy"], SCORES["entropy"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "own.py:far"}, r"algorithm.loss='own.py:far' asks for reference_log_probs, which "
         r"this run does not have: algorithm.kl_coef=0 loads no reference model; allowed: above 0"),
        ({"loss": "own.py:gae"}, r"algorithm.loss='own.py:gae' asks for values"),
        ({"loss": "own.py:nope"}, r"algorithm.loss='own.py:nope': 'own.py' has no function 'nope'; "
         r"it has: far, undeclared, gae"),
        ({"advantage": "nowhere:gae"}, r"algorithm.advantage='nowhere:gae': 'nowhere' cannot be "
         r"imported: ModuleNotFoundError: No module named 'nowhere'"),
        ({"loss_settings": {"clip_ratio_low": 1.5}},
         r"algorithm.loss_settings.clip_ratio_low=1.5; allowed: 0 to 1"),
        ({"loss_settings": {"clip": 0.1}}, r"algorithm.loss_settings.clip is no setting of "
         r"algorithm.loss='ppo_clip'; allowed: clip_ratio_low, clip_ratio_high"),
        ({"loss": "decoupled_ppo", "correction": CorrectionConfig(level="token")},
         r"loss='decoupled_ppo' has importance weights of its own; .*correction.level='off'"),
        ({"correction": CorrectionConfig(reject={"seq": 1})},
         r"algorithm.correction.reject.seq is no rule; allowed: token_k1, "),
        ({"kl_estimator_settings": {"x": 1}}, r"algorithm.kl_estimator='k3' has no settings"),
    ],
)  # fmt: skip
def test_what_a_run_cannot_have_is_refused_before_it_starts(custom_functions, settings, message):
    with pytest.raises(ConfigError, match=message):
        check_functions(AlgorithmConfig(**settings))


def test_an_input_that_a_run_lacks_is_named_when_it_is_read(custom_functions):
    columns = {name: column for name, column in COLUMNS.items() if name != "reference_log_probs"}
    with pytest.raises(ConfigError, match=r"asks for reference_log_probs.*algorithm.kl_coef=0"):
        PolicyLoss(AlgorithmConfig(loss="own.py:undeclared"))(inputs(columns=columns))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "own.py:scalar"}, r"'own.py:scalar' returned \[\] for the loss; .* here \[3\]"),
        ({"loss": "own.py:short"}, r"'own.py:short' returned \[2\] for ratio"),
        ({"loss": "own.py:alone"}, r"'own.py:alone' returned Tensor; allowed: a loss and a dict"),
        (
            {"kl_estimator": "own.py:total", "kl_coef": 0.1},
            r"kl_estimator='own.py:total' ret.* \[\]",
        ),
    ],
)
def test_a_loss_of_another_form_is_refused(custom_functions, settings, message):
    columns = COLUMNS | {"kl_weights": torch.ones(3)}
    with pytest.raises(ConfigError, match=message):
        PolicyLoss(AlgorithmConfig(**settings))(inputs(columns=columns))


@pytest.mark.parametrize("name", ["remax", "own.py:greedy"])
def test_an_advantage_of_greedy_responses_is_refused_where_a_run_makes_none(custom_functions, name):
    config = RLConfig(algorithm=AlgorithmConfig(advantage=name))
    check_greedy(config)
    config.trainer.mode = "fully_async"
    with pytest.raises(ConfigError, match=rf"advantage='{name}' .*mode='fully_async' these"):
        check_greedy(config)
    config.algorithm.advantage = "grpo"
    check_greedy(config)
    config.algorithm.advantage, config.trainer.mode = name, "sync"
    config.reward_model.model_path = "rm"
    with pytest.raises(ConfigError, match=rf"'{name}' .*reward_model.model_path='rm' does not"):
        check_greedy(config)


ROOT = Path(__file__).parents[3]


def test_the_recipe_of_the_page_fits_its_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "algorithms.md").read_text()
    (tmp_path / "mine.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    algorithm = compose_config(RLConfig, [f"recipe={tmp_path / 'mine.yaml'}"]).algorithm
    check_functions(algorithm)
    with pytest.raises(ConfigError, match=r"loss_settings.clip is no setting .*clip_ratio_low, cl"):
        check_functions(replace(algorithm, loss_settings={"clip": 0.1}))


def test_replay_with_a_critic_is_refused():
    settings = AlgorithmConfig(advantage="gae")
    check_functions(settings)
    settings.filter.replay.share = 0.5
    with pytest.raises(ConfigError, match=r"replay.share=0.5: .*advantage='gae'"):
        check_functions(settings)


NEEDS_PASS = {
    "algorithm.log_prob_pass='always'": ["algorithm.log_prob_pass=always"],
    "algorithm.num_mini_batches=2": ["algorithm.num_mini_batches=2"],
    "algorithm.correction.use_rollout_log_probs=True": [
        "algorithm.correction.use_rollout_log_probs=true"
    ],
    "algorithm.correction.level='token'": ["algorithm.correction.level=token"],
    "algorithm.correction.level='sequence'": ["algorithm.correction.level=sequence"],
    "algorithm.correction.reject={'sequence_mean_k3': 0.01}": [
        "algorithm.correction.reject={sequence_mean_k3: 0.01}"
    ],
    "algorithm.loss='clip_cov'": ["algorithm.loss=clip_cov"],
    "algorithm.loss='m2po'": ["algorithm.loss=m2po"],
    "algorithm.loss='own.py:loss'": ["algorithm.loss=own.py:loss"],
    "algorithm.advantage='own.py:advantage'": ["algorithm.advantage=own.py:advantage"],
    "algorithm.advantage='optimal_token_baseline'": ["algorithm.advantage=optimal_token_baseline"],
    "algorithm.advantage='gae'": ["algorithm.advantage=gae"],
    "algorithm.kl_placement='reward'": ["algorithm.kl_coef=0.1", "algorithm.kl_placement=reward"],
    "algorithm.kl_target=0.5": ["algorithm.kl_coef=0.1", "algorithm.kl_target=0.5"],
    "algorithm.entropy_target=0.5": ["algorithm.entropy_target=0.5"],
    "algorithm.top_entropy_share=0.2": ["algorithm.top_entropy_share=0.2"],
    "algorithm.distillation.loss='sampled_kl'": [
        "algorithm.distillation.loss=sampled_kl", "teacher.models={math: {model_path: x}}"
    ],
    "algorithm.filter.advantages_of='generated'": [
        "algorithm.filter.advantages_of=generated", "algorithm.filter.keep_responses=2"
    ],
    "actor.moe.router_replay='record'": ["actor.moe.router_replay=record"],
}  # fmt: skip
NEEDS_NONE = [
    [],
    ["algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.1", "algorithm.cross_entropy_coef=0.1"],
    ["algorithm.kl_coef=0.1", "algorithm.correction.unbiased_kl=true"],
    ["algorithm.filter.mask_truncated=true", "algorithm.filter.group_filter=drop_uniform"],
    ["algorithm.filter.keep_responses=2"],
    ["algorithm.filter.replay.share=0.5", "algorithm.loss=decoupled_ppo"],
    ["actor.moe.router_replay=rollout", "actor.lora.rank=4"],
    [
        "trainer.mode=fully_async",
        "algorithm.loss=decoupled_ppo",
        "algorithm.loss_settings={weight_cap: 5.0}",
    ],
]


def build_config(settings: list[str]) -> RLConfig:
    given = ["model.path=m", "data.train_file=d", *settings]
    config = compose_config(RLConfig, given)
    validate_rl(config)
    return resolve_for_device_type(config, "cpu")


@pytest.mark.parametrize("reason", NEEDS_PASS)
def test_what_reads_log_probs_before_the_update_keeps_their_pass(custom_functions, reason):
    config = build_config(NEEDS_PASS[reason])
    assert find_log_prob_pass_reason(config) == reason and needs_log_prob_pass(config)


@pytest.mark.parametrize("settings", NEEDS_NONE, ids=" ".join)
def test_other_settings_need_no_pass(settings):
    assert find_log_prob_pass_reason(build_config(settings)) == ""


@pytest.mark.parametrize("mode", ["fully_async", "one_step_off"])
def test_samples_of_old_versions_keep_the_pass_of_their_correction(mode):
    config = build_config([f"trainer.mode={mode}"])
    assert find_log_prob_pass_reason(config) == "algorithm.correction.level='token'"


def test_another_value_of_the_setting_is_refused():
    message = r"algorithm.log_prob_pass='never'; allowed: 'auto', 'always'"
    with pytest.raises(ConfigError, match=message):
        build_config(["algorithm.log_prob_pass=never"])


IDS = Jagged.pack([[1, 2], [3], [4, 5, 6], [7]], np.int64)
# All that a batch has before the update, but for what the trainer's log-probs come with.
BEFORE = Batch(
    {
        "group_ids": np.array([0, 0, 1, 1]),
        "response_ids": IDS,
        "response_mask": IDS.with_values(np.ones(7, np.int8)),
        "rollout_log_probs": IDS.with_values(np.full(7, -1.0, np.float32)),
        "reference_log_probs": IDS.with_values(np.full(7, -1.5, np.float32)),
        "rewards": np.array([1.0, 0, 0, 1], np.float32),
        "baseline_rewards": np.array([0.5, 0.5, 0, 0], np.float32),
        "reward/format": np.array([0.0, 1, 0, 1], np.float32),
        "finish_reasons": np.array(["stop"] * 4),
        "state_ids": IDS.with_values(np.zeros(7, np.int64)),
        "values": IDS.with_values(np.zeros(7, np.float32)),
    }
)
SETTINGS: dict[str, dict[str, object]] = {
    "gdpo": {"parts": "format"}, "kimi": {"tau": 0.1}, "dro": {"beta": 0.1}
}  # fmt: skip


def keeps_pass(key: str, name: str) -> bool:
    config = RLConfig()
    return needs_log_prob_pass(replace(config, algorithm=replace(config.algorithm, **{key: name})))


@pytest.mark.parametrize("name", ADVANTAGES.names)
def test_an_advantage_reads_no_log_probs_or_keeps_their_pass(name):
    if not keeps_pass("advantage", name):
        columns = compute_advantages(BEFORE, name, SETTINGS.get(name, {}))
        assert np.isfinite(columns["advantages"].values).all()


@pytest.mark.parametrize("name", LOSSES.names)
def test_a_loss_has_the_gradient_of_old_log_probs_that_rounding_moves_or_keeps_the_pass(name):
    """A pass of its own gives the same numbers but for rounding, in either direction."""
    if keeps_pass("loss", name):
        return
    rng = np.random.default_rng(0)
    log_probs = torch.from_numpy(rng.normal(-2, 0.5, 7)).requires_grad_()
    columns = {
        "rollout_log_probs": log_probs.detach() + torch.from_numpy(rng.normal(0, 0.1, 7)),
        "advantages": torch.from_numpy(rng.normal(0, 1, 7)),
        "response_mask": torch.ones(7),
        "loss_weights": torch.full((7,), 1 / 7, dtype=torch.float64),
    }
    lengths = torch.from_numpy(IDS.lengths)
    gradients = []
    for rounding in (torch.zeros(7), torch.from_numpy(rng.normal(0, 1e-7, 7))):
        old = {"log_probs": log_probs.detach() + rounding}
        inputs = LossInputs(
            scores={"log_probs": log_probs},
            columns=columns | old,
            sequence_ids=torch.repeat_interleave(torch.arange(4), lengths),
            num_sequences=4,
        )
        loss, _ = LOSSES.bind(name, SETTINGS.get(name, {}))(inputs)
        gradients += torch.autograd.grad((loss * columns["loss_weights"]).sum(), [log_probs])
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-7)
