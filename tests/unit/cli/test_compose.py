"""Recipes and overrides become typed settings; a wrong key or value is explained in one line."""

from __future__ import annotations

import pytest

from mcore_rl.cli.compose import CONFIGS, compose_config, setting_names
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import for_lane, resolve
from mcore_rl.config.schema import Layout, RLConfig

RECIPES = sorted(path.stem for path in (CONFIGS / "recipe").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_resolves(recipe):
    config = compose_config("rl", RLConfig, [f"recipe={recipe}"])
    assert isinstance(config, RLConfig)
    resolve(config)


def test_overrides_win_over_the_recipe_and_keep_their_types():
    config = compose_config(
        "rl", RLConfig, ["recipe=quickstart", "seed=7", "actor.layout.ep=1", "output_dir=/x"]
    )
    assert (config.seed, config.output_dir) == (7, "/x")
    assert config.actor.layout == Layout(tp=2, ep=1)


def test_without_a_recipe_the_defaults_stand():
    assert compose_config("rl", RLConfig, []) == RLConfig()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.layot.tp=2", "unknown setting 'actor.layot.tp'; did you mean actor.layout.tp"),
        ("learning_rate=1", "unknown setting 'learning_rate'; allowed: seed, output_dir, "),
        ("recipe=nope", "recipe=nope; allowed: quickstart, quickstart_one_gpu"),
        ("seed=abc", "seed: Value 'abc' of type 'str' could not be converted to Integer"),
        ("actor.layout=3", "actor.layout is a group of settings; set one of: actor.layout.tp"),
        ("+new=1", r"\+new=1: settings are neither added nor removed"),
        ("~seed", "~seed: settings are neither added nor removed"),
        ("a b", "a b"),
    ],
)
def test_a_wrong_override_is_one_clear_error(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        compose_config("rl", RLConfig, ["recipe=quickstart", override])
    assert "\n" not in str(caught.value)


def test_setting_names_are_full_keys():
    names = setting_names(RLConfig)
    assert {"seed", "actor.layout.tp", "warm_start.optimizer.lr"} <= set(names)
    assert len(names) == len(set(names))


def test_the_recipe_for_one_gpu_is_the_quickstart_with_one_rank_a_group():
    config = compose_config("rl", RLConfig, ["recipe=quickstart_one_gpu", "output_dir=/x"])
    resolve(config)
    found = for_lane(config, "cuda")
    assert found.actor.layout == found.warm_start.layout == Layout()
    assert found.model.dtype == "bfloat16" and found.task.name == "last_digit"
    with pytest.raises(ConfigError, match=r"one_device=true"):
        for_lane(compose_config("rl", RLConfig, ["recipe=quickstart"]), "cuda")
