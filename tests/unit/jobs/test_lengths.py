"""Lengths that are not set: as many tokens as a model has positions for, and a line about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.config.schema import DPOConfig, EvalConfig, RLConfig, SFTConfig
from mcore_rl.jobs.lengths import fill_evaluation_lengths, fill_lengths, fill_train_length


def write_model(folder: Path, positions: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    return str(folder)


# positions; prompt, response and evaluation's response as set; prompt and response as filled
LENGTHS = [
    (4096, (None, None, None), (1024, 1024)),
    (2048, (None, None, None), (1024, 1024)),
    (512, (None, None, None), (256, 256)),
    (511, (None, None, None), (256, 255)),
    (512, (100, None, None), (100, 412)),
    (512, (None, 500, None), (12, 500)),
    (512, (None, None, 400), (112, 400)),
    (512, (300, 300, None), (300, 300)),  # too long: what is set is refused later
    (512, (None, 600, None), (1, 600)),
    (512, (600, None, None), (600, 1)),
]


@pytest.mark.parametrize(("positions", "given", "filled"), LENGTHS)
def test_prompt_and_response_share_the_positions_of_the_model(tmp_path, positions, given, filled):
    config = RLConfig()
    config.model.path = write_model(tmp_path / "model", positions)
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = given[:2]
    config.evaluation.max_response_tokens = given[2]
    config = fill_lengths(config)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == filled


def test_a_line_names_each_length_below_the_usual_one_that_is_not_set(tmp_path, capsys):
    config = RLConfig()
    config.model.path = write_model(tmp_path / "model", 512)
    config.rollout.max_response_tokens = 32
    fill_lengths(fill_lengths(config))  # the second time all are set
    line = "data.max_prompt_tokens=480: the model has 512 positions\n"
    assert capsys.readouterr().err == line


def test_the_models_of_tasks_have_512_positions_before_they_are_made():
    config = RLConfig()
    config.task.name = "last_digit"
    assert fill_lengths(config).max_sequence_tokens == 512


def test_a_frozen_model_with_fewer_positions_has_conversations_of_as_many(tmp_path, capsys):
    config = RLConfig()
    config.model.path = write_model(tmp_path / "policy", 4096)
    small, large = write_model(tmp_path / "small", 1000), write_model(tmp_path / "large", 5000)
    set_one = {"path": small, "max_context": 1500}
    config.models = {"judge": {"path": small}, "user": {"path": large}, "set": set_one, "same": {}}
    judge = {"path": small, "max_context": 1000}
    assert fill_lengths(config).models == {**config.models, "judge": judge}
    assert "max_context" not in config.models["judge"]
    line = "models.judge.max_context=1000: the model has 1000 positions\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("schema", [SFTConfig, DPOConfig])
def test_rows_of_examples_are_as_long_as_the_positions_of_the_model(tmp_path, capsys, schema):
    config = schema()
    config.model.path = write_model(tmp_path / "model", 512)
    filled = fill_train_length(config)
    assert (filled.data.max_tokens, config.data.max_tokens) == (512, None)
    assert capsys.readouterr().err == "data.max_tokens=512: the model has 512 positions\n"
    config.data.max_tokens = 600  # refused later
    assert fill_train_length(config).data.max_tokens == 600
    config.model.path, config.data.max_tokens = write_model(tmp_path / "long", 40960), None
    assert fill_train_length(config).data.max_tokens == 4096


def test_ranks_after_the_first_say_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "1")
    config = SFTConfig()
    config.model.path = write_model(tmp_path / "model", 512)
    assert fill_train_length(config).data.max_tokens == 512
    assert capsys.readouterr().err == ""


def test_an_evaluation_shares_the_positions_of_its_model(tmp_path):
    model, config = write_model(tmp_path / "model", 512), EvalConfig()
    config.rollout.max_response_tokens = 400
    filled = fill_evaluation_lengths(config, model)
    assert (filled.data.max_prompt_tokens, filled.rollout.max_response_tokens) == (112, 400)
