"""Random batches of trainer's and server's log-probs, and what to do about them."""

from __future__ import annotations

import numpy as np

from mcore_rl.data.batch import Batch, Jagged

SEQUENCE_RULES = tuple(
    f"sequence_{over}_k{n}" for over in ("sum", "mean", "max") for n in (1, 2, 3)
)
RULES = (
    "token_k1", "token_k2", "token_k3", "veto", "token_binary_kl", "negative_sequence_k1",
    *(name for name in SEQUENCE_RULES if name != "sequence_max_k1"),
)  # fmt: skip


def random_batch(rng: np.random.Generator) -> Batch:
    """Up to 6 sequences of up to 7 tokens; tokens that the policy did not choose have nan."""
    lengths = rng.integers(0, 8, rng.integers(1, 7))
    mask = Jagged.pack([rng.random(n) < 0.8 for n in lengths], np.int8)
    num, scale = len(mask.values), rng.choice([0.01, 0.3, 2.0, 15.0])
    log_probs = -rng.exponential(1.0, num)
    rollout = np.minimum(log_probs + scale * rng.normal(size=num), -1e-3)
    unchosen = mask.values == 0
    log_probs[unchosen] = rollout[unchosen] = np.nan
    columns = {"log_probs": log_probs, "rollout_log_probs": rollout}
    advantages = np.repeat(rng.normal(size=len(mask)), mask.lengths)
    if rng.random() < 0.5:
        advantages = rng.normal(size=num)
    result = {name: mask.with_values(v.astype(np.float32)) for name, v in columns.items()}
    return Batch(
        result
        | {"response_mask": mask, "response_ids": mask.with_values(np.arange(num))}
        | {"advantages": mask.with_values(advantages.astype(np.float32))}
    )


def random_bound(rng: np.random.Generator, rule: str) -> float | list[float]:
    if rule.endswith("k1") and rule != "negative_sequence_k1":
        width = rng.choice([1.1, 2.0, 30.0])
        return [float(1 / width), float(width * 1.3)]
    if rule == "veto":
        return [0.2, 6.0]
    return float(rng.choice([0.001, 0.05, 0.5]))
