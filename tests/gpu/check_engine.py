"""One rank of the engine against transformers: scores, two optimizer steps, a save and a load.

Transformers runs on the CPU in float32, one sample at a time, and torch's AdamW trains it. A case
names the model, the number format, and the modules of the layers: `te` is Transformer Engine.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
import tempfile
from pathlib import Path
from typing import Any

import measure
import numpy as np
import tiny_families
import tiny_models
import torch
from safetensors.torch import load_file

from mcore_rl.config.schema import AlgorithmConfig, EngineConfig, ModelConfig, OptimizerConfig
from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.trainers.policy_loss import PolicyLoss

LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.01, 1.0
Steps = list[tuple[float, float]]  # loss and gradient norm of each
LOSS = PolicyLoss(AlgorithmConfig(kl_coef=0.1))
# Limits on log-prob gaps, the largest and the mean, and on relative differences of steps.
# In bfloat16 a router near a tie may choose another expert, which moves single tokens.
# Transformer Engine multiplies float32 in TF32 (common/gemm/cublaslt_gemm.cu), 10 bits of fraction;
# where it is installed Megatron's router does so with any modules (moe/moe_utils.py:1326).
HAS_TE = importlib.util.find_spec("transformer_engine") is not None
HAS_FLA = importlib.util.find_spec("fla") is not None  # its kernels multiply in TF32, too
LIMITS = {
    "float32-torch": (5e-4, 5e-5, 3e-4) if HAS_TE else (2e-4, 1e-5, 1e-4),
    "float32-te": (0.5, 0.01, 0.02),
    "bfloat16-torch": (2.0, 0.06, 0.1),
    "bfloat16-te": (2.0, 0.06, 0.1),
}
# Sparse attention chooses keys as a router chooses experts, and sums their gradients in any order.
# In float32 the choice is compared; in bfloat16 every key is chosen.
CHOOSES_KEYS = ("deepseek_v32",)
MODELS = (
    "qwen3", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "deepseek_v32",
    "minimax_m2",
)  # fmt: skip


def reference_steps(model, batch, folder: Path) -> tuple[Steps, dict[str, torch.Tensor]]:
    """Train transformers' model for two steps; return losses, gradient norms and the weights."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    steps = []
    for _ in range(2):
        adam.zero_grad()
        steps.append(tiny_models.reference_step(model, batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adam.step()
    model.save_pretrained(folder)
    return steps, load_file(folder / "model.safetensors")


def build(name: str, dtype: str) -> Any:
    """Build transformers' model of a case with random weights."""
    if name in tiny_models.configs():
        model = tiny_models.build(name)
    else:
        config = tiny_families.cases()[name].config
        if name == "deepseek_v3":  # all sizes of heads powers of 2, for the fused rotary kernel
            config.v_head_dim = 16
        if name in CHOOSES_KEYS and dtype == "bfloat16":  # near a tie it would choose other keys
            config.index_topk = 512
        model = tiny_models.build_from(config)
    modeling = sys.modules[type(model).__module__]
    for function in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        if hasattr(modeling, function):  # with fla installed it is fla's, which needs a GPU
            setattr(modeling, function, inspect.unwrap(getattr(modeling, function)))
    return model


def started_engine(path: Path, dtype: str, modules: str) -> MegatronEngine:
    adam = OptimizerConfig(
        lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY, clip_grad=CLIP
    )
    adam.distributed = True
    settings = EngineConfig(optimizer=adam, max_tokens_per_micro_batch=132, modules=modules)
    engine = MegatronEngine(
        EngineSpec(ModelConfig(str(path), dtype), settings, seed=3, total_steps=6)
    )
    engine.initialize()
    return engine


def relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-12)


def check(arguments: argparse.Namespace) -> measure.Result:
    measure.choose_first_variants()  # before transformers or Megatron imports kernels of fla
    name, dtype, modules = arguments.case.split("-")
    if arguments.dry:
        modules = "torch"
    batch = tiny_models.make_batch()
    model = build(name, dtype)
    _, log_probs, entropy = tiny_models.reference_scores(model, batch)
    measure.join_alone()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "start")
        model.save_pretrained(path)
        engine = started_engine(path, dtype, modules)
        assert engine.device.type == measure.device().type, engine.device
        scores = engine.infer_batch(batch)
        log_prob_gaps = np.abs(scores.jagged("log_probs").values - log_probs)
        result = {
            "modules": str(type(engine.chunks[0].decoder.layers[0].mlp).__name__),
            "optimizer": type(engine.optimizer.chained_optimizers[0].optimizer).__name__,
            "log_prob_gap": float(log_prob_gaps.max()),
            "log_prob_gap_mean": float(log_prob_gaps.mean()),
            "entropy_gap": float(np.abs(scores.jagged("entropy").values - entropy).max()),
        }
        steps = [engine.train_batch(batch, LOSS) for _ in range(2)]
        steps = [(step["loss"], step["grad_norm"]) for step in steps]
        expected, weights = reference_steps(model, batch, Path(folder, "reference"))
        result |= {"steps": steps, "expected_steps": expected}
        gaps = [
            (tensor.cpu().float() - weights[name]).abs().flatten()
            for name, tensor in engine.get_per_tensor_param()
        ]
        result["weight_gap"] = float(torch.cat(gaps).max())
        result["weight_gap_mean"] = float(torch.cat(gaps).mean())
        engine.save_checkpoint(Path(folder, "saved"))
        third = engine.train_batch(batch, LOSS)
        engine.close()
        resumed = started_engine(path, dtype, modules)
        resumed.load_checkpoint(Path(folder, "saved"))
        again = resumed.train_batch(batch, LOSS)
        resumed.close()
        result["resume_difference"] = relative(again["loss"], third["loss"])
    is_tf32 = HAS_FLA and name in ("qwen3_next", "qwen3_5_moe")
    limits = LIMITS["float32-te" if is_tf32 and dtype == "float32" else f"{dtype}-{modules}"]
    limit, mean_limit, step_limit = limits
    resume_limit = 1e-5
    if name in CHOOSES_KEYS and measure.has_gpu():
        step_limit = max(step_limit, 2e-3)
        resume_limit = 2e-2 if dtype == "bfloat16" else 2e-3
    assert result["log_prob_gap"] < limit and result["log_prob_gap_mean"] < mean_limit, result
    for step, reference in zip(steps, expected, strict=True):
        assert relative(step[0], reference[0]) < step_limit, result
        assert relative(step[1], reference[1]) < 3 * step_limit, result
    if (dtype, modules, is_tf32) == ("float32", "torch", False):
        assert result["weight_gap"] < 2.5 * LR and result["weight_gap_mean"] < 0.02 * LR, result
    assert result["resume_difference"] < resume_limit, result
    return result


if __name__ == "__main__":
    measure.report(check, *(f"{name}-{numbers}" for name in MODELS for numbers in LIMITS))
