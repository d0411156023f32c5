"""Checkpoint info of distributed checkpoints."""

from __future__ import annotations

import json

import pytest
from megatron.core import package_info

from mcore_rl.checkpoint.checkpoint_info import read_checkpoint_info
from mcore_rl.config.errors import ConfigError


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
