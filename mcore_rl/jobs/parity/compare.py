"""How far two engines are apart: in log-probs of the same tokens, and module by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

_NUM_WORST = 5
_NUM_BEFORE = 8  # tokens shown before one of the worst
_IN_A_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp.gate", "mlp")
# Relative difference from which on a module counts as different, by dtype. Measured on tiny models
# of all families: rounding gives below 1e-6 in float32; in bfloat16 below 2e-2 in dense models, but
# up to 3e-1 where it tips a router. Faults of weights and settings give 7e-4 (an epsilon) to 1.
THRESHOLDS = {"float32": 1e-4, "bfloat16": 5e-2}

Trace = Mapping[str, torch.Tensor]  # by Hugging Face's name of a module, [tokens, dim] float32


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


def module_names(num_layers: int) -> list[str]:
    """What an engine may trace, in the order of the model."""
    layers = [f"model.layers.{n}.{name}" for n in range(num_layers) for name in _IN_A_LAYER]
    return ["model.embed_tokens", *layers, "model.norm", "lm_head"]


def differences(mine: Trace, reference: Trace, num_layers: int) -> dict[str, float]:
    """||mine - reference|| / ||reference|| of every module that both have, in the model's order."""
    names = [name for name in module_names(num_layers) if name in mine and name in reference]
    return {name: _difference(mine[name], reference[name]) for name in names}


def first_different(differences: Mapping[str, float], dtype: str) -> str | None:
    """The first module over the threshold; None where nothing is."""
    limit = THRESHOLDS[dtype]
    return next((name for name, difference in differences.items() if difference > limit), None)


def _difference(mine: torch.Tensor, reference: torch.Tensor) -> float:
    """Infinite for other shapes, and for values that are no numbers."""
    if mine.shape != reference.shape:
        return float("inf")
    norm = reference.double().norm()
    gap = float((mine.double() - reference.double()).norm() / norm.clamp(min=1e-30))
    return gap if gap == gap else float("inf")
