"""Which settings need log-probs before the update, and that nothing else reads them there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.advantages import ADVANTAGES, token_advantages
from mcore_rl.algorithms.inputs import LossInputs
from mcore_rl.algorithms.losses import LOSSES
from mcore_rl.cli.compose import compose_config
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import resolve, resolve_for_lane
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.trainers.log_prob_pass import find_reason_for_pass, needs_pass

OWN = """
def loss(inputs):
    return inputs.log_probs, {}

def advantage(inputs):
    return inputs.rewards
"""
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


def config_of(settings: list[str]) -> RLConfig:
    given = ["model.path=m", "data.train_file=d", *settings]
    config = compose_config(RLConfig, given)
    resolve(config)
    return resolve_for_lane(config, "cpu")


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("reason", NEEDS_PASS)
def test_what_reads_log_probs_before_the_update_keeps_their_pass(reason):
    config = config_of(NEEDS_PASS[reason])
    assert find_reason_for_pass(config) == reason and needs_pass(config)


@pytest.mark.parametrize("settings", NEEDS_NONE, ids=" ".join)
def test_other_settings_need_no_pass(settings):
    assert find_reason_for_pass(config_of(settings)) == ""


@pytest.mark.parametrize("mode", ["fully_async", "one_step_off"])
def test_samples_of_old_versions_keep_the_pass_of_their_correction(mode):
    config = config_of([f"trainer.mode={mode}"])
    assert find_reason_for_pass(config) == "algorithm.correction.level='token'"


def test_another_value_of_the_setting_is_refused():
    message = r"algorithm.log_prob_pass='never'; allowed: 'auto', 'always'"
    with pytest.raises(ConfigError, match=message):
        config_of(["algorithm.log_prob_pass=never"])


IDS = Jagged.of([[1, 2], [3], [4, 5, 6], [7]], np.int64)
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
    return needs_pass(replace(config, algorithm=replace(config.algorithm, **{key: name})))


@pytest.mark.parametrize("name", ADVANTAGES.names)
def test_an_advantage_reads_no_log_probs_or_keeps_their_pass(name):
    if not keeps_pass("advantage", name):
        found = token_advantages(BEFORE, name, SETTINGS.get(name, {}))
        assert np.isfinite(found["advantages"].values).all()


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
        loss, _ = LOSSES.bound(name, SETTINGS.get(name, {}))(inputs)
        gradients += torch.autograd.grad((loss * columns["loss_weights"]).sum(), [log_probs])
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-7)
