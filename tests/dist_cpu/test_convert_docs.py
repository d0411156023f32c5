"""The commands that docs/conversion.md and docs/megatron_lm.md show, one after the other."""

from __future__ import annotations

import json
import re
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

DOCS = Path(__file__).parents[2] / "docs"
BASH = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS_GPUS = "--bridge megatron-bridge"


def commands(page: str) -> list[str]:
    blocks = BASH.findall((DOCS / page).read_text())
    return [line for block in blocks for line in block.splitlines() if line]


@ranks.on_ranks(1)
def saved(model: Path, checkpoint: Path, has_adapters: bool) -> ranks.Result:
    """A checkpoint as a run leaves it, with optimizer state or with adapters."""
    spec = ranks.engine_spec(model, Layout())
    if has_adapters:
        spec = replace(lora_jobs.lora_spec(model, Layout(), "float32"), total_steps=0)
    engine = ranks.started(spec)
    if has_adapters:
        lora_jobs.set_factors(engine)
    else:
        engine.train_batch(tiny_models.make_batch(), ranks.LOSS)
    engine.save_checkpoint(checkpoint)
    return {}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the pages' `model` is, and what runs have left: `trained`; `base` and `adapted`."""
    tiny_models.save("qwen3_moe", tmp_path).rename(tmp_path / "model")
    saved(tmp_path / "model", tmp_path / "trained", False)
    base = tmp_path / "qwen3_moe"  # by which lora_jobs knows its targets
    lora_jobs.build(base.name).save_pretrained(base)
    saved(base, tmp_path / "adapted", True)
    base.rename(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", ["conversion.md", "megatron_lm.md"])
def test_every_command_of_the_page_does_what_it_says(page, folder, monkeypatch, capsys):
    ran = 0
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "echo":  # echo WORD > FILE
            (folder / words[3]).write_text(words[1] + "\n")
        elif NEEDS_GPUS not in command:
            monkeypatch.setattr(sys, "argv", words)
            assert main() == 0, f"{command}\n{capsys.readouterr().err}"
            said = capsys.readouterr().out
            if words[-1] == "--json":
                assert json.loads(said)
            ran += 1
    assert ran >= 3
