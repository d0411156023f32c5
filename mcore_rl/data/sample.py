"""A prompt, a response and its reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

TrajectoryStatus = Literal["finished", "truncated", "aborted", "failed"]


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """Where a turn's tokens are among a sample's response_ids: [start, end)."""

    turn_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The experts that a server has used for consecutive tokens; equal to itself only."""

    start: int  # place of the first of the tokens, counted from the first token of the prompt
    ids: npt.NDArray[np.integer]  # [tokens, decoder layers, experts a token]


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
    role: str = ""  # of the policy in it, where a loop has several; compared with the same role
    trajectory: int = 0  # its number among those of the group
    segment: int = 0
    status: TrajectoryStatus = "finished"
    turn_spans: tuple[TurnSpan, ...] = ()  # of an agent; without them the response is one turn
    # How much of `reward` each response token has earned; or none: all is of the last one.
    process_rewards: list[float] = field(default_factory=list)
    # The state that each response token was chosen in, 0 or more; -1 if there is none. Or none.
    state_ids: list[int] = field(default_factory=list)
    # 1 at response tokens of the cross entropy loss, else 0; or none: it is of those that the
    # policy did not choose.
    cross_entropy_mask: list[int] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)  # columns of the data source
    messages: Sequence[Mapping[str, Any]] = ()  # of the prompt, in OpenAI's form
    turn_texts: Sequence[str] = ()  # what the policy said in all of the trajectory, of an agent
    turn_token_ids: Sequence[Sequence[int]] = ()  # the same as tokens
    turn_rewards: Sequence[float] = ()  # how much of `reward` each of these has earned; or none
    token_rewards: Sequence[Sequence[float]] = ()  # the same for each token of each turn; or none
    # Of the tokens from the first of the prompt, one part after the other; or none.
    routed_experts: tuple[RoutedExperts, ...] = ()

    def __post_init__(self) -> None:
        length = len(self.response_ids)
        names = ["response_mask", "rollout_log_probs", "weight_versions"]
        optional = "process_rewards", "state_ids", "cross_entropy_mask"
        for name in names + [name for name in optional if getattr(self, name)]:
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"Sample.{name} has {len(getattr(self, name))} entries "
                    f"for {length} response tokens"
                )
