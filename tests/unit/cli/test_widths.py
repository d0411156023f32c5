"""Output on a screen of 80 columns: whole lines, whole words, sentences that end."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mcore_rl.cli import recipes
from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.main import COMMANDS, main
from mcore_rl.config.schema import RLConfig
from mcore_rl.jobs.evaluate import print_table
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.observability.console import MeanWithError, print_before_after
from mcore_rl.planner.dry_run import dry_run
from tests.nightly import all_but

SUBCOMMANDS = {
    "convert": ("hf-to-mcore", "mcore-to-hf", "inspect", "verify"),
    "bench": ("reshard", "data-plane"),
    "plan": ("reshard", "memory", "step", "layout", "calibrate", "simulate"),
    "verify": ("parity",),
    "data": ("gsm8k", "ultrafeedback", "verifiers"),
}
PAGES = [[name] for name in COMMANDS]
PAGES += [[name, inner] for name, inners in SUBCOMMANDS.items() for inner in inners]


def console() -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, width=80, color_system=None), written


@pytest.mark.parametrize("words", [[], *PAGES], ids=" ".join)
def test_help_fits(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["mcore-rl", *words, "--help"])
    try:
        status = main()
    except SystemExit as ended:  # of argparse
        status = ended.code
    assert not status
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []


def test_a_recipe_is_described_by_a_sentence_that_ends():
    files = [recipes.RECIPES / f"{name}.yaml" for name in recipes.list_recipes()]
    assert [file for file in files if not recipes.read_first_comment(file).endswith(".")] == []
    assert all(len(line) <= 80 for line in recipes.list_descriptions())


@pytest.mark.parametrize(
    ("text", "comment"),
    [
        ("# One line\n# and the next.\n# Not this.\nseed: 1", "One line and the next."),
        ("# No full stop\n#\n# mcore-rl rl", "No full stop"),
        ("seed: 1\n# Later.", "Later."),
        ("seed: 1", ""),
    ],
)
def test_a_sentence_of_a_recipe_may_take_several_lines(tmp_path, text, comment):
    (tmp_path / "a.yaml").write_text(text)
    assert recipes.read_first_comment(tmp_path / "a.yaml") == comment


MODELS = {
    "dsv3_671b": "DeepSeek-V3", "gpt_oss_20b": "gpt-oss-20b", "llama3_70b": "Llama-3.1-70B",
    "minimax_m2_230b": "MiniMax-M2", "moonlight_16b": "Moonlight-16B-A3B",
    "qwen3_235b_a22b": "Qwen3-235B-A22B", "qwen3_30b_a3b": "Qwen3-30B-A3B", "qwen3_8b": "Qwen3-8B",
    "qwen3_next_80b_a3b": "Qwen3-Next-80B-A3B", "qwen3_5_35b_a3b": "Qwen3.5-35B-A3B",
}  # fmt: skip


# Of the largest models, whose plans take seconds, the one with the widest numbers runs each time.
LATER = {"minimax_m2_230b", "qwen3_235b_a22b", "qwen3_next_80b_a3b"}


@pytest.mark.job
@pytest.mark.parametrize("recipe", all_but(MODELS.keys() - LATER, MODELS))
def test_the_tables_of_a_dry_run_fit(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    config = json.loads((find_published(MODELS[recipe]) / "config.json").read_text())
    config.pop("quantization_config", None)
    Path("model/config.json").write_text(json.dumps(config))
    Path("t.jsonl").write_text('{"messages": [], "answer": "1"}\n')
    files = ["model.path=model", "data.train_file=t.jsonl", "algorithm.kl_coef=0.1"]
    shown, written = console()
    settings = compose_config(RLConfig, [f"recipe={recipe}", *files])
    dry_run(settings, shown, gpus_per_node=8, ignores_memory=True)
    tables = [line for line in written.getvalue().splitlines() if "   " in line]
    assert len(tables) > 8 and max(map(len, tables)) <= 80
    assert "…" not in written.getvalue()
    for heading in ("gradients", "optimizer", "parameters", "activ", "other"):
        assert any(heading in line.split() for line in tables), heading


def assert_unwrapped(written: io.StringIO, *words: str) -> None:
    text = written.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("num_sets", [1, 4, 9])
def test_the_table_of_an_evaluation_fits_whatever_the_number_of_sets(num_sets):
    shown, written = console()
    score = {"mean": 0.51234, "standard_error": 0.01234}
    metrics = {"responses": 123456, "response_tokens": score, "majority@128": score}
    names = [f"competition_{number}" for number in range(num_sets)]
    print_table(dict.fromkeys(names, metrics), shown)
    assert_unwrapped(written, *names, "response_tokens", "majority@128")
    assert written.getvalue().count("0.512 ± 0.012") == num_sets


def test_the_table_at_the_end_of_a_run_fits():
    shown, written = console()
    estimate = MeanWithError(0.5, 0.02, True)
    print_before_after("Held out", [(f"accuracy ({'long_' * 12}name)", estimate, estimate)], shown)
    assert_unwrapped(written, "before", "after", "change", "50.0% ± 2.0", "+0.0 points")
