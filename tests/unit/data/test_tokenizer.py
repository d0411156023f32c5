"""Tokenizers of checkpoint folders."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.tokenizer import read_stop_ids


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config.json": {"eos_token_id": [7, 9]}}, (7, 9)),
        ({"generation_config.json": {"eos_token_id": 7}, "config.json": {"eos_token_id": 9}}, (7,)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 9}}, ()),
        ({"config.json": {"eos_token_id": [9]}}, (9,)),
        ({"config.json": {"eos_token_id": None}}, ()),
        ({"config.json": {"text_config": {"eos_token_id": [7, 9]}}}, (7, 9)),
        ({"config.json": {"eos_token_id": 7, "text_config": {"eos_token_id": 9}}}, (7,)),
        ({"config.json": {"eos_token_id": None, "text_config": {"eos_token_id": 0}}}, (0,)),
        ({"config.json": {"vision_config": {"eos_token_id": 9}, "text_config": None}}, ()),
        ({"generation_config.json": {}, "config.json": {"text_config": {"eos_token_id": 9}}}, ()),
        ({}, ()),
    ],
)
def test_stop_ids_are_those_that_vllm_reads(files, ids, tmp_path):
    for name, contents in files.items():
        (tmp_path / name).write_text(json.dumps(contents))
    assert read_stop_ids(tmp_path) == ids


@pytest.mark.parametrize("outer", [{}, {"eos_token_id": 7}])
def test_stop_ids_of_a_wrapper_are_those_of_transformers(outer, tmp_path):
    from transformers import AutoConfig, GenerationConfig  # slow to import

    config = {"model_type": "qwen3_vl", "text_config": {"eos_token_id": [5, 9]}, **outer}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    expected = GenerationConfig.from_model_config(loaded).eos_token_id
    assert read_stop_ids(tmp_path) == (*(expected if isinstance(expected, list) else [expected]),)


@pytest.mark.parametrize("value", ["</s>", [7, "</s>"], -1, True, {"id": 7}, [[7]], 1.5])
def test_stop_ids_that_are_no_token_ids_are_refused_with_file_and_value(value, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError) as caught:
        read_stop_ids(tmp_path, "models.user.path")
    message = str(caught.value)
    assert message.startswith(f"models.user.path={str(tmp_path)!r}: generation_config.json has")
    assert f"eos_token_id={value!r}; allowed: a token id, a list of them, or null" in message


_MIXIN = """
import sys
import torch
from mcore_rl.data.tokenizer import import_transformers

transformers = import_transformers()
assert transformers.AutoTokenizer and "transformers.generation.utils" not in sys.modules
assert import_transformers() is transformers
from transformers.models.auto import auto_factory

class Remote(torch.nn.Module):
    def prepare_inputs_for_generation(self): ...

with_mixin = auto_factory.add_generation_mixin_to_remote_model(Remote)
from transformers import AutoModelForCausalLM, GenerationMixin

assert issubclass(with_mixin, GenerationMixin) and GenerationMixin.__module__.endswith("utils")
assert AutoModelForCausalLM
"""


@pytest.mark.job
def test_models_generate_after_tokenizers_were_imported_without_generation():
    ended = subprocess.run([sys.executable, "-c", _MIXIN], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
