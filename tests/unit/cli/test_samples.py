"""`mcore-rl samples` as a command: pages, lists, HTML, and what it says where there is none."""

from __future__ import annotations

import math
import os
import pty
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mcore_rl.cli.main import main
from mcore_rl.data.batch import Batch
from mcore_rl.data.sample_tables import build_summary_columns, get_table_path, write_table
from mcore_rl.observability.console import escape_control
from tests.pages import select_commands
from tests.unit.tools.sample_runs import (
    ASSISTANT,
    END,
    HOSTILE,
    START,
    ids,
    sample,
    trained,
    written,
)


def hostile_run(run: Path) -> Path:
    """Write a run with hostile prompt, response, reward part and role."""
    response = sample(
        f"{START}user\n{HOSTILE}{END}\n{ASSISTANT}", ("turn", HOSTILE), group_id=0,
        reward_parts={HOSTILE: 1.0}, role=HOSTILE,
    )  # fmt: skip
    return written(run, 1, trained([response], {(0, 3): 2.0, (0, 26): 3.0}))


def command(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "samples", *map(str, arguments)])
    status = main()
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_page_in_plain_text(monkeypatch, capsys, tmp_path):
    batch = trained(
        [
            sample(
                f"{START}user\n2+3?{END}\n{ASSISTANT}", ("turn", f"5{END}"), group_id=2, reward=1.0
            )
        ],
        {(0, 0): 0.5},
    )
    run = written(tmp_path / "run", 7, batch)
    five = ids("5")[0]
    assert command(monkeypatch, capsys, run) == (0, f"""\
step 7, group 2, trajectory 0
  reward: 1
  status: finished (stop)
  length: 1 segments, 1 turns, 2 tokens of responses, 2 of them the policy's
  advantage: 0.5
  weights: version 3
  largest gap: 0.5 nats between trainer and servers

[user]
{START}user
2+3?{END}

[assistant, turn 0 (2 tokens, version 3, largest gap 0.5, advantage 0.5)]
{ASSISTANT}5{END}
  gap 0.5 at '5': token {five}: servers -1, trainer -1.5, advantage 0.5, version 3

""", "")  # fmt: skip


@pytest.mark.parametrize("option", [(), ("--list",)])
def test_nothing_of_a_response_reaches_whoever_reads_but_text(
    monkeypatch, capsys, tmp_path, option
):
    status, out, _ = command(monkeypatch, capsys, hostile_run(tmp_path), *option)
    assert status == 0 and r"\x1b[2J\x1b]0;mine\x07\r\x9b31m\u202e\x00&" in out
    assert all(character == "\n" or character.isprintable() for character in out)


def test_on_a_terminal_there_are_colours_in_a_pager_and_no_other_escapes(tmp_path):
    parent, child = pty.openpty()
    environment = {**os.environ, "PAGER": "tee seen", "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    run = hostile_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mcore_rl.cli.main", "samples", str(run)],
        stdout=child, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    os.close(child)
    os.close(parent)
    assert (done.returncode, done.stderr) == (0, b"")
    seen = (tmp_path / "seen").read_text()
    assert "\x1b[1;37;41m" in seen and "\x1b[2m" in seen and "\x1b[1;32m" in seen
    rest = re.sub(r"\x1b\[[0-9;]*m", "", seen)
    assert all(character == "\n" or character.isprintable() for character in rest)


class Elements(HTMLParser):
    """The tags of a page, its attributes and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def test_html_is_one_file_of_text_that_runs_and_loads_nothing(monkeypatch, capsys, tmp_path):
    file = tmp_path / "page.html"
    run = hostile_run(tmp_path / "run")
    status, out, err = command(monkeypatch, capsys, run, "--html", file)
    assert (status, err) == (0, "") and out.startswith(f"{file}: step 1, group 0, trajectory 0")
    content = file.read_bytes().decode()
    page = Elements(content)
    assert page.tags == {
        "html", "head", "meta", "title", "style", "body", "h1", "dl", "dt", "dd", "p", "span",
        "section", "h3", "pre",
    }  # fmt: skip
    assert page.attributes == {"lang", "charset", "http-equiv", "content", "class", "title"}
    assert (
        page.text.count(escape_control(HOSTILE)) == 5
    )  # title, heading, part, prompt and response
    assert all(character == "\n" or character.isprintable() for character in content)
    assert 'class="c gap" title="token ' in content
    assert [entry.name for entry in tmp_path.glob("*page*")] == ["page.html"]


GROUPS = [  # group, reward, tokens, gap
    (0, 0.5, 3, 0.01),
    (1, 1.0, 1, 0.2),
    (2, 0.0, 2, math.nan),
]


@pytest.fixture
def several(tmp_path) -> Path:
    """Steps 3 and 5 with three groups of one response each, and an evaluation."""
    samples = [
        sample(ASSISTANT, ("turn", "x" * length), group_id=group, reward=reward)
        for group, reward, length, _ in GROUPS
    ]
    gaps = {(row, 0): gap for row, (*_, gap) in enumerate(GROUPS)}
    run = tmp_path / "outputs" / "mine"
    for step in (3, 5):
        written(run, step, trained(samples, gaps))
    evaluated = sample(ASSISTANT, ("turn", "evaluated"), group_id=-1)
    return written(run, 5, Batch.collate([evaluated]), "math")


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ((), [(5, 0), (5, 1), (5, 2)]),
        (("--step", "3"), [(3, 0), (3, 1), (3, 2)]),
        (("--step", "all", "--group", "1"), [(3, 1), (5, 1)]),
        (("--step", "4-9", "--reverse"), [(5, 2), (5, 1), (5, 0)]),
        (("--sort", "reward"), [(5, 1), (5, 0), (5, 2)]),
        (("--sort", "length"), [(5, 0), (5, 2), (5, 1)]),
        (("--sort", "gap", "--num", "2"), [(5, 2), (5, 1)]),
        (("--sort", "gap", "--reverse", "--num", "1"), [(5, 0)]),
        (("--evaluation", "math"), [(5, -1)]),
        (("--trajectory", "0", "--group", "2"), [(5, 2)]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_list_has_the_selected_trajectories_in_order(
    monkeypatch, capsys, several, options, listed
):
    status, out, err = command(monkeypatch, capsys, several, "--list", *options)
    assert (status, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split()[:3] == ["step", "group", "trajectory"]
    assert [tuple(map(int, line.split()[:2])) for line in lines] == listed


def test_a_list_tells_what_no_table_has(monkeypatch, capsys, several):
    columns = build_summary_columns(Batch.collate([sample(ASSISTANT, ("turn", "x"), group_id=0)]))
    write_table(get_table_path(several, 6), columns, 9)
    _, out, _ = command(monkeypatch, capsys, several, "--list")
    assert out.splitlines()[1].split() == ["6", "0", "0", "1", "1", "1", "finished", "0"]
    assert out.splitlines()[2].startswith("8 samples of these steps are in no table: sample_log")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("typo",), "RUN='typo' does not exist"),
        ((".",), "RUN='.' is not the output folder of a run: no config.json"),
        (("begun",), "RUN='begun' has no samples: no step has been trained yet, or "
         "sample_log.every=0"),
        (("outputs/mine", "--step", "4"), "--step=4: there is no table of it; there are tables of "
         "2 steps, from 3 to 5"),
        (("outputs/mine", "--step", "x"), "--step='x'; allowed: all, a step, or two as in 3-7"),
        (("outputs/mine", "--group", "9"), "--group=9: no trajectory of these steps; "
         "mcore-rl samples outputs/mine --list shows them"),
        (("outputs/mine", "--evaluation", "code"), "--evaluation='code': outputs/mine has none of "
         "that name; allowed: math"),
        (("outputs/mine", "--sort", "gaps"), "--sort='gaps'; allowed: 'reward', 'gap', 'length'"),
        (("outputs/mine", "--num", "0"), "--num=0; allowed: at least 1"),
        (("outputs/mine", "--tokenizer", "begun"), "there is no tokenizer at begun/tokenizer.json"),
        (("outputs/mine", "--html", "no/x.html"), "--html=no/x.html: there is no folder no"),
        (("outputs/mine", "--html", "x", "--list"), "--list and --html exclude each other; "
         "allowed: one of them"),
        (("alone",), "there is no tokenizer at alone/samples/tokenizer.json; allowed: --tokenizer "
         "with the folder of the model"),
        (("texts",), "texts/samples/step_000001.parquet has no tokens (prompt_ids, response_ids, "
         "response_mask): sample_log.tokens=false; allowed: --list"),
        (("older",), "older/samples/step_000001.parquet has no column trajectory, segment, "
         "num_turns, status, replayed, reward, reward_error, finish_reason, num_tokens: it is of a "
         "version of mcore-rl before there was `mcore-rl samples`"),
        (("broken",), "broken/samples/step_000001.parquet cannot be read: "),
        (("outputs/mine", "--tokenizer", "begun/config.json"), "begun/config.json cannot be read "
         "as a tokenizer: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_missing_samples_are_one_line(monkeypatch, capsys, tmp_path, several, arguments, message):
    monkeypatch.chdir(tmp_path)
    columns = build_summary_columns(
        batch := Batch.collate([sample(ASSISTANT, ("turn", "x"), group_id=0)])
    )
    for name in ("begun", "alone", "texts", "older", "broken"):
        written(tmp_path / name, 1, batch)
    (tmp_path / "begun" / "samples" / "step_000001.parquet").unlink()
    (tmp_path / "alone" / "samples" / "tokenizer.json").unlink()
    write_table(get_table_path(tmp_path / "texts", 1), columns, 1)
    write_table(get_table_path(tmp_path / "older", 1), {"group": columns["group"]}, 1)
    get_table_path(tmp_path / "broken", 1).write_bytes(b"PAR1 and no more")
    status, out, err = command(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"mcore-rl samples: {message}") and err.count("\n") == 1
    assert message.endswith(": ") or err == f"mcore-rl samples: {message}\n"


@pytest.mark.parametrize("line", select_commands("samples"), ids=str)
def test_a_command_of_a_page_runs(monkeypatch, capsys, several, line):
    monkeypatch.chdir(several.parents[1])
    status, out, err = command(monkeypatch, capsys, *line.text.split()[2:])
    assert (status, err) == (0, "") and out


def test_no_engine_is_imported_to_look_at_a_page(several):
    program = """if True:
        import sys
        from mcore_rl.cli.main import main
        sys.argv = ["mcore-rl", "samples", sys.argv[1]]
        assert main() == 0
        print({"torch", "transformers", "vllm", "ray", "megatron", "hydra"} & set(sys.modules))
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(several)], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_a_locale_that_lacks_letters_gets_escapes_of_them(tmp_path):
    run = written(tmp_path, 1, Batch.collate([sample(ASSISTANT, ("turn", "fünf"), group_id=0)]))
    done = subprocess.run(
        [sys.executable, "-m", "mcore_rl.cli.main", "samples", str(run)],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert rb"f\xfcnf" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error(several):
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c",
         f"{sys.executable} -m mcore_rl.cli.main samples {several} --step all | head -1"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "step 3, group 0, trajectory 0\n"
