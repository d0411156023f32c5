"""Faults of settings, files, first rows and rewards, before large libraries are imported."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import (
    DataConfig,
    DPOConfig,
    EvalConfig,
    ModelConfig,
    RewardConfig,
    RLConfig,
    SFTConfig,
)
from mcore_rl.jobs.early_checks import check_early

ROW = {"messages": [{"role": "user", "content": "1 + 2?"}], "answer": "3"}
REWARDS = """\
def equal(text, fields, finish_reason, num_tokens, messages):
    assert finish_reason == "stop" and num_tokens > 0
    assert messages == [{"role": "user", "content": "1 + 2?"}]
    return {"reward": float(text == fields["answer"])}


def look_up(fields):
    return fields["gold"]


def absent(text, fields, finish_reason):
    return {"reward": look_up(fields)}


def nothing(text, fields, finish_reason):
    return None


async def batched(texts, fields, finish_reasons):
    return [{"reward": 1.0} for text in texts[1:]]


def ask(text, fields, finish_reason, post):
    raise AssertionError


def later(text, fields, finish_reason, rewards):
    raise AssertionError
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "own.py").write_text(REWARDS)
    pq.write_table(pa.Table.from_pylist([ROW, ROW]), "train.parquet")
    # The second row is damaged: only the first one is read.
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW) + "\n{\n")
    return tmp_path


def configure(file: str = "train.parquet", **settings) -> RLConfig:
    reward = RewardConfig(settings.pop("reward", "final_number"))
    data = DataConfig(train_file=file, **settings)
    return RLConfig(model=ModelConfig("model"), data=data, reward=reward)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: configure(prompt_column="p"), r"train.parquet': row 0 has no column 'p'"),
        (lambda: configure("train.jsonl", answer_column="a"), "no column 'a' .data.answer_column"),
        (lambda: configure("no.jsonl"), "data.train_file='no.jsonl' does not exist"),
        (lambda: configure("own.py"), "data.train_file='own.py' cannot be read as parquet"),
        (lambda: configure(test_files={"m": "no.jsonl"}), "data.test_files.m='no.jsonl' does not"),
        (lambda: configure(max_prompt_tokens=0), "data.max_prompt_tokens=0; allowed"),
        (lambda: EvalConfig(model=ModelConfig("no")), "data.sets"),
        (
            lambda: RLConfig(model=ModelConfig("no"), data=DataConfig(train_file="own.py")),
            "'no' does",
        ),
        (lambda: fill(SFTConfig(), messages_column="chat"), "no column 'chat' .data.messages_col"),
        (lambda: fill(DPOConfig()), "no column 'prompt' .data.prompt_column"),
    ],
)
def test_faults_of_settings_and_first_rows_are_named(folder, config, message):
    with pytest.raises(ConfigError, match=message):
        check_early(config())


def fill(config: SFTConfig | DPOConfig, **data) -> SFTConfig | DPOConfig:
    config.model.path, config.data.train_file = "model", "train.jsonl"
    for name, value in data.items():
        setattr(config.data, name, value)
    return config


def test_rewards_are_not_tried_with_rows_to_imitate(folder):
    config = configure("own.py:ask", reward="own.py:absent")  # rows of a function are not read
    pq.write_table(pa.Table.from_pylist([ROW | {"response": "3"}]), "warm.parquet")
    config.warm_start.num_steps, config.warm_start.train_file = 1, "warm.parquet"
    check_early(config)


def test_published_model_is_left_to_what_reads_its_config(folder):
    config = configure()
    config.model.path = "deepseek-ai/DeepSeek-V3"
    check_early(config)


def test_only_first_rows_are_read(folder):
    check_early(configure("train.jsonl"))
    check_early(configure("own.py:ask"))  # rows of a function are not read


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", r"raised KeyError: 'gold' \(own.py:8: return fields\[\"gold\"\]\); it must"),
        ("nothing", "returned None, which is no number and no dict"),
        ("batched", r"returned \[\] for 1 responses"),
    ],
)
def test_reward_that_fails_is_named_with_its_line_and_row(folder, function, message):
    config = configure(reward=f"own.py:{function}")
    where = "row 0 of data.train_file='train.parquet'.*the response '3'"
    with pytest.raises(ConfigError, match=f"reward.name='own.py:{function}' {message}.*{where}"):
        check_early(config)


def test_failing_reward_is_a_line_if_a_run_would_go_on(folder, capsys):
    config = configure(reward="own.py:nothing")
    config.reward.on_error = "zero"
    check_early(config)
    assert "returned None, which is no number and no dict" in (out := capsys.readouterr().out)
    assert "(reward.on_error='zero': the run goes on)" in out


def test_reward_is_called_once_with_an_answer_and_clients_are_not(folder, capsys):
    config = configure()
    config.reward.terms = {
        "right": {"name": "own.py:equal"},
        "judged": {"name": "own.py:ask"},
        "later": {"name": "own.py:later"},
    }
    check_early(config)
    assert capsys.readouterr().out == (
        "reward: own.py:equal called once, with row 0 of data.train_file='train.parquet'\n"
    )


def test_no_large_library_is_imported_before_first_rows_are_checked(folder):
    program = (
        "import sys; from mcore_rl.cli.main import run_command; "
        "status = run_command('rl', ['model.path=model', 'data.train_file=train.parquet', "
        "'data.prompt_column=p', 'reward.name=own.py:equal']); "
        "sys.exit({'torch', 'transformers', 'ray', 'vllm'} & {*sys.modules} or status)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, "no column 'p'" in run.stderr) == (2, True), run.stderr
