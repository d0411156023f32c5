"""What a checkpoint folder says of its tokenizer."""

from __future__ import annotations

import json

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.tokenizer import stop_ids_of


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config.json": {"eos_token_id": [7, 9]}}, (7, 9)),
        ({"generation_config.json": {"eos_token_id": 7}, "config.json": {"eos_token_id": 9}}, (7,)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 9}}, ()),
        ({"config.json": {"eos_token_id": [9]}}, (9,)),
        ({"config.json": {"eos_token_id": None}}, ()),
        ({}, ()),
    ],
)
def test_stop_ids_are_those_that_vllm_reads(files, ids, tmp_path):
    for name, contents in files.items():
        (tmp_path / name).write_text(json.dumps(contents))
    assert stop_ids_of(tmp_path) == ids


@pytest.mark.parametrize("value", ["</s>", [7, "</s>"], -1, True, {"id": 7}, [[7]], 1.5])
def test_stop_ids_that_are_no_token_ids_are_refused_with_file_and_value(value, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError) as caught:
        stop_ids_of(tmp_path, "models.user.path")
    told = str(caught.value)
    assert told.startswith(f"models.user.path={str(tmp_path)!r}: generation_config.json has")
    assert f"eos_token_id={value!r}; allowed: a token id, a list of them, or null" in told
