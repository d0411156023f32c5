"""On-policy distillation: KL to teachers at tokens that the policy has sampled.

Agarwal et al. 2023 (arXiv:2306.13649), with samples of the student only. Teachers in
trainers/roles.py add the columns: teacher_shares [response tokens, teachers] and the log-probs of
the teachers.
"""

from __future__ import annotations

import numpy as np
import torch

from mcore_rl.algorithms.inputs import LossInputs
from mcore_rl.data.batch import Batch, Jagged

_MIN_REST = 1e-6  # least probability of all other tokens: float32 sums are no closer to 1


def compute_sampled_kl(batch: Batch) -> Jagged:
    """Sum share * (log pi - log pi_teacher) over teachers, 0 if not chosen: [response tokens].

    The k1 estimate of KL(pi, pi_teacher) from the sampled token, at the policy before the update.
    Its negative is an advantage (Thinking Machines, On-Policy Distillation, 2025).
    """
    log_probs, mask = batch.jagged("log_probs"), batch.jagged("response_mask")
    gaps = log_probs.values[:, None] - batch.jagged("teacher_log_probs").values
    kl = (batch.jagged("teacher_shares").values * gaps).sum(1)
    return mask.with_values(np.where(mask.values != 0, kl, 0).astype(np.float32))


def compute_distillation_metrics(batch: Batch) -> dict[str, float]:
    """Average the sampled KL over the chosen tokens, if there are teachers."""
    if "teacher_log_probs" not in batch:
        return {}
    chosen = batch.jagged("response_mask").values != 0
    mean = compute_sampled_kl(batch).values[chosen].mean() if chosen.any() else 0.0
    return {"distillation/sampled_kl": float(mean)}


def compute_top_tokens_kl(policy: torch.Tensor, teacher: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute the KL of k + 1 events, k tokens and any other token: [..., k] log-probs to [...].

    reverse_kl: sum of p log(p / q) with p of the policy, q of the teacher; forward_kl: p and q
    exchanged. A lower bound of the KL over the vocabulary, and equal to it if k is the vocabulary.
    """
    policy, teacher = _append_rest(policy), _append_rest(teacher)
    p, q = (policy, teacher) if kind == "reverse_kl" else (teacher, policy)
    return (p.exp() * (p - q)).sum(-1)


def _append_rest(log_probs: torch.Tensor) -> torch.Tensor:
    rest = 1 - log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, rest.clamp(min=_MIN_REST).log()], -1)


def compute_top_tokens_loss(inputs: LossInputs, kind: str) -> torch.Tensor:
    """Sum share * KL over teachers, over the likeliest tokens of each teacher: [tokens]."""
    teacher = inputs.columns["teacher_top_log_probs"]  # [tokens, teachers, k]
    policy = inputs.scores["chosen_log_probs"].view(teacher.shape)
    kl = compute_top_tokens_kl(policy, teacher, kind)
    return (inputs.columns["teacher_shares"] * kl).sum(-1)
