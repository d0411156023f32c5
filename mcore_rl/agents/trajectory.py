"""Turns of a session, and the samples that they are trained as.

A trajectory is a tree of turns: a turn's parent is the turn whose conversation it goes on from.
Tokens come from the turns and are never made again. A turn that begins with all of its parent's
tokens is a part of the parent's sample; any other begins a sample of its own (a new segment).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from mcore_rl.data.batch import NO_STATE
from mcore_rl.data.sample import RoutedExperts, Sample, TrajectoryStatus, TurnSpan
from mcore_rl.rewards.registry import find_token_fault

MASKED_VERSION = -1


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a turn that one version of the weights chose."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion as the server sampled it."""

    session_id: str
    turn_id: str  # unique in its session
    parent: str  # its turn_id; empty for the first turn of a conversation
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # nats, one a token
    weight_versions: tuple[VersionSpan, ...]  # all of the tokens, in order
    finish_reason: str  # "stop", "length" or "abort"
    # Of the tokens that its parent has none for, if it goes on from it; else of all.
    routed_experts: RoutedExperts | None = None
    token_rewards: tuple[float, ...] = ()  # of the trajectory's reward; one a token, or none
    state: str | None = None  # of the environment, that it was chosen in, where that is known

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        if len(self.log_probs) != length:
            raise ValueError(
                f"turn {self.turn_id!r} has {len(self.log_probs)} log_probs for {length} tokens"
            )
        if self.token_rewards and len(self.token_rewards) != length:
            raise ValueError(
                f"turn {self.turn_id!r} has {len(self.token_rewards)} token_rewards "
                f"for {length} tokens"
            )
        spans = self.weight_versions
        bounds = [0, *(bound for span in spans for bound in (span.start, span.end)), length]
        adjoining = all(bounds[i] == bounds[i + 1] for i in range(0, len(bounds), 2))
        if not adjoining or any(span.start >= span.end for span in spans):
            raise ValueError(
                f"turn {self.turn_id!r} has weight_versions {spans} for {length} tokens; "
                f"spans have to cover each token once, in order"
            )


def samples_of(
    turns: Sequence[Turn],
    *,
    trajectory: int,
    group_id: int,
    reward: float,
    status: TrajectoryStatus,
) -> list[Sample]:
    """The samples of a trajectory, in the order of their last turns.

    `reward` and `status` of each are the trajectory's. Where a token has mask 0, its log-prob and
    reward are 0 and its version is -1.
    Each sampled token has mask 1 in exactly one sample: a turn that several branches share is
    trained in the first of them, and context in the others. Raises ValueError when a turn's parent
    does not come before it, or a turn_id comes twice.
    """
    by_id = _checked(turns)
    goes_on = {t.turn_id for t in turns if extends(t.prompt_ids, by_id.get(t.parent))}
    extended = {by_id[turn_id].parent for turn_id in goes_on}
    trained: set[str] = set()
    samples: list[Sample] = []
    for last in turns:
        if last.turn_id in extended:
            continue
        path = [last]
        while path[-1].turn_id in goes_on:
            path.append(by_id[path[-1].parent])
        made = _sample(path[::-1], trained)
        made.trajectory, made.segment, made.status = trajectory, len(samples), status
        made.group_id, made.reward = group_id, reward
        samples.append(made)
        trained.update(turn.turn_id for turn in path)
    return samples


def assign_turn_rewards(
    samples: Sequence[Sample],
    turns: Sequence[Turn],
    turn_rewards: Sequence[float],
    token_rewards: Sequence[Sequence[float]],
) -> None:
    """Set process_rewards from rewards of turns and of their tokens.

    Either may be empty; otherwise ValueError unless there is one per turn, or one per token.
    """
    if turn_rewards:
        ids = (turn.turn_id for turn in turns)
        with_turn_rewards(samples, dict(zip(ids, turn_rewards, strict=True)))
    if not token_rewards:
        return
    if problem := find_token_fault(token_rewards, [len(turn.token_ids) for turn in turns]):
        raise ValueError(problem)
    earned = {turn.turn_id: own for turn, own in zip(turns, token_rewards, strict=True)}
    for sample in samples:
        for span in sample.turn_spans:
            _add_rewards(sample, span.start, earned.get(span.turn_id, ()))


def with_turn_rewards(samples: Sequence[Sample], earned: Mapping[str, float]) -> None:
    """Sets process_rewards: what a turn has earned, by its turn_id, at its last token.

    It is there once, in the sample that trains the turn. A turn without a token has none.
    """
    for sample in samples:
        for span in sample.turn_spans:
            if span.turn_id in earned and span.start < span.end:
                _add_rewards(sample, span.end - 1, [earned[span.turn_id]])


def _add_rewards(sample: Sample, start: int, rewards: Sequence[float]) -> None:
    """Add rewards of tokens from `start` on, unless another sample trains the turn."""
    if not rewards or not sample.response_mask[start]:
        return
    sample.process_rewards = sample.process_rewards or [0.0] * len(sample.response_ids)
    for at, reward in enumerate(rewards, start):
        sample.process_rewards[at] += reward


def state_id(state: str) -> int:
    """The same number, 0 or more, for the same text in every process."""
    found = hashlib.blake2b(state.encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(found.digest()) >> 1


def _checked(turns: Sequence[Turn]) -> dict[str, Turn]:
    by_id: dict[str, Turn] = {}
    for turn in turns:
        if not turn.turn_id or turn.turn_id in by_id:
            raise ValueError(f"turn_id {turn.turn_id!r} is empty or comes twice in a trajectory")
        if turn.parent and turn.parent not in by_id:
            raise ValueError(f"turn {turn.turn_id!r} comes before its parent {turn.parent!r}")
        by_id[turn.turn_id] = turn
    return by_id


def extends(prompt_ids: tuple[int, ...], parent: Turn | None) -> bool:
    """Whether the prompt of a turn begins with all tokens of its parent."""
    if parent is None:
        return False
    before = parent.prompt_ids + parent.token_ids
    return prompt_ids[: len(before)] == before


def num_routed(prompt_ids: tuple[int, ...], turns: Sequence[Turn]) -> int:
    """How many tokens of a prompt, from the first, have experts of the turns that it goes on from.

    These are those that the tokens of the turns were chosen with, whatever weights run them again.
    The last token of a turn never ran, so that its experts come with the next turn.
    """
    for turn in reversed(turns):
        if not extends(prompt_ids, turn):
            break
        if (routed := turn.routed_experts) is not None:
            return routed.start + len(routed.ids)
        prompt_ids = turn.prompt_ids
    return 0


def _sample(path: Sequence[Turn], trained: Set[str]) -> Sample:
    """Turns that each extend the one before; those in `trained` are context."""
    start = len(path[0].prompt_ids)
    length = len(path[-1].prompt_ids) + len(path[-1].token_ids) - start
    made = Sample(
        prompt_ids=list(path[0].prompt_ids),
        response_ids=list(path[-1].prompt_ids[start:] + path[-1].token_ids),
        response_mask=[0] * length,
        rollout_log_probs=[0.0] * length,
        weight_versions=[MASKED_VERSION] * length,
        finish_reason=path[-1].finish_reason,
        group_id=0,
        turn_spans=tuple(
            TurnSpan(
                turn.turn_id,
                len(turn.prompt_ids) - start,
                len(turn.prompt_ids) - start + len(turn.token_ids),
            )
            for turn in path
        ),
        routed_experts=tuple(t.routed_experts for t in path if t.routed_experts is not None),
    )
    for turn, span in zip(path, made.turn_spans, strict=True):
        if turn.turn_id in trained:
            continue
        tokens = slice(span.start, span.end)
        made.response_mask[tokens] = [1] * len(turn.token_ids)
        made.rollout_log_probs[tokens] = turn.log_probs
        made.weight_versions[tokens] = [
            part.version for part in turn.weight_versions for _ in range(part.start, part.end)
        ]
        if turn.state is not None:
            made.state_ids = made.state_ids or [NO_STATE] * length
            made.state_ids[tokens] = [state_id(turn.state)] * len(turn.token_ids)
        if turn.token_rewards:
            made.process_rewards = made.process_rewards or [0.0] * length
            made.process_rewards[tokens] = turn.token_rewards
    return made
