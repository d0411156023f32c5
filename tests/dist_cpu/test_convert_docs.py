"""The commands of each page that convert, one after the other."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import lora_jobs
import pytest
import ranks
import tiny_models

from mcore_rl.cli.main import main
from mcore_rl.config.schema import Layout
from tests.pages import select_commands

COMMANDS = select_commands("conversion")


@ranks.spawn_on_ranks(1)
def saved(model: Path, checkpoint: Path, has_adapters: bool) -> ranks.Result:
    """A checkpoint as a run leaves it, with optimizer state or with adapters."""
    spec = ranks.build_engine_spec(model, Layout())
    if has_adapters:
        spec = replace(lora_jobs.lora_spec(model, Layout(), "float32"), total_steps=0)
    engine = ranks.start_engine(spec)
    if has_adapters:
        lora_jobs.set_factors(engine)
    else:
        engine.train_batch(tiny_models.make_batch(), ranks.LOSS)
    engine.save_checkpoint(checkpoint)
    return {}


def make_inputs(folder: Path, texts: str) -> None:
    """Make the pages' `model`, and what runs have left: `trained`; `base` and `adapted`."""
    tiny_models.save("qwen3_moe", folder).rename(folder / "model")
    if "trained" in texts:
        saved(folder / "model", folder / "trained", False)
    if "adapted" in texts:
        base = folder / "qwen3_moe"  # by which lora_jobs knows its targets
        lora_jobs.build(base.name).save_pretrained(base)
        saved(base, folder / "adapted", True)
        base.rename(folder / "base")


@pytest.mark.parametrize("page", sorted({command.page for command in COMMANDS}))
def test_every_command_of_the_page_does_what_it_says(page, tmp_path, monkeypatch, capsys):
    texts = [command.text for command in COMMANDS if command.page == page]
    make_inputs(tmp_path, "\n".join(texts))
    monkeypatch.chdir(tmp_path)
    for text in texts:
        words = shlex.split(text.replace("/models/Qwen3-30B-A3B", "model"))
        if words[0] == "echo":  # echo WORD > FILE
            Path(words[3]).write_text(words[1] + "\n")
            continue
        monkeypatch.setattr(sys, "argv", words)
        assert main() == 0, f"{text}\n{capsys.readouterr().err}"
        output = capsys.readouterr().out
        if words[-1] == "--json":
            assert json.loads(output)
