"""Files as publishers ship them, with their columns, become files that trainers read."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.cli import data as command
from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.main import main
from mcore_rl.config.rules import validate_rl
from mcore_rl.config.schema import DataConfig, RLConfig
from mcore_rl.data.datasets import load_prompts
from mcore_rl.data.files import open_rows
from mcore_rl.data.publishers import PUBLISHERS
from mcore_rl.data.rows import RowColumn, read_preference_rows
from mcore_rl.examples.tasks import tiny_model
from mcore_rl.rewards.registry import get_reward
from tests.pages import select_commands

GSM8K = [
    {"question": "Natalia sold 48 clips in April, and half as many in May. How many in all?",
     "answer": "She sold 48/2 = <<48/2=24>>24 in May.\n48+24 = <<48+24=72>>72 in all.\n#### 72"},
    {"question": "How much?", "answer": "1000*2.125 = <<1000*2.125=2125>>2125\n#### $2,125"},
    {"question": "How cold?", "answer": "3-8 = -5\n#### -5"},
    {"question": "How long?", "answer": "5/2 = 2.5\n#### 2.5"},
]  # fmt: skip
MATH = [
    {"problem": r"What is $\frac{1}{2}+\frac{1}{3}$?", "level": "Level 1", "type": "Prealgebra",
     "solution": r"Not $\boxed{2}$ but $\boxed{\frac{5}{6}}$."},
    {"problem": "Which set?", "level": "Level ?", "type": "Algebra",
     "solution": r"It is $\boxed{\left\{ x : x > 0 \right.}$"},
    {"problem": "And this?", "level": "Level 5", "type": "Geometry", "solution": r"So $\fbox{12}$"},
]  # fmt: skip
MATH_500 = {
    "problem": "Convert $(0,3)$.", "solution": r"$\boxed{(3,\frac{\pi}{2})}$", "level": 2,
    "answer": r"\left( 3, \frac{\pi}{2} \right)", "subject": "Precalculus", "unique_id": "test/1",
}  # fmt: skip


def dapo(question: str, truth: str, index: str) -> dict:
    content = f"Solve it. The last line is Answer: $Answer.\n\n{question}"
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


DAPO = [
    dapo("1+1?", "2", "a"),
    dapo("1+2?", "3", "b"),
    dapo("1+1?", "2", "a"),
    dapo("1+1?", "3", "c"),
]
COUNTDOWN = [{"target": 98, "nums": [44, 19, 35]}, {"target": 64, "nums": [63, 95, 96]}]
USER_MESSAGE = {"role": "user", "content": "Why is the sky blue?"}


def build_turns(*contents: str) -> list[dict]:
    turns = [{"role": "assistant", "content": c} for c in contents]
    more = {"role": "user", "content": "More."}
    return [m for turn in turns for m in (more, turn)][1:]


def binarized(chosen: list[dict], rejected: list[dict], *scores: float) -> dict:
    return {
        "prompt": USER_MESSAGE["content"], "prompt_id": "x", "chosen": chosen, "rejected": rejected,
        "messages": chosen, "score_chosen": scores[0], "score_rejected": scores[1],
    }  # fmt: skip


ULTRAFEEDBACK = [
    binarized(
        [USER_MESSAGE, *build_turns("Scattering.")],
        [USER_MESSAGE, *build_turns("It is.")],
        8.5,
        3.0,
    ),
    binarized(
        [USER_MESSAGE, *build_turns("The same.")],
        [USER_MESSAGE, *build_turns("The same.")],
        7.0,
        7.0,
    ),
    binarized(
        [USER_MESSAGE, *build_turns("A.", "B.")],
        [USER_MESSAGE, *build_turns("A.", "C.")],
        6.0,
        6.0,
    ),
    binarized([USER_MESSAGE, *build_turns("")], [USER_MESSAGE, *build_turns("C.")], 6.0, 6.0),
]
HH = [
    {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\n\nAssistant: Because:\n\nso.",
     "rejected": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\n\nAssistant: No."},
    {"chosen": "\n\nHuman: A\n\nAssistant: B", "rejected": "\n\nHuman: C\n\nAssistant: D"},
]  # fmt: skip


def parquet(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def jsonl(path: Path, rows: list[dict]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def run(monkeypatch, capsys, *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "data", *map(str, words)])
    status = main()
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture
def made(monkeypatch, capsys, tmp_path):
    """Rows that the command makes, and what it prints; it leaves the output and nothing else."""

    def make(*words: object) -> tuple[list[dict], str]:
        before, output = set(tmp_path.iterdir()), tmp_path / "made.parquet"
        status, out, err = run(monkeypatch, capsys, *words, "--output", output)
        assert (status, err) == (0, "")
        assert set(tmp_path.iterdir()) == before | {output}
        return pq.read_table(output).to_pylist(), out.removeprefix(f"{output}: ")

    return make


@pytest.mark.parametrize("write", [parquet, jsonl])
def test_gsm8k(made, tmp_path, write):
    path = write(tmp_path / f"train.{write.__name__}", GSM8K)
    rows, out = made("gsm8k", "--input", path)
    assert out == "4 of 4 rows; left out: none\n"
    assert [row["answer"] for row in rows] == ["72", "2125", "-5", "2.5"]
    instruction = PUBLISHERS["gsm8k"].instruction
    user_message = {"role": "user", "content": f"{GSM8K[0]['question']}\n{instruction}"}
    assert rows[0]["messages"] == [user_message]
    assert rows[0]["solution"] == GSM8K[0]["answer"]
    reward = get_reward("final_number")
    for row, text in zip(rows, ["72", "$2,125", "-5", "2.5"], strict=True):
        assert reward(f"So:\n#### {text.lstrip('$')}", row, "stop")["reward"] == 1.0


def test_math_in_parquet_files_by_subject_and_math_500(made, tmp_path):
    inputs = [parquet(tmp_path / name / "train.parquet", [row]) for name, row in zip("ab", MATH)]  # noqa: B905
    inputs.append(jsonl(tmp_path / "test.jsonl", [MATH_500]))
    rows, out = made("math", "--input", *inputs, "--instruction", "")
    assert out == "3 of 3 rows; left out: none\n"
    answers = [r"\frac{5}{6}", r"\left\{ x : x > 0 \right.", MATH_500["answer"]]
    assert [row["answer"] for row in rows] == answers
    assert [row["level"] for row in rows] == [1, None, 2]
    assert [row["subject"] for row in rows] == ["Prealgebra", "Algebra", "Precalculus"]
    assert rows[0]["messages"] == [{"role": "user", "content": MATH[0]["problem"]}]


def test_math_as_a_folder_of_json_files(made, monkeypatch, capsys, tmp_path):
    for number, row in enumerate(MATH):
        path = tmp_path / "MATH" / row["type"].lower() / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=1))
    rows, _ = made("math", "--input", tmp_path / "MATH")
    assert sorted(row["answer"] for row in rows) == [
        "12",
        r"\frac{5}{6}",
        r"\left\{ x : x > 0 \right.",
    ]
    path.write_text(json.dumps({**MATH[2], "solution": "None."}))
    _, _, err = run(
        monkeypatch, capsys, "math", "--input", tmp_path / "MATH", "--output", "x.parquet"
    )
    assert f"--input='{path}': row 0 of column 'solution' is 'None.'; it must be a solution" in err


def test_dapo_is_made_with_each_prompt_once(made, tmp_path):
    rows, out = made("dapo17k", "--input", parquet(tmp_path / "dapo.parquet", DAPO))
    assert out == (
        "2 of 4 rows; left out: 1 (prompt seen before, same answer), "
        "1 (prompt seen before, other answer)\n"
    )
    assert [row["answer"] for row in rows] == ["2", "3"]
    assert [row["messages"] for row in rows] == [
        [{"role": "user", "content": row["prompt"][0]["content"]}] for row in DAPO[:2]
    ]
    assert rows[0]["source"] == "math_dapo"


def test_countdown_and_a_reward_for_it(made, tmp_path):
    rows, _ = made("countdown", "--input", parquet(tmp_path / "x.parquet", COUNTDOWN))
    assert [(row["nums"], row["target"], row["answer"]) for row in rows] == [
        ([44, 19, 35], 98, "98"),
        ([63, 95, 96], 64, "64"),
    ]
    assert "[44, 19, 35], make an equation that equals 98." in rows[0]["messages"][0]["content"]
    reward = get_reward(f"{Path(__file__).parents[3]}/examples/countdown.py:countdown")
    for text, expected in {
        "<answer>1</answer> <answer>44 + 19 + 35</answer>": (1, 1),
        "<answer>(44 + 35) + 19</answer>": (1, 1),
        "<answer>44 + 54</answer>": (0, 1),
        "<answer>49 * (44 - 44 + 2)</answer>": (0, 1),
        "<answer>44 + 19</answer>": (0, 1),
        "44 + 19 + 35": (0, 0),
        "<answer>44 / (19 - 19)</answer>": (0, 0),
        "<answer>9**9**9</answer>": (0, 0),
        "<answer>44 +</answer>": (0, 0),
    }.items():
        score = reward(text, rows[0], "stop")
        assert (score["reward"], score["format"]) == expected, text


def test_ultrafeedback_rows_are_preference_rows(made, tmp_path):
    rows, out = made("ultrafeedback", "--input", parquet(tmp_path / "x.parquet", ULTRAFEEDBACK))
    assert out == (
        "2 of 4 rows; left out: 1 (chosen and rejected are the same), "
        "1 (an answer is empty, or does not alternate with the user)\n"
    )
    assert rows[0] == {
        "prompt": [USER_MESSAGE], "chosen": build_turns("Scattering."),
        "rejected": build_turns("It is."), "margin": 5.5,
    }  # fmt: skip
    assert rows[1]["prompt"] == [
        USER_MESSAGE,
        *build_turns("A."),
        {"role": "user", "content": "More."},
    ]
    columns = [RowColumn(name) for name in ("prompt", "chosen", "rejected", "margin")]
    rows = list(read_preference_rows(open_rows(tmp_path / "made.parquet", "x"), *columns))
    assert [row.margin for row in rows] == [5.5, 0.0]
    assert rows[1].chosen == build_turns("B.")


def test_hh_comes_compressed_and_without_margins(made, tmp_path):
    rows, out = made("hh", "--input", jsonl(tmp_path / "train.jsonl.gz", HH))
    assert out == "1 of 2 rows; left out: 1 (chosen and rejected have different prompts)\n"
    assert rows == [
        {
            "prompt": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello."},
                {"role": "user", "content": "Why?"},
            ],
            "chosen": build_turns("Because:\n\nso."),
            "rejected": build_turns("No."),
            "margin": None,
        }
    ]


def test_what_is_made_is_what_a_run_reads(made, tmp_path):
    words = tiny_model.train_tokenizer(["user How much in all? assistant ####"] * 20)
    made("gsm8k", "--input", parquet(tmp_path / "x.parquet", GSM8K * 525))
    file = pq.ParquetFile(tmp_path / "made.parquet")
    assert file.num_row_groups == 3  # of a thousand rows, which one row is read with
    prompts = load_prompts(tmp_path / "made.parquet", DataConfig(), words)
    assert (len(prompts), prompts[2099].fields["answer"]) == (2100, "2.5")


NOT_PUBLISHED: Mapping[str, tuple[str, dict, str]] = {
    "column": ("gsm8k", {"question": "a"}, "row 1 has no column 'answer'; it has: question"),
    "answer": ("gsm8k", {**GSM8K[0], "answer": "72"}, "'answer' is '72'; it must be a solution"),
    "number": ("gsm8k", {**GSM8K[0], "answer": "#### x"}, "must be a solution that ends in ####"),
    "text": ("math", {**MATH[0], "problem": 3}, "column 'problem' is '3'; it must be text"),
    "box": ("math", {**MATH[0], "solution": "3"}, r"it must be a solution with \boxed{ANSWER}"),
    "truth": ("dapo17k", {**DAPO[0], "reward_model": {}}, "must be an object with a ground_truth"),
    "prompt": ("dapo17k", {**DAPO[0], "prompt": "x"}, "it must be a list of messages with a role"),
    "nums": ("countdown", {"nums": ["3"], "target": 3}, "it must be a list of whole numbers"),
    "target": ("countdown", {"nums": [3], "target": "3"}, "it must be a whole number"),
    "chat": ("ultrafeedback", {**ULTRAFEEDBACK[0], "chosen": []}, "column 'chosen' is '[]'; it"),
    "turns": ("hh", {**HH[0], "rejected": "x"}, "must be turns that begin with Human: and Assis"),
}  # fmt: skip
FIRST = {
    "gsm8k": GSM8K, "math": MATH, "dapo17k": DAPO, "countdown": COUNTDOWN,
    "ultrafeedback": ULTRAFEEDBACK, "hh": HH,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "row", "message"), NOT_PUBLISHED.values(), ids=list(NOT_PUBLISHED)
)
def test_a_row_of_another_form_is_named_and_nothing_is_left(
    monkeypatch, capsys, tmp_path, name, row, message
):
    path = jsonl(tmp_path / "rows.jsonl", [FIRST[name][0], row])
    status, out, err = run(
        monkeypatch, capsys, name, "--input", path, "--output", tmp_path / "made.parquet"
    )
    assert (status, out) == (2, "")
    assert f"--input='{path}': row 1 " in err
    assert message in err
    assert os.listdir(tmp_path) == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("old.parquet", "old.parquet' exists; allowed: a new file"),
        ("made.csv", "made.csv'; allowed: a name that ends in .parquet"),
        ("no/made.parquet", "there is no folder no"),
    ],
)
def test_an_output_that_cannot_be_is_refused(monkeypatch, capsys, tmp_path, output, message):
    monkeypatch.chdir(tmp_path)
    jsonl(Path("rows.jsonl"), GSM8K)
    Path("old.parquet").write_text("ten years of work")
    status, _, err = run(monkeypatch, capsys, "gsm8k", "--input", "rows.jsonl", "--output", output)
    assert (status, message in err) == (2, True), err
    assert sorted(os.listdir()) == ["old.parquet", "rows.jsonl"]
    assert Path("old.parquet").read_text() == "ten years of work"


def test_inputs_that_leave_no_row_or_are_damaged_are_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    same = jsonl(Path("same.jsonl"), [ULTRAFEEDBACK[1]])
    cut = jsonl(Path("cut.jsonl.gz"), HH)
    cut.write_bytes(cut.read_bytes()[:-30])
    status, _, err = run(
        monkeypatch, capsys, "ultrafeedback", "--input", same, "--output", "x.parquet"
    )
    assert (status, "no row is left; left out: 1 (chosen and rejected are" in err) == (2, True)
    status, _, err = run(monkeypatch, capsys, "hh", "--input", cut, "--output", "x.parquet")
    assert (status, "--input='cut.jsonl.gz' cannot be unpacked: " in err) == (2, True)
    assert sorted(os.listdir()) == ["cut.jsonl.gz", "same.jsonl"]


def place(words: list[str], folder: Path) -> None:
    """Write the inputs that a command names, with the columns of their publisher."""
    options = command.build_parser().parse_args(words[2:])
    for path in getattr(options, "input", []):
        write = parquet if path.suffix == ".parquet" else jsonl
        write(folder / path, FIRST[options.name])


EXAMPLES = [f"mcore-rl data {name} {rows.example}" for name, rows in PUBLISHERS.items()]


@pytest.mark.parametrize(
    "text", ["mcore-rl data --help", *(c.text for c in select_commands("data")), *EXAMPLES]
)
def test_every_command_of_the_pages_and_of_the_help_works(monkeypatch, capsys, tmp_path, text):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(text)
    if "--help" in words:
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, capsys, *words[2:])
        assert (ended.value.code, "examples:\n  mcore-rl data" in capsys.readouterr().out) == (
            0,
            True,
        )
        return
    place(words, tmp_path)
    status, out, err = run(monkeypatch, capsys, *words[2:])
    assert (status, err) == (0, "")
    assert words[words.index("--output") + 1] in out


PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()


def test_the_settings_for_several_files_that_the_page_shows_fit_together():
    [shown] = [line for line in PAGE.splitlines() if line.startswith("data.train_files=")]
    config = compose_config(RLConfig, [*shown.split(), "model.path=m", "data.test_file=t"])
    validate_rl(config)
    assert config.data.train_weights == [2, 1, 1]
    assert len(config.data.train_files) == 3


def test_the_function_that_the_page_shows_gives_rows(monkeypatch, tmp_path):
    [source] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(source)
    Path("questions.csv").write_text('1+1?,2\n"Add 1, and 2.",3\n')
    words = tiny_model.train_tokenizer(["user Add 1, and 2? assistant"] * 20)
    prompts = load_prompts("own.py:rows", DataConfig(), words)
    assert "user\nAdd 1, and 2.<" in words.decode(prompts[1].prompt_ids)
    assert [prompts[row].fields for row in range(2)] == [{"answer": "2"}, {"answer": "3"}]
