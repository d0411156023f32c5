"""The rules between the settings of sft, dpo and rm."""

import re

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_train import list_train_warnings, validate_train
from mcore_rl.config.schema import DPOConfig, SFTConfig, TrainConfig


def config(kind: type[TrainConfig] = SFTConfig, **changes) -> TrainConfig:
    made = kind()
    named = {"model__path": "m", "data__train_file": "a", "data__test_file": "b"}
    for key, value in (named | changes).items():
        *parts, name = key.split("__")
        holder = made
        for part in parts:
            holder = getattr(holder, part)
        setattr(holder, name, value)
    return made


BAD = [
    (
        {"evaluation__every": 5, "data__test_file": ""},
        "evaluation.every=5 needs data.test_file or data.test_files",
    ),
    (
        {"checkpoint__keep_best": "-eval/test/loss", "data__test_file": ""},
        "checkpoint.keep_best='-eval/test/loss' needs data.test_file",
    ),
    (
        {"checkpoint__keep_best": "-eval/test/loss", "trainer__save_every": 4},
        "checkpoint.keep_best='-eval/test/loss': trainer.save_every=4",
    ),
    ({"data__train_file": ""}, "data.train_file='' names nothing; it is needed"),
    ({"data__train_files": ["x"]}, "data.train_file='a' and data.train_files=['x']; allowed: one"),
    (
        {"data__train_file": "", "data__train_files": ["x", ""]},
        "data.train_files[1]='' names nothing",
    ),
    (
        {
            "data__train_file": "",
            "data__train_files": ["x", "y"],
            "data__train_weights": [1.0],
        },
        "data.train_weights=[1.0]: 2 files in data.train_files",
    ),
    ({"data__test_files": {"a": "x"}}, "data.test_file='b' and data.test_files={'a': 'x'}"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[m for _, m in BAD])
def test_a_bad_setting_is_named(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_train(config(DPOConfig, **changes))


def test_the_best_checkpoint_can_be_that_of_the_held_out_loss():
    validate_train(
        config(checkpoint__keep_best="-eval/test/loss", trainer__save_every=4, evaluation__every=2)
    )


def test_held_out_rows_that_are_trained_on_are_doubted():
    made = config(data__test_file="", data__test_files={"new": "c", "old": "a"})
    [line] = list_train_warnings(made)
    assert line.startswith("data.test_files.old='a' is data.train_file")
    made.data.train_file, made.data.train_files = "", ["x", "a"]
    [line] = list_train_warnings(made)
    assert line.startswith("data.test_files.old='a' is in data.train_files")


def test_several_files_take_the_place_of_one():
    validate_train(
        config(data__train_file="", data__train_files=["x", "y"], data__train_weights=[1.0, 3.0])
    )
