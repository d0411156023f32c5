"""On-policy distillation: what teachers say of tokens that the policy has sampled.

Agarwal et al. 2023 (arXiv:2306.13649), with the student's own samples only. A batch has the columns
of Teachers in trainers/roles.py: teacher_shares [response tokens, teachers] and what each teacher
gives.
"""

from __future__ import annotations

import numpy as np
import torch

from mcore_rl.algorithms.inputs import LossInputs
from mcore_rl.data.batch import Batch, Jagged

_LEAST = 1e-6  # probability of all other tokens together: a sum in float32 is not nearer to 1


def sampled_kl(batch: Batch) -> Jagged:
    """[response tokens]: sum over teachers of share * (log pi - log pi_teacher), 0 if not chosen.

    The estimate of KL(pi, pi_teacher) from the sampled token (k1), of the policy before the update.
    Its negative is an advantage (Thinking Machines, On-Policy Distillation, 2025).
    """
    log_probs, mask = batch.jagged("log_probs"), batch.jagged("response_mask")
    gaps = log_probs.values[:, None] - batch.jagged("teacher_log_probs").values
    found = (batch.jagged("teacher_shares").values * gaps).sum(1)
    return mask.with_values(np.where(mask.values != 0, found, 0).astype(np.float32))


def distillation_metrics(batch: Batch) -> dict[str, float]:
    """`distillation/sampled_kl`, the mean of sampled_kl over the chosen tokens, if there are
    teachers."""
    if "teacher_log_probs" not in batch:
        return {}
    chosen = batch.jagged("response_mask").values != 0
    mean = sampled_kl(batch).values[chosen].mean() if chosen.any() else 0.0
    return {"distillation/sampled_kl": float(mean)}


def top_tokens_kl(policy: torch.Tensor, teacher: torch.Tensor, kind: str) -> torch.Tensor:
    """[...] from log-probs [..., k] of the same tokens: a KL of k + 1 events, the last any other.

    reverse_kl: sum of p log(p / q) with p of the policy, q of the teacher; forward_kl: the other
    way round. It is 0 for equal distributions and at most the KL over the whole vocabulary, which
    it equals where k is all of it.
    """
    mine, theirs = _with_rest(policy), _with_rest(teacher)
    p, q = (mine, theirs) if kind == "reverse_kl" else (theirs, mine)
    return (p.exp() * (p - q)).sum(-1)


def _with_rest(log_probs: torch.Tensor) -> torch.Tensor:
    rest = 1 - log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, rest.clamp(min=_LEAST).log()], -1)


def top_tokens_loss(inputs: LossInputs, kind: str) -> torch.Tensor:
    """[tokens]: the sum over teachers of share * KL over the likeliest tokens of each."""
    teacher = inputs.columns["teacher_top_log_probs"]  # [tokens, teachers, k]
    policy = inputs.scores["chosen_log_probs"].view(teacher.shape)
    kl = top_tokens_kl(policy, teacher, kind)
    return (inputs.columns["teacher_shares"] * kl).sum(-1)
