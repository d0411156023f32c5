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
    """Tokens of a turn in a sample's response_ids: [start, end)."""

    turn_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """Experts that a server used for consecutive tokens; compared by identity."""

    start: int  # index of the first token, counted from the first token of the prompt
    ids: npt.NDArray[np.integer]  # [tokens, decoder layers, experts per token]


@dataclass(slots=True)
class Sample:
    """A prompt and one response to it; the response of an agent is all that follows the prompt.

    A trajectory whose context begins anew is several samples, its segments (data/trajectories.py).
    `response_mask`, `rollout_log_probs` and `weight_versions` have one entry per response token.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]  # 1 where the policy chose the token
    rollout_log_probs: list[float]  # nats, by the server that sampled the token
    weight_versions: list[int]  # version of the weights that chose the token; -1 if none did
    finish_reason: str  # "stop" (end of sequence) or "length"
    group_id: int  # the same for all responses to a prompt
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str = ""  # why the reward failed; then `reward` is 0 and there are no parts
    role: str = ""  # of the policy, in a loop with several; advantages compare within a role
    trajectory: int = 0  # index in the group
    segment: int = 0  # index in the trajectory
    status: TrajectoryStatus = "finished"
    turn_spans: tuple[TurnSpan, ...] = ()  # turns of an agent; empty: the response is one turn
    # Share of `reward` of each response token; empty: the last token has all of it.
    process_rewards: list[float] = field(default_factory=list)
    # State in which each response token was chosen, 0 or more; -1 for none. May be empty.
    state_ids: list[int] = field(default_factory=list)
    # 1 at response tokens of the cross entropy loss, else 0; empty: 1 at tokens that the policy did
    # not choose.
    cross_entropy_mask: list[int] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)  # columns of the data row
    messages: Sequence[Mapping[str, Any]] = ()  # the prompt, in OpenAI's form
    turn_texts: Sequence[str] = ()  # policy turns of the whole trajectory, of an agent
    turn_token_ids: Sequence[Sequence[int]] = ()  # token ids of these turns
    turn_rewards: Sequence[float] = ()  # share of `reward` of each of these turns; may be empty
    token_rewards: Sequence[Sequence[float]] = ()  # share of each token of each turn; may be empty
    # Experts of consecutive tokens from the first of the prompt on; may be empty.
    routed_experts: tuple[RoutedExperts, ...] = ()
    images: tuple[str, ...] = ()  # digests in the run's ImageStore, in the order of the tokens

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
