"""Settings of what a policy learns from teachers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DistillationConfig:
    """What is learned from the models of `teacher`, at responses of the policy itself."""

    # off, sampled_kl (the KL to the teacher, estimated at each token that was sampled, is taken off
    # its advantage), or a loss: reverse_kl, forward_kl, over the teacher's likeliest tokens.
    loss: str = "off"
    coef: float = 1.0  # its weight
    top_k: int = 32  # tokens of the teacher that reverse_kl and forward_kl compare
    use_reward: bool = False  # train on the rewards, too; false: they are metrics only
