"""How far two engines are apart in the log-probs of the same tokens. Pure: numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_NUM_WORST = 5
_NUM_BEFORE = 8  # tokens shown before one of the worst


@dataclass(frozen=True, slots=True)
class Scores:
    """What an engine says of the last tokens of each sequence; a list has one entry a sequence.

    Log-probs are in nats, of each token given all those before it.
    """

    log_probs: Sequence[Sequence[float]]
    top_ids: Sequence[Sequence[int]]  # the most likely token there


@dataclass(frozen=True, slots=True)
class WorstToken:
    prompt: int  # which sequence, from 0
    position: int  # which of its tokens, from 0
    token_id: int
    before_ids: list[int]  # a few tokens that stand before it
    log_prob: float
    reference_log_prob: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Absolute differences of log-probs, in nats; infinite where one of them is no number."""

    num_tokens: int
    max_abs: float
    mean_abs: float
    p50_abs: float
    p90_abs: float
    p99_abs: float
    argmax_agreement: float  # share of tokens at which both have the same most likely token
    worst: list[WorstToken] = field(default_factory=list)  # the largest difference first


def compare(sequences: Sequence[list[int]], mine: Scores, reference: Scores) -> Gap:
    """The gap at the tokens that both scored: the reference may have only the last ones."""
    counts = [min(len(m), len(r)) for m, r in zip(mine.log_probs, reference.log_probs, strict=True)]
    ours, theirs = (_last(scores.log_probs, counts) for scores in (mine, reference))
    our_top, their_top = (_last(scores.top_ids, counts) for scores in (mine, reference))
    finite = np.isfinite(ours) & np.isfinite(theirs)
    with np.errstate(invalid="ignore"):
        gaps = np.where(finite, np.abs(ours - theirs), np.inf)
    # A percentile is one of the differences, the one above where it falls between two.
    p50, p90, p99 = (float(np.percentile(gaps, p, method="higher")) for p in (50, 90, 99))
    places = [
        (row, len(ids) - count + index)
        for row, (ids, count) in enumerate(zip(sequences, counts, strict=True))
        for index in range(count)
    ]
    worst = [
        _worst_token(sequences, places[i], float(ours[i]), float(theirs[i]))
        for i in np.argsort(-gaps, kind="stable")[:_NUM_WORST]
    ]
    return Gap(
        num_tokens=len(gaps),
        max_abs=float(gaps.max()),
        mean_abs=float(gaps.mean()),
        p50_abs=p50,
        p90_abs=p90,
        p99_abs=p99,
        argmax_agreement=float((our_top == their_top).mean()),
        worst=worst,
    )


def _last(rows: Sequence[Sequence[float]], counts: Sequence[int]) -> npt.NDArray[np.float64]:
    """The last `count` entries of each row, end to end."""
    parts = [row[len(row) - count :] for row, count in zip(rows, counts, strict=True)]
    return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts])


def _worst_token(
    sequences: Sequence[list[int]], place: tuple[int, int], mine: float, reference: float
) -> WorstToken:
    row, position = place
    ids = sequences[row]
    before = ids[max(0, position - _NUM_BEFORE) : position]
    return WorstToken(row, position, ids[position], before, mine, reference)
