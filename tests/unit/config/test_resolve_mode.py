"""Which settings a loop has, and which of them do not fit each other."""

from __future__ import annotations

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import resolve, resolve_for_lane
from mcore_rl.config.schema import (
    AlgorithmConfig,
    AsynchronousConfig,
    CorrectionConfig,
    FilterConfig,
    RewardConfig,
    RLConfig,
    TrainerConfig,
)


def resolved(
    mode="fully_async", staleness=2, asynchronous=None, replay="off", **algorithm
) -> RLConfig:
    config = RLConfig(
        trainer=TrainerConfig(
            mode=mode, staleness=staleness, asynchronous=AsynchronousConfig(**asynchronous or {})
        ),
        reward=RewardConfig(shuffle=algorithm.pop("shuffle", False)),
        algorithm=AlgorithmConfig(**algorithm),
    )
    config.actor.moe.router_replay = replay
    config.model.path = config.data.train_file = config.data.test_file = "given"
    resolve(config)
    return resolve_for_lane(config, "cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(staleness=-1), "trainer.staleness=-1; allowed: at least 0"),
        (dict(asynchronous={"oversampling": 2}), "oversampling=2; allowed: 0 to 1"),
        (
            dict(staleness=0, asynchronous={"oversampling": 0.5}),
            "oversampling=0.5 with .*staleness=0",
        ),
        (dict(asynchronous={"max_groups": -1}), "max_groups=-1; allowed: at least 0"),
        (dict(asynchronous={"max_waiting_samples": 511}), "samples=511; allowed: at least 512"),
        (dict(mode="sync", staleness=0, asynchronous={"max_groups": 1}), "has no part in .*'sync'"),
        (dict(correction=CorrectionConfig(level="off")), "trainer.staleness=2: old samples would"),
        (dict(loss="decoupled_ppo"), "algorithm.loss='decoupled_ppo' with .* and no weight_cap"),
        (dict(replay="rollout"), "router_replay='rollout' with trainer.mode='fully_async'"),
        (
            dict(filter=FilterConfig(group_filter="drop_uniform"), shuffle=True),
            "reward.shuffle=true with .*: groups are filtered as they come",
        ),
        (
            dict(filter=FilterConfig(group_filter="drop_uniform", prompts_per_round=8)),
            "prompts_per_round=8: .* in no rounds",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolved(**settings)


def test_a_cap_on_the_weights_makes_decoupled_ppo_an_answer_to_old_samples():
    resolved(loss="decoupled_ppo", loss_settings={"weight_cap": 5.0})


@pytest.mark.parametrize(
    ("mode", "staleness", "level"),
    [("sync", 0, "off"), ("one_step_off", 1, "token"), ("fully_async", 2, "token")],
)
def test_what_nobody_has_set(mode, staleness, level):
    config = resolved(mode, None)
    assert config.trainer.staleness == staleness
    correction = config.algorithm.correction
    assert (correction.level, correction.method, correction.weight_max) == (level, "truncate", 2.0)
    assert config.placement.rollout == ("shared" if mode == "sync" else "own")
