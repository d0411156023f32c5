"""A setting that cannot work is refused by name, with its value and what is allowed."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import (
    ModelSizes,
    resolve,
    resolve_model,
    resolve_rollout_model,
)
from mcore_rl.config.schema import Layout, RLConfig, RolloutConfig


def config(**changes):
    made = RLConfig()
    made.task.name = "last_digit"
    for key, value in changes.items():
        *path, leaf = key.split("__")
        target = made
        for name in path:
            target = getattr(target, name)
        assert leaf in {entry.name for entry in fields(target)}
        setattr(target, leaf, value)
    return made


def test_the_defaults_with_a_task_resolve():
    resolve(config())


BAD = [
    ({"task__name": "sudoku"}, "task.name='sudoku'; allowed: '', 'last_digit'"),
    ({"model__dtype": "fp8"}, "model.dtype='fp8'; allowed: 'float32', 'bfloat16'"),
    ({"model__path": "/m"}, "model.path='/m': task.name='last_digit' makes its own"),
    ({"task__name": ""}, "model.path='' names nothing"),
    ({"weight_sync__method": "pigeon"}, "weight_sync.method='pigeon'; allowed: 'full_export'"),
    ({"weight_sync__bind_address": "0.0.0.0"}, "weight_sync.bind_address='0.0.0.0': servers conn"),
    ({"trainer__mean_logprob_gap": -1.0}, "trainer.mean_logprob_gap=-1.0; allowed: above 0"),
    ({"seed": -1}, "seed=-1; allowed: at least 0"),
    (
        {"rollout__cores": "0|1"},
        "rollout.cores='0|1' must list the cores of each of the",
    ),
    ({"output_dir": ""}, "output_dir='' names no folder"),
    ({"trainer__prompts_per_step": 0}, "trainer.prompts_per_step=0; allowed: at least 1"),
    ({"trainer__max_logprob_gap": 0.0}, "trainer.max_logprob_gap=0.0; allowed: above 0"),
    ({"actor__layout": Layout(tp=0)}, "actor.layout.tp=0; allowed: at least 1"),
    ({"actor__layout": Layout(pp=2)}, "actor.layout.pp=2: pipeline parallelism is not supported"),
    ({"actor__layout": Layout(cp=2)}, "actor.layout.cp=2: context parallelism is not supported"),
    ({"actor__layout": Layout(tp=2, ep=4)}, "1 * 4 * 1 = 4 must divide the world size"),
    ({"actor__layout": Layout(dp=3, ep=2)}, "1 * 2 * 1 = 2 must divide the world size tp * pp"),
    ({"actor__optimizer__lr": 0.0}, "actor.optimizer.lr=0.0; allowed: above 0"),
    ({"actor__optimizer__min_lr": 1.0}, "actor.optimizer.min_lr=1.0; allowed: 0 to"),
    ({"actor__optimizer__schedule": "step"}, "actor.optimizer.schedule='step'; allowed"),
    ({"actor__optimizer__beta2": 1.0}, "actor.optimizer.beta2=1.0"),
    ({"actor__max_tokens_per_micro_batch": 0}, "actor.max_tokens_per_micro_batch=0"),
    ({"rollout__temperature": 0.0}, "rollout.temperature=0.0; allowed: above 0"),
    ({"rollout__top_p": 0.9}, "rollout.top_p=0.9: training needs log-probs of the whole"),
    ({"rollout__num_servers": 0}, "rollout.num_servers=0; allowed: at least 1"),
    ({"algorithm__group_size": 1}, "algorithm.group_size=1; allowed: at least 2"),
    ({"algorithm__clip_ratio_low": 1.5}, "algorithm.clip_ratio_low=1.5; allowed: 0 to 1"),
    ({"algorithm__num_mini_batches": 3}, "algorithm.num_mini_batches=3 does not divide"),
    (
        {"trainer__prompts_per_step": 1, "actor__layout": Layout(dp=3)},
        "actor.layout.dp=3 does not divide the 8 samples of a mini-batch",
    ),
    (
        {
            "warm_start__num_steps": 1,
            "warm_start__batch_size": 9,
            "warm_start__layout": Layout(dp=2),
        },
        "warm_start.layout.dp=2 does not divide warm_start.batch_size=9",
    ),
    (
        {"warm_start__num_steps": 1, "warm_start__layout": Layout(tp=2, ep=3)},
        "warm_start.layout: etp * ep * pp = 1 * 3 * 1 = 3 must divide",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[m for _, m in BAD])
def test_a_bad_setting_is_named(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(config(**changes))


SIZES = ModelSizes(
    num_attention_heads=12, num_query_groups=4, ffn_sizes=(30,), num_experts=8, expert_ffn_size=20
)
DENSE = ModelSizes(
    num_attention_heads=12, num_query_groups=4, ffn_sizes=(30,), num_experts=0, expert_ffn_size=0
)


@pytest.mark.parametrize(
    ("layout", "sizes", "message"),
    [
        (Layout(tp=5), SIZES, "actor.layout.tp=5 does not divide the model's 12 attention heads"),
        (Layout(tp=3), SIZES, "actor.layout.tp=3 does not divide the model's 4 key/value heads"),
        (Layout(tp=4), SIZES, "actor.layout.tp=4 does not divide the model's 30 MLP columns"),
        (Layout(ep=3), SIZES, "actor.layout.ep=3 does not divide the model's 8 experts"),
        (
            Layout(etp=3),
            SIZES,
            "actor.layout.etp=3 does not divide the model's 20 columns of an exp",
        ),
        (Layout(ep=2), DENSE, "actor.layout.ep=2: the model has no experts; allowed: 1"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_named(layout, sizes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_model("actor.layout", layout, sizes)


def test_a_layout_that_divides_is_accepted():
    resolve_model("actor.layout", Layout(tp=2, ep=4, etp=2), SIZES)


def test_vllm_needs_experts_for_expert_parallelism():
    with pytest.raises(ConfigError, match=re.escape("rollout.ep=true: the model has no experts")):
        resolve_rollout_model(RolloutConfig(ep=True), DENSE)


def test_every_setting_has_a_default():
    def walk(part):
        for entry in fields(part):
            value = getattr(part, entry.name)
            if is_dataclass(value):
                walk(value)
            assert value is not None or "None" in entry.type

    walk(RLConfig())
