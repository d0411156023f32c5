"""A prompt, a response and its reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Sample:
    """A prompt and one response to it: of an agent, all that comes after the prompt.

    A trajectory whose context begins anew is several samples, its segments (data/trajectories.py).
    `response_mask`, `rollout_log_probs` and `weight_versions` have one entry per response token.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]  # 1 where the policy chose the token
    rollout_log_probs: list[float]  # nats, as the rollout engine sampled it
    weight_versions: list[int]  # version of the weights that chose the token; -1 if none did
    finish_reason: str  # "stop" (end of sequence) or "length"
    group_id: int  # responses to one prompt share it
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str = ""  # why there is no reward; then `reward` is 0 and there are no parts
    trajectory: int = 0  # its number among those of the group
    segment: int = 0
    fields: dict[str, Any] = field(default_factory=dict)  # columns of the data source

    def __post_init__(self) -> None:
        length = len(self.response_ids)
        for name in ("response_mask", "rollout_log_probs", "weight_versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"Sample.{name} has {len(getattr(self, name))} entries "
                    f"for {length} response tokens"
                )
