"""The words that the Tab key completes, by the scripts in the shells themselves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli.completion import SCRIPTS, complete
from mcore_rl.cli.main import COMMANDS, main
from mcore_rl.config.describe import list_setting_names
from mcore_rl.config.schema import RLConfig
from tests.pages import select_commands
from tests.terminal import run_on_terminal

QUICKSTARTS = [f"recipe=quickstart{suffix}" for suffix in ("", "_fsdp", "_images", "_one_gpu")]


@pytest.mark.parametrize(
    ("line", "matches"),
    [
        ("mcore-rl ", [*COMMANDS, "--help", "--version"]),
        ("mcore-rl conv", ["convert", "convert-config"]),
        ("mcore-rl nope ", []),
        ("mcore-rl rl see", ["seed="]),
        ("mcore-rl rl recipe=quick", QUICKSTARTS),
        ("mcore-rl rl recipe=qu", QUICKSTARTS),
        ("mcore-rl rl recipe=mine", ["recipe=mines/", "recipe=mine.yaml"]),
        ("mcore-rl rl recipe=mines/", ["recipe=mines/deep.yml"]),
        ("mcore-rl samples ", []),
        ("mcore-rl samples --so", ["--sort"]),
        ("mcore-rl convert inspect ", []),
        ("mcore-rl chat ", []),
        ("mcore-rl rl recipe=quickstart weight_sync.verify=f", ["weight_sync.verify=full"]),
        ("mcore-rl rl rollout.ep=", ["rollout.ep=true", "rollout.ep=false"]),
        ("mcore-rl rl model.path=", []),
        ("mcore-rl rl --d", ["--dry-run"]),
        ("mcore-rl rl --hardware s", []),
        ("mcore-rl rl --help actor.l", ["actor.layout", "actor.lora"]),
        ("mcore-rl convert i", ["inspect"]),
        ("mcore-rl convert hf-to-mcore --l", ["--layout"]),
        ("mcore-rl convert mcore-to-hf --dtype ", ["float32", "bfloat16", "fp8"]),
        ("mcore-rl convert mcore-to-hf --output ", []),
        ("mcore-rl convert hf-to-mcore --layout tp=2,e", ["tp=2,ep=", "tp=2,etp="]),
        ("mcore-rl plan reshard --generate tp=2,", ["tp=2,pp=", "tp=2,dp=", "tp=2,ep="]),
        ("mcore-rl samples run --sort ", ["reward", "gap", "length"]),
        ("mcore-rl completion z", ["zsh"]),
        ("mcore-rl rl 'outp", []),
    ],
)
def test_words_are_those_that_may_stand_there(line, matches, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mines").mkdir()
    for name in ("mine.yaml", "mine.txt", "mines/deep.yml"):
        (tmp_path / name).touch()
    assert complete(line) == matches


def test_every_setting_is_completed():
    assert complete("mcore-rl rl ")[1 : len(list_setting_names(RLConfig)) + 1] == [
        f"{name}=" for name in list_setting_names(RLConfig)
    ]


[ON_THE_PAGE] = select_commands("completion")
BASH_TAB = (
    f"{ON_THE_PAGE.text}\n"
    + """
compopt() { :; } # which only works while a line is edited
COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDS=(mcore-rl)
_mcore_rl && printf '%s\\n' "${COMPREPLY[@]}"
"""
)


@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("mcore-rl rl weight_sync.ver", ["weight_sync.verify="]),
        ("mcore-rl rl weight_sync.verify=", ["off", "sampled", "full"]),
        ("mcore-rl convert hf-to-mcore --layout tp=2,e", ["2,ep=", "2,etp="]),
    ],
)
def test_bash_replaces_what_stands_behind_the_last_equals_sign(line, replies):
    done = subprocess.run(
        ["bash", "-c", BASH_TAB, "bash", line],
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout.splitlines(), done.stderr) == (replies, "")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("mcore-rl rl model.path=my", "mcore-rl rl model.path=my_model/"),
        ("mcore-rl rl data.train_file=./tr", "mcore-rl rl data.train_file=./train.parquet"),
        ("mcore-rl rl recipe=mine", "mcore-rl rl recipe=mine.yaml"),
        ("mcore-rl chat my", "mcore-rl chat my_model/"),
        ("mcore-rl convert inspect ", "mcore-rl convert inspect my_model/"),
        ("mcore-rl rl weight_sync.ver", "mcore-rl rl weight_sync.verify="),
    ],
)
def test_the_tab_key_completes_paths_and_words_in_bash(typed, completed, tmp_path):
    """Type a line into a shell on a pseudo-terminal, and press its Tab key."""
    for name in ("train.parquet", "mine.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "my_model").mkdir()
    if typed.endswith(" "):  # then it is the only thing there
        (tmp_path / "train.parquet").unlink()
        (tmp_path / "mine.yaml").unlink()
    script = tmp_path.with_name(f"{tmp_path.name}.bashrc")
    script.write_text(f"{ON_THE_PAGE.text}\nPS1=\n")
    command = ["bash", "--noprofile", "--rcfile", str(script), "-i"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    at_the_start, at_the_end = "\x01", "\x05"  # goes the cursor: the line becomes that of an echo
    keys = f"{typed}\t{at_the_start}echo '<{at_the_end}>'\nexit\n"
    variables = {"TERM": "dumb", "PATH": path}
    _, seen = run_on_terminal(command, variables=variables, keys=keys, folder=tmp_path)
    assert re.search(f"\n<{re.escape(completed)} ?>\r\n", seen), seen


def test_zsh_asks_the_command_that_is_typed_for_the_words_of_the_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "completion", "zsh"])
    assert main() == 0
    script = capsys.readouterr().out
    [(function, command)] = re.findall(r"^compdef (\w+) (\S+)$", script, re.MULTILINE)
    assert command == "mcore-rl" and script.startswith(f"{function}() {{\n")
    assert '"${words[1]}" completion words "$LBUFFER"' in script


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_shell_reads_its_script(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n"], input=SCRIPTS[shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
