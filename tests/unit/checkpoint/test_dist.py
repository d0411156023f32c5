"""Stamps of distributed checkpoints, and the comparison of a checkpoint with a model."""

from __future__ import annotations

import json

import pytest
from megatron.core import package_info

from mcore_rl.checkpoint import dist
from mcore_rl.config.errors import ConfigError

STORED = {"embedding": (132, 64), "layers.norm": (2, 64), "optimizer.state.exp_avg.x": (4,)}


def stamp(folder, version, **facts):
    (folder / "mcore_rl.json").write_text(json.dumps({"megatron_core": version, **facts}))


def test_a_stamp_comes_back_with_its_facts(tmp_path):
    stamp(tmp_path, package_info.__version__, dtype="float32")
    expected = {"megatron_core": package_info.__version__, "dtype": "float32"}
    assert dist.read_stamp(tmp_path) == expected


@pytest.mark.parametrize("version", ["0.9.0", "0.16.0", package_info.__version__])
def test_what_an_older_version_wrote_is_read(tmp_path, version):
    stamp(tmp_path, version)
    assert dist.read_stamp(tmp_path)["megatron_core"] == version


@pytest.mark.parametrize("version", ["0.100.0", "1.0.0", "99.1rc1"])
def test_what_a_newer_version_wrote_is_refused(tmp_path, version):
    stamp(tmp_path, version)
    with pytest.raises(ConfigError, match=f"written by megatron-core {version}"):
        dist.read_stamp(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not readable"), ("[]", "does not say"), ('{"megatron_core": 3}', "does not say")],
)
def test_a_damaged_stamp_is_refused(tmp_path, text, message):
    (tmp_path / "mcore_rl.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        dist.read_stamp(tmp_path)


def test_a_folder_that_is_missing_or_has_no_stamp_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        dist.read_stamp(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"not a complete checkpoint: it has no mcore_rl.json"):
        dist.read_stamp(tmp_path)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"embedding": ((136, 64), True)}, []),  # padding follows from the layout
        ({"embedding": ((132, 65), True)}, ["embedding has shape (132, 64) there and (132, 65)"]),
        ({"layers.norm": ((3, 64), False)}, ["layers.norm has shape (2, 64) there and (3, 64)"]),
        ({"layers.norm": ((2, 64, 1), False)}, ["layers.norm has shape (2, 64) there and"]),
        ({"layers.bias": ((2, 64), False)}, ["it has no layers.bias"]),
        ({"layers.norm": None}, ["the model has no layers.norm"]),
    ],
)
def test_a_checkpoint_of_another_model_is_told_by_names_and_shapes(changes, found):
    wanted = {"embedding": ((132, 64), True), "layers.norm": ((2, 64), False)} | changes
    wanted = {key: value for key, value in wanted.items() if value is not None}
    problems = dist.differences(STORED, wanted)
    assert len(problems) == len(found)
    assert all(problem.startswith(start) for problem, start in zip(problems, found, strict=True))


def test_optimizer_state_may_stay_unread_but_not_be_missing():
    assert dist.differences(STORED, {}) == [
        "the model has no embedding",
        "the model has no layers.norm",
    ]
    wanted = {key: (shape, False) for key, shape in STORED.items()}
    wanted["optimizer.state.exp_avg_sq.x"] = ((4,), False)
    assert dist.differences(STORED, wanted) == ["it has no optimizer.state.exp_avg_sq.x"]
