"""Rules of reward models and teachers."""

from __future__ import annotations

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_algorithm import build_teachers, validate_frozen_models
from mcore_rl.config.schema import Layout, LoRAConfig, RLConfig
from mcore_rl.jobs.run_plan import Pool, plan_run

MATH = {"math": {"model_path": "math", "weight": 2, "layout": {"pp": 4}}, "start": {}}


def config_of(**settings) -> RLConfig:
    config = RLConfig()
    for key, value in settings.items():
        *groups, leaf = key.split("__")
        group_config = config
        for group in groups:
            group_config = getattr(group_config, group)
        assert hasattr(group_config, leaf), key
        setattr(group_config, leaf, value)
    return config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm__distillation__loss": "sampled_kl"}, "teacher.models names no teacher"),
        ({"teacher__models": MATH}, "loss='off': nothing is learned from teacher.models=math, st"),
        ({"teacher__models": {"a": {"path": ""}}}, "teacher.models.a.path is unknown; allowed"),
        ({"teacher__models": {"a": {"weight": True}}}, "teacher.models.a.weight=True; allowed"),
        ({"teacher__models": {"a": {"weight": 0}}}, "teacher.models.a.weight=0.0; allowed"),
        ({"teacher__models": {"a": {"layout": {"xp": 2}}}}, "layout.xp is unknown; allowed: tp"),
        ({"teacher__models": {"a": {"layout": {"tp": "2"}}}}, "layout.tp='2'; allowed: a whole"),
        ({"teacher__lora": LoRAConfig(rank=4)}, "teacher.lora and teacher.moe.router_replay"),
        (
            {
                "algorithm__distillation__loss": "sampled_kl",
                "teacher__models": MATH,
                "algorithm__filter__group_filter": "drop_uniform",
            },
            "algorithm.filter.group_filter='drop_uniform' leaves out groups",
        ),
        (
            {
                "algorithm__distillation__loss": "sampled_kl",
                "teacher__models": MATH,
                "algorithm__advantage": "gae",
            },
            "algorithm.advantage='gae' trains a critic of rewards",
        ),
        (
            {"reward_model__model_path": "rm", "reward_model__weight": 0.0},
            "reward_model.weight=0: the model would score in vain",
        ),
        *(
            (
                {"reward_model__model_path": "rm", setting: value},
                f"{key}={value!r} looks at rewards",
            )
            for setting, value, key in (
                (
                    "algorithm__filter__group_filter",
                    "drop_uniform",
                    "algorithm.filter.group_filter",
                ),
                ("algorithm__filter__keep_responses", 2, "algorithm.filter.keep_responses"),
                ("algorithm__filter__replay__share", 0.5, "algorithm.filter.replay.share"),
                ("data__curriculum__name", "window", "data.curriculum.name"),
                ("reward__shuffle", True, "reward.shuffle"),
            )
        ),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        validate_frozen_models(config_of(**settings))
    assert message in str(error.value)


def test_teachers_have_layouts_of_their_own_and_take_turns_or_have_devices():
    settings = {"algorithm__distillation__loss": "sampled_kl", "teacher__models": MATH}
    config = config_of(**settings, teacher__layout=Layout(tp=2), reward_model__model_path="rm")
    validate_frozen_models(config)
    teachers = build_teachers(config.teacher)
    assert [t.engine.layout for t in teachers.values()] == [Layout(tp=2, pp=4), Layout(tp=2)]
    assert [t.weight for t in teachers.values()] == [2.0, 1.0]
    config.placement.rollout = "shared"
    roles = ("actor", "reward_model", "teacher.math", "teacher.start", "rollout")
    assert plan_run(config).pools == (Pool("shared pool", roles, 8),)
    config.placement.teacher = "own"
    assert plan_run(config).pools == (
        Pool("shared pool", ("actor", "reward_model", "rollout"), 1),
        Pool("teacher.math", ("teacher.math",), 8),
        Pool("teacher.start", ("teacher.start",), 2),
    )
    assert [role.name for role in plan_run(config)] == [*roles[:-1]]
