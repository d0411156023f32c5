"""Learning rates against a table worked out by hand; what is refused before anything is built."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import OptimizerConfig
from mcore_rl.engine.megatron import optimizer
from mcore_rl.engine.megatron.optimizer import SkipCounter, build_schedule, check_optimizer

# Learning rates of steps 1 to 13 with lr 1, min_lr 0.1, 3 steps of warm-up, 12 steps in all.
WARM_UP = [1 / 3, 2 / 3, 1.0]
TABLE = {
    "constant": [*WARM_UP, *[1.0] * 10],
    "linear": [*WARM_UP, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1],
    # 0.1 + 0.45 (1 + cos) at 20, 40, ... 180 degrees
    "cosine": [
        *WARM_UP, 0.9728617, 0.8947200, 0.775, 0.6281417, 0.4718583, 0.325, 0.2052800, 0.1271383,
        0.1, 0.1,
    ],
    # the last 4 of 12 steps
    "wsd": [*WARM_UP, *[1.0] * 5, 0.775, 0.55, 0.325, 0.1, 0.1],
}  # fmt: skip


def rates(settings: OptimizerConfig, total_steps: int, num: int) -> list[float]:
    """Return learning rates like the engine: advance the schedule, then step."""
    weights = [torch.nn.Parameter(torch.zeros(1))]
    groups = torch.optim.AdamW(weights, lr=settings.lr)
    schedule = build_schedule(groups, settings, total_steps)
    lrs = []
    for _ in range(num):
        schedule.step(increment=1)
        lrs.append(groups.param_groups[0]["lr"])
    return lrs


@pytest.mark.parametrize("schedule", TABLE)
def test_learning_rates_are_those_of_the_table(schedule):
    settings = OptimizerConfig(
        lr=1.0, min_lr=0.1, schedule=schedule, warmup_steps=3, wsd_decay_steps=4
    )
    assert rates(settings, 12, 13) == pytest.approx(TABLE[schedule], abs=1e-7)


def test_without_warm_up_the_first_step_is_already_on_the_schedule():
    settings = OptimizerConfig(lr=1.0, min_lr=0.0, schedule="linear")
    assert rates(settings, 4, 4) == pytest.approx([0.75, 0.5, 0.25, 0.0])
    assert rates(OptimizerConfig(lr=2.0), 4, 2) == [2.0, 2.0]


def test_a_warm_up_longer_than_the_training_still_rises_linearly():
    settings = OptimizerConfig(lr=1.0, schedule="cosine", warmup_steps=8)
    assert rates(settings, 4, 4) == pytest.approx([0.125, 0.25, 0.375, 0.5])


def test_weight_decay_does_not_depend_on_the_step():
    weights = [torch.nn.Parameter(torch.zeros(1))]
    groups = torch.optim.AdamW([{"params": weights, "wd_mult": 1.0}])
    schedule = build_schedule(groups, OptimizerConfig(weight_decay=0.3, warmup_steps=2), 5)
    seen = set()
    for _ in range(5):
        schedule.step(increment=1)
        seen.add(groups.param_groups[0]["weight_decay"])
    assert seen == {0.3}


@pytest.mark.parametrize(("decay", "total"), [(0, 12), (10, 12), (1, 3)])
def test_a_wsd_decay_must_fit_between_warm_up_and_end(decay, total):
    settings = OptimizerConfig(schedule="wsd", warmup_steps=3, wsd_decay_steps=decay)
    with pytest.raises(ConfigError, match=f"optimizer.wsd_decay_steps={decay}: {total} steps"):
        check_optimizer(settings, total)


def test_a_wsd_decay_may_begin_right_after_warm_up():
    settings = OptimizerConfig(
        lr=1.0, schedule="wsd", warmup_steps=3, wsd_decay_steps=9, min_lr=0.1
    )
    check_optimizer(settings, 12)
    assert rates(settings, 12, 12) == pytest.approx(TABLE["linear"][:12])


def test_cpu_offloaded_adam_is_refused_without_a_gpu_or_transformer_engine(monkeypatch):
    settings = OptimizerConfig(cpu_offload=True, distributed=True)
    monkeypatch.setattr(optimizer, "get_device_type", lambda: "cpu")
    with pytest.raises(ConfigError, match=r"optimizer\.cpu_offload=true: without a GPU"):
        check_optimizer(settings, 10)
    check_optimizer(settings, 0)  # an engine for inference has no optimizer
    monkeypatch.setattr(optimizer, "get_device_type", lambda: "cuda")
    with pytest.raises(ConfigError, match=r"cpu_offload=true needs transformer-engine 2\.1"):
        check_optimizer(settings, 10)
    monkeypatch.setattr(optimizer, "is_transformer_engine_installed", lambda: True)
    check_optimizer(settings, 10)


def test_updates_are_skipped_so_many_times_in_a_row_and_then_the_setting_is_named():
    skips = SkipCounter(OptimizerConfig(max_skipped_steps=2))
    for norm in (float("nan"), float("inf"), 1.0, float("nan"), float("nan")):
        skips.count(norm)
        assert skips.metrics == {"num_skipped_steps": float(norm != 1.0)}
    with pytest.raises(FloatingPointError, match=r"is nan: .*optimizer.max_skipped_steps=2 in a"):
        skips.count(float("nan"))
    with pytest.raises(FloatingPointError, match=r"max_skipped_steps=0"):
        SkipCounter(OptimizerConfig()).count(float("inf"))
    assert SkipCounter(OptimizerConfig()).metrics == {}
