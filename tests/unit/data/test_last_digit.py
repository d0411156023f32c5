import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.examples.tasks import tiny_model
from mcore_rl.examples.tasks.last_digit import (
    NUM_WARM_START,
    PreparedTask,
    answer,
    direct_response,
    prepare,
    question,
    split_problems,
    worked_response,
)
from mcore_rl.rewards.registry import get_reward

SEED, WORKED_SHARE = 3, 0.35


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> PreparedTask:
    return prepare(tmp_path_factory.mktemp("run") / "task", SEED, WORKED_SHARE)


def questions(path) -> list[str]:
    return [chat[0]["content"] for chat in pq.read_table(path)["messages"].to_pylist()]


def files_of(task: PreparedTask) -> dict[str, bytes]:
    root = task.model_dir.parent
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}


def test_a_problem_worked_by_hand():
    problem = (5, (("+", 2), ("*", 7), ("+", 4)))
    assert question(problem) == (
        "Start with 5. Add 2. Multiply by 7. Add 4. What is the last digit?"
    )
    assert worked_response(problem) == "5+2=7\n7*7=49\n9+4=13\n#### 3"
    assert direct_response(problem) == "#### 3"
    assert answer(problem) == "3"


def test_every_answer_is_the_last_digit_of_the_whole_calculation():
    for side in split_problems():
        for problem in side:
            value, chain = problem
            for sign, n in chain:
                value = value + n if sign == "+" else value * n
            assert answer(problem) == str(value % 10)


def test_every_worked_and_direct_answer_earns_the_reward():
    reward = get_reward("final_number")
    for problem in split_problems()[1]:
        for response in (worked_response(problem), direct_response(problem)):
            parts = reward(response, {"answer": answer(problem)}, "stop")
            assert parts == {"reward": 1.0, "format": 1.0}


def test_splits_are_disjoint_and_cover_the_problems(task):
    train, test = set(questions(task.train_file)), set(questions(task.test_file))
    assert (len(train), len(test)) == (10805, 1174)
    assert not train & test
    assert set(questions(task.warm_start_file)) <= train


def test_held_out_problems_do_not_depend_on_the_seed(task, tmp_path):
    other = prepare(tmp_path / "task", SEED + 1, WORKED_SHARE)
    assert other.test_file.read_bytes() == task.test_file.read_bytes()
    for name in ("train_file", "warm_start_file"):
        assert getattr(other, name).read_bytes() != getattr(task, name).read_bytes()
    weights, tokens = "model/model.safetensors", "model/tokenizer.json"
    assert files_of(other)[weights] != files_of(task)[weights]
    assert files_of(other)[tokens] == files_of(task)[tokens]


@pytest.mark.job
def test_the_same_seed_writes_the_same_bytes_in_another_process(task, tmp_path):
    # Another process, because Python's and the tokenizer trainer's hashes differ between processes.
    code = (
        "import sys; from pathlib import Path; "
        "from mcore_rl.examples.tasks.last_digit import prepare; "
        f"prepare(Path(sys.argv[1]), {SEED}, {WORKED_SHARE})"
    )
    directory = tmp_path / "task"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, env=environment)
    again = {
        str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()
    }
    assert again == files_of(task)


@pytest.mark.parametrize("worked_share", [0.0, 1.0])
def test_worked_share_is_the_share_of_worked_answers(tmp_path, worked_share):
    assert worked_share_of(prepare(tmp_path / "task", SEED, worked_share)) == worked_share


def worked_share_of(made: PreparedTask) -> float:
    responses = pq.read_table(made.warm_start_file)["response"].to_pylist()
    assert len(responses) == NUM_WARM_START == 240 * 96
    return sum("=" in response for response in responses) / len(responses)


def test_warm_start_mixes_both_styles(task):
    assert worked_share_of(task) == pytest.approx(WORKED_SHARE, abs=0.02)


def test_the_tokenizer_gives_every_digit_a_token_and_gives_every_text_back(task):
    tokenizer = load_tokenizer(task.model_dir)
    assert tokenizer.eos_token == "<|im_end|>"
    for problem in split_problems()[1]:
        for text in (question(problem), worked_response(problem)):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids) == text
            tokens = tokenizer.convert_ids_to_tokens(ids)
            digits = [token for token in tokens if any(c.isdigit() for c in token)]
            assert all(len(token) == 1 for token in digits)
            assert len(digits) == sum(c.isdigit() for c in text)


def test_the_chat_template_is_chatml(task):
    tokenizer = load_tokenizer(task.model_dir)
    chat = [{"role": "user", "content": "Add 2."}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nAdd 2.<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.eos_token_id) == 1  # the markers are tokens, not spelled out


def test_transformers_loads_the_checkpoint_and_generates(task):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task.model_dir)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == 1_429_568
    assert (model.config.vocab_size, model.config.num_experts) == (384, 8)
    tokenizer = load_tokenizer(task.model_dir)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    output = model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, do_sample=False)
    assert output.shape[1] > 3


@pytest.mark.parametrize("seed", [0, 1, SEED])
def test_weights_are_those_of_transformers_own_model(tmp_path, task, seed):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = load_tokenizer(task.model_dir)
    tiny_model.save_checkpoint(tmp_path, tokenizer, seed)
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(Qwen3MoeConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path / "its")
    actual, second = (load_file(p / "model.safetensors") for p in (tmp_path, tmp_path / "its"))
    assert actual.keys() == second.keys()
    assert [name for name in second if not torch.equal(actual[name], second[name])] == []
    configs = [json.loads((p / "config.json").read_text()) for p in (tmp_path, tmp_path / "its")]
    assert configs[0] == configs[1]


def test_making_the_model_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    prepare(tmp_path / "task", SEED, WORKED_SHARE)
    assert torch.equal(torch.rand(1), expected)


def test_an_earlier_preparation_is_replaced_whole(task, tmp_path):
    directory = tmp_path / "task"
    made = prepare(directory, SEED + 1, 0.9)
    (directory / "stray").write_text("left over")
    assert files_of(prepare(directory, SEED, WORKED_SHARE)) == files_of(task)
    assert made.model_dir.is_dir()
    assert os.listdir(tmp_path) == ["task"]


def test_a_folder_that_is_not_ours_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "thesis.tex").write_text("ten years of work")
    with pytest.raises(ConfigError, match="was not made by this task"):
        prepare(tmp_path / "task", SEED, WORKED_SHARE)
    assert os.listdir(tmp_path / "task") == ["thesis.tex"]


def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch):
    from mcore_rl.examples.tasks import tiny_model

    def no_space(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(tiny_model, "save_checkpoint", no_space)
    with pytest.raises(OSError, match="no space left"):
        prepare(tmp_path / "task", SEED, WORKED_SHARE)
    assert os.listdir(tmp_path) == []


def test_settings_of_the_task_are_written_down(task):
    settings = json.loads((task.model_dir.parent / "task.json").read_text())
    assert settings == {"task": "last_digit", "seed": SEED, "worked_share": WORKED_SHARE}
