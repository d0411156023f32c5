"""The inputs of the benchmark beside TRL: all responses are of one length."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers

from mcore_rl.benchmarks.against_trl_inputs import NEVER, SHAPES, write_inputs
from mcore_rl.examples.tasks.registry import TASKS


@pytest.mark.job
@pytest.mark.parametrize("shape", SHAPES)
def test_the_model_does_not_sample_the_end_of_sequence(shape, tmp_path):
    task = TASKS["last_digit"](tmp_path / "quickstart" / "task", 0, 0.35)
    checkpoint = shutil.copytree(task.model_dir, tmp_path / "quickstart" / "warm_start")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():  # as large as training makes them
        for weight in model.parameters():
            weight *= 3
    model.save_pretrained(checkpoint)
    paths = write_inputs(tmp_path / "quickstart", SHAPES[shape], tmp_path / "inputs")
    tokenizer = transformers.AutoTokenizer.from_pretrained(paths["checkpoint"])
    model = transformers.AutoModelForCausalLM.from_pretrained(paths["checkpoint"])
    assert tokenizer.eos_token == NEVER
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = torch.randint(3, tokenizer.eos_token_id, (16, 88), generator=torch.manual_seed(0))
    with torch.no_grad():
        shares = model(ids).logits.softmax(-1)
    assert shares[..., tokenizer.eos_token_id].max() < 1e-12
    assert shares.max(-1).values.std() > 0  # the other tokens depend on the text
