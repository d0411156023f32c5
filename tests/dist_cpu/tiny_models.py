"""Tiny real checkpoints, written by transformers, and batches for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from mcore_rl.algorithms.aggregation import compute_loss_weights
from mcore_rl.data.batch import Batch, Jagged

VOCAB = 131  # odd, so that it is padded at TP2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def configs() -> dict[str, transformers.PretrainedConfig]:
    moe = transformers.Qwen3MoeConfig
    return {
        "qwen3_moe": moe(**_COMMON, **_MOE, norm_topk_prob=True, tie_word_embeddings=False),
        # A dense first layer, probabilities that are not renormalised, tied embeddings.
        "qwen3_moe_mixed": moe(
            **_COMMON, **_MOE, norm_topk_prob=False, tie_word_embeddings=True, mlp_only_layers=[0]
        ),
        "qwen3_next": transformers.Qwen3NextConfig(
            **_COMMON,
            **_MOE,
            shared_expert_intermediate_size=40,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=8,
            num_nextn_predict_layers=0,
            layer_types=["linear_attention", "full_attention"],
        ),
        "qwen3": transformers.Qwen3Config(**_COMMON, tie_word_embeddings=True),
        "gpt_oss": transformers.GptOssConfig(
            **_COMMON, num_local_experts=8, num_experts_per_tok=2, sliding_window=8
        ),
    }


def build(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    return build_from(configs()[name], seed)


def build_from(config: transformers.PretrainedConfig, seed: int = 0) -> Any:
    """A model with random weights, far from the tame initial values, so that errors show."""
    torch.manual_seed(seed)
    kind = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config).float().eval()
    biases = {key: b for key, b in model.named_buffers() if key.endswith("correction_bias")}
    with torch.no_grad():
        for key, parameter in (dict(model.named_parameters()) | biases).items():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
            elif "norm" in key:
                is_centered = not parameter.any()  # scales by 1 + weight
                parameter.uniform_(0.7, 1.3).sub_(float(is_centered))
            else:
                parameter.normal_(0, 0.2)
    return model


def save(name: str, folder: Path, seed: int = 0) -> Path:
    path = folder / f"{name}-{seed}"
    build(name, seed).save_pretrained(path)
    return path


def make_batch(num_samples: int = 11, seed: int = 0, times: int = 1) -> Batch:
    """Samples of uneven length, with all that a policy loss reads; the KL counts a tenth.

    `times`: how often as long they are, up to 41 tokens without it.
    """
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCAB, rng.integers(1, 23 * times)) for _ in range(num_samples)]
    responses = [rng.integers(2, VOCAB, rng.integers(1, 19 * times)) for _ in range(num_samples)]
    lengths = [len(r) for r in responses]
    mask = Jagged.pack([rng.integers(0, 2, n) | (np.arange(n) == 0) for n in lengths], np.int8)
    weights = compute_loss_weights(mask, "token_mean")
    return Batch(
        {
            "prompt_ids": Jagged.pack(prompts, np.int64),
            "response_ids": Jagged.pack(responses, np.int64),
            "response_mask": mask,
            "log_probs": Jagged.pack([rng.normal(-5, 1, n) for n in lengths], np.float32),
            "reference_log_probs": Jagged.pack([rng.normal(-5, 1, n) for n in lengths], np.float32),
            "advantages": Jagged.pack([np.full(n, rng.normal()) for n in lengths], np.float32),
            "loss_weights": weights,
            "kl_weights": weights.with_values(0.1 * weights.values),
        }
    )


def reference_scores(model: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(logits, log-probs, entropy) of the response tokens by transformers, one sample at a time."""
    logits = []
    for prompt, response in zip(
        batch.jagged("prompt_ids"), batch.jagged("response_ids"), strict=True
    ):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            logits.append(model(ids).logits[0, len(prompt) - 1 : -1])
    flat = torch.cat(logits)
    scores = flat.double().log_softmax(-1)
    targets = torch.from_numpy(batch.jagged("response_ids").values)
    entropy = -(scores.exp() * scores).sum(-1)
    return flat.numpy(), scores.gather(1, targets[:, None])[:, 0].numpy(), entropy.numpy()


def reference_step(model: Any, batch: Batch) -> tuple[float, float]:
    """Loss and gradient norm of PPO-clip plus 0.1 times a k3 KL, in plain torch, by sample."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        columns = {n: batch.jagged(n)[row] for n in batch.columns}
        prompt, response = columns["prompt_ids"], columns["response_ids"]
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        scores = model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        log_probs = scores.gather(1, torch.from_numpy(response.copy())[:, None])[:, 0]
        old, reference, advantages, weights = (
            torch.from_numpy(columns[n].copy()).double()
            for n in ("log_probs", "reference_log_probs", "advantages", "loss_weights")
        )
        ratio = (log_probs - old).exp()
        policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        kl = (reference - log_probs).exp() - 1 - (reference - log_probs)
        total = total + ((policy + 0.1 * kl) * weights).sum()
    total.backward()
    squares = sum(
        float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None
    )
    return total.item(), squares**0.5
