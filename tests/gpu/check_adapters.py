"""Low-rank adapters on one GPU: the first step equals autograd through transformers.

Numbers are float32; Transformer Engine, where it is installed, multiplies them in TF32.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import measure  # sets sys.path

# isort: split
import lora_jobs
import tiny_models
from check_engine import HAS_TE, relative
from safetensors.torch import load_file

from mcore_rl.config.schema import Layout

STEP_LIMIT = 0.02 if HAS_TE else 1e-4  # relative difference of loss and gradient norm
GAP_LIMIT = 1e-5  # of log-probs without adapters


def check(arguments: argparse.Namespace) -> measure.Result:
    model = arguments.case
    batch = tiny_models.make_batch()
    measure.join_alone()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, model)
        lora_jobs.build(model).save_pretrained(path)
        checkpoint = load_file(path / "model.safetensors")
        parity = lora_jobs.parity(path, Layout(), batch)
    factors = [
        factor | {"A": factor["A"].cpu(), "B": factor["B"].cpu()} for factor in parity["factors"]
    ]
    reference = lora_jobs.Adapted(lora_jobs.build(model), checkpoint, factors)
    loss, grad_norm = tiny_models.reference_step(reference, batch)
    step = parity["steps"][0]
    pairs = zip(parity["without_adapters"], parity["plain"], strict=True)
    result = {
        "step": [step["loss"], step["grad_norm"]],
        "expected_step": [loss, grad_norm],
        "without_adapters_gap": max(float((a - b).abs().max()) for a, b in pairs),
        "frozen_is_equal": parity["frozen_is_equal"],
        "trained_numbers": parity["state_numel"],
    }
    assert relative(step["loss"], loss) < STEP_LIMIT, result
    assert relative(step["grad_norm"], grad_norm) < 3 * STEP_LIMIT, result
    assert result["without_adapters_gap"] < GAP_LIMIT and result["frozen_is_equal"], result
    assert parity["state_numel"] == parity["factor_numel"] > 0, result
    return result


if __name__ == "__main__":
    measure.report(check, "qwen3", "qwen3_moe")
