"""Samples of a trajectory, built from the turns of its sessions.

A trajectory is a tree of turns: the parent of a turn is the turn whose conversation it continues.
Tokens come from the turns and are never rendered again. A turn that begins with all tokens of its
parent is part of the parent's sample; any other begins a sample of its own (a segment).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set

from mcore_rl.agents.session import Turn, is_continuation
from mcore_rl.data.batch import NO_STATE
from mcore_rl.data.sample import Sample, TrajectoryStatus, TurnSpan
from mcore_rl.rewards.registry import find_token_fault

MASKED_VERSION = -1  # weight version of tokens that the policy did not sample


def build_samples(
    turns: Sequence[Turn],
    *,
    trajectory: int,
    group_id: int,
    reward: float,
    status: TrajectoryStatus,
) -> list[Sample]:
    """Build the samples of a trajectory, in the order of their last turns.

    Each sample has the trajectory's `reward` and `status`. Tokens with mask 0 have log-prob and
    reward 0 and version -1. Each sampled token has mask 1 in exactly one sample: a turn that
    several branches share is trained in the first of them, and context in the others.

    Raises:
        ValueError: A turn comes before its parent, or a turn_id comes twice.
    """
    by_id = _index_turns(turns)
    continuing = {t.turn_id for t in turns if is_continuation(t.prompt_ids, by_id.get(t.parent))}
    continued = {by_id[turn_id].parent for turn_id in continuing}
    trained: set[str] = set()
    samples: list[Sample] = []
    for last in turns:
        if last.turn_id in continued:
            continue
        path = [last]
        while path[-1].turn_id in continuing:
            path.append(by_id[path[-1].parent])
        sample = _build_sample(path[::-1], trained)
        sample.trajectory, sample.segment, sample.status = trajectory, len(samples), status
        sample.group_id, sample.reward = group_id, reward
        samples.append(sample)
        trained.update(turn.turn_id for turn in path)
    return samples


def _index_turns(turns: Sequence[Turn]) -> dict[str, Turn]:
    by_id: dict[str, Turn] = {}
    for turn in turns:
        if not turn.turn_id or turn.turn_id in by_id:
            raise ValueError(f"turn_id {turn.turn_id!r} is empty or comes twice in a trajectory")
        if turn.parent and turn.parent not in by_id:
            raise ValueError(f"turn {turn.turn_id!r} comes before its parent {turn.parent!r}")
        by_id[turn.turn_id] = turn
    return by_id


def _build_sample(path: Sequence[Turn], trained: Set[str]) -> Sample:
    """Build a sample of turns that each continue the one before; those in `trained` are context."""
    start = len(path[0].prompt_ids)
    length = len(path[-1].prompt_ids) + len(path[-1].token_ids) - start
    sample = Sample(
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
        images=path[-1].images,
    )
    for turn, span in zip(path, sample.turn_spans, strict=True):
        if turn.turn_id in trained:
            continue
        tokens = slice(span.start, span.end)
        sample.response_mask[tokens] = [1] * len(turn.token_ids)
        sample.rollout_log_probs[tokens] = turn.log_probs
        sample.weight_versions[tokens] = [
            part.version for part in turn.weight_versions for _ in range(part.start, part.end)
        ]
        if turn.state is not None:
            sample.state_ids = sample.state_ids or [NO_STATE] * length
            sample.state_ids[tokens] = [hash_state(turn.state)] * len(turn.token_ids)
        if turn.token_rewards:
            sample.process_rewards = sample.process_rewards or [0.0] * length
            sample.process_rewards[tokens] = turn.token_rewards
    return sample


def assign_turn_rewards(
    samples: Sequence[Sample],
    turns: Sequence[Turn],
    turn_rewards: Sequence[float],
    token_rewards: Sequence[Sequence[float]] = (),
) -> None:
    """Add the rewards of turns and of tokens to process_rewards.

    The reward of a turn is at its last token, once: in the sample that trains the turn. A turn
    without tokens gets none.

    Args:
        turn_rewards: One per turn, or empty.
        token_rewards: One per token of each turn, or empty.

    Raises:
        ValueError: Another number of them.
    """
    if turn_rewards:
        by_turn = dict(zip((turn.turn_id for turn in turns), turn_rewards, strict=True))
        for sample in samples:
            for span in sample.turn_spans:
                if span.turn_id in by_turn and span.start < span.end:
                    _add_rewards(sample, span.end - 1, [by_turn[span.turn_id]])
    if not token_rewards:
        return
    if problem := find_token_fault(token_rewards, [len(turn.token_ids) for turn in turns]):
        raise ValueError(problem)
    rewards_by_turn = {turn.turn_id: row for turn, row in zip(turns, token_rewards, strict=True)}
    for sample in samples:
        for span in sample.turn_spans:
            _add_rewards(sample, span.start, rewards_by_turn.get(span.turn_id, ()))


def _add_rewards(sample: Sample, start: int, rewards: Sequence[float]) -> None:
    """Add rewards of tokens from `start` on, unless another sample trains the turn."""
    if not rewards or not sample.response_mask[start]:
        return
    sample.process_rewards = sample.process_rewards or [0.0] * len(sample.response_ids)
    for position, reward in enumerate(rewards, start):
        sample.process_rewards[position] += reward


def hash_state(state: str) -> int:
    """Return the same number, 0 or more, for the same text in every process."""
    digest = hashlib.blake2b(state.encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest()) >> 1
