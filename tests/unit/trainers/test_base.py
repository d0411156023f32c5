"""Trainers by name and by import path, and the rules between settings that hold for them."""

import pytest

from mcore_rl.cli.compose import compose_config
from mcore_rl.config.allowed import MODES
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import get_loop, validate_rl
from mcore_rl.config.schema import RLConfig, TrainerConfig
from mcore_rl.trainers.base import TRAINERS, load_trainer

AHEAD = """
from mcore_rl.trainers.one_step_off import OneStepOffTrainer

class Ahead(OneStepOffTrainer):
    pass

class Other:
    mode = "sync"

class Wrong:
    mode = "off"

def function(): ...
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "ahead.py").write_text(AHEAD)
    return f"{tmp_path / 'ahead.py'}"


def test_every_loop_has_a_trainer_that_says_its_name():
    assert {name: load_trainer(name).mode for name in TRAINERS} == {m: m for m in MODES}


def test_a_trainer_by_import_path_follows_the_rules_of_its_loop(path):
    mode = f"{path}:Ahead"
    assert load_trainer(mode).__name__ == "Ahead"
    assert get_loop(TrainerConfig(mode=mode)) == "one_step_off"
    shared = ["recipe=quickstart", f"trainer.mode={mode}", "placement.rollout=shared"]
    with pytest.raises(ConfigError, match="trains while they generate"):
        validate_rl(compose_config(RLConfig, shared))


@pytest.mark.parametrize("name", ["Wrong", "function", "missing"])
def test_an_import_path_that_is_no_trainer_is_refused_before_a_run(path, name):
    with pytest.raises(ConfigError, match=r"trainer\.mode='.*allowed|has no function"):
        get_loop(TrainerConfig(mode=f"{path}:{name}"))


def test_a_class_that_is_no_trainer_is_refused_by_name(path):
    with pytest.raises(ConfigError, match=r"is no subclass of mcore_rl\.trainers\.base\.RLTrainer"):
        load_trainer(f"{path}:Other")
