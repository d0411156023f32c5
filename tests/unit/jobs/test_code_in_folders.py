"""Commands on a model folder that brings code of its own: none runs it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from mcore_rl.cli.main import main
from mcore_rl.examples.tasks import last_digit

RL = (
    "rl", "model.path=model", "data.train_file=train.parquet", "data.test_file=test.parquet",
    "data.max_prompt_tokens=64", "rollout.max_response_tokens=32", "output_dir=out", "--dry-run",
)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last_digit.prepare(tmp_path / "task", seed=0, worked_share=0.35)
    monkeypatch.chdir(tmp_path / "task")


CODE = """\
from pathlib import Path
Path({ran!r}).touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3MoeForCausalLM
class Config(PretrainedConfig):
    model_type = "unheard_of"
Model, Tokenizer = Qwen3MoeForCausalLM, PreTrainedTokenizerFast
"""


@pytest.mark.job
@pytest.mark.parametrize(
    "command",
    [
        [*RL],
        [*RL, "actor.backend=fsdp"],
        ["sft", "model.path=model", "data.train_file=warm_start.parquet", "--dry-run"],
        ["chat", "model"],
        ["convert", "hf-to-mcore", "--model=model", "--output=out", "--layout=tp=1"],
        ["verify", "parity", "--model=model", "--layout=tp=1", "--against=hf"],
    ],
    ids=lambda command: " ".join(part for part in command if "=" not in part or "fsdp" in part),
)
def test_code_in_a_model_folder_never_runs(place, monkeypatch, capfd, command):
    """Also when standard input answers every question with yes."""
    model, ran = Path("model"), Path("ran").absolute()
    (model / "code.py").write_text(CODE.format(ran=str(ran)))
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    tokenizer = {"AutoTokenizer": [None, "code.Tokenizer"]}
    for name, added in (
        ("config.json", {"model_type": "unheard_of", "auto_map": classes}),
        ("tokenizer_config.json", {"tokenizer_class": "Unheard", "auto_map": tokenizer}),
    ):
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**content, **added}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    monkeypatch.setattr(sys, "argv", ["mcore-rl", *command])
    # Converting needs no class of transformers: Megatron's model comes from `architectures`.
    assert main() == (0 if "convert" in command else 2)
    assert not ran.exists()
    printed = capfd.readouterr()
    assert "wish to run" not in printed.out
    assert printed.err.count("\n") == 1 or "convert" in command
