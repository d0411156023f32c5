"""Checkpoint info of distributed checkpoints, and damage that shows in values."""

from __future__ import annotations

import json

import pytest
import torch
from megatron.core import package_info

from mcore_rl.checkpoint.files import read_checkpoint_info, require_finite
from mcore_rl.config.errors import ConfigError

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def write_info(folder, version, **facts):
    (folder / "mcore_rl.json").write_text(json.dumps({"megatron_core": version, **facts}))


def test_checkpoint_info_comes_back_with_its_facts(tmp_path):
    write_info(tmp_path, package_info.__version__, dtype="float32")
    expected = {"megatron_core": package_info.__version__, "dtype": "float32"}
    assert read_checkpoint_info(tmp_path) == expected


@pytest.mark.parametrize("version", ["0.9.0", "0.16.0", package_info.__version__])
def test_what_an_older_version_wrote_is_read(tmp_path, version):
    write_info(tmp_path, version)
    assert read_checkpoint_info(tmp_path)["megatron_core"] == version


@pytest.mark.parametrize("version", ["0.100.0", "1.0.0", "99.1rc1"])
def test_what_a_newer_version_wrote_is_refused(tmp_path, version):
    write_info(tmp_path, version)
    with pytest.raises(ConfigError, match=f"written by megatron-core {version}"):
        read_checkpoint_info(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is a JSON list"),
        ('{"megatron_core": 3}', "does not say"),
    ],
)
def test_damaged_checkpoint_info_is_refused(tmp_path, text, message):
    (tmp_path / "mcore_rl.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_checkpoint_info(tmp_path)


def test_a_folder_that_is_missing_or_has_no_checkpoint_info_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_checkpoint_info(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"not a complete checkpoint: it has no mcore_rl.json"):
        read_checkpoint_info(tmp_path)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (3, 101), (63, 256)])
def test_the_first_value_that_is_not_finite_is_named(dtype, value, place):
    tensor = torch.zeros(64, 257, dtype=dtype)
    tensor[place] = tensor[63, 256] = value
    with pytest.raises(ConfigError) as caught:
        require_finite("w", tensor)
    assert str(caught.value) == f"tensor w is damaged: it has {value} at {list(place)}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_are_finite(dtype):
    largest = torch.finfo(dtype).max
    require_finite("w", torch.full((300, 300), largest, dtype=dtype))
    require_finite("w", torch.tensor([-largest, largest, 0.0], dtype=dtype))
    require_finite("w", torch.empty(0, 3, dtype=dtype))
