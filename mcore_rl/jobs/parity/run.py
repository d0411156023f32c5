"""The comparison: each engine in processes of its own, one engine after the other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from rich.console import Console

from mcore_rl.controller.run_scope import run_scope
from mcore_rl.data.tokenizer import has_tokenizer, read_tokenizer
from mcore_rl.jobs.failure import summarize_failure
from mcore_rl.jobs.parity import by_megatron, by_transformers, by_vllm
from mcore_rl.jobs.parity.compare import Gap, Scores, compare
from mcore_rl.jobs.parity.modules import Trace, differences, first_different
from mcore_rl.jobs.parity.report import Pair, ParityReport
from mcore_rl.jobs.parity.settings import CONTINUATION, HF, VLLM, ParityPlan, Request, checked
from mcore_rl.jobs.ranks import ProcessFailed, run_in_process, run_on_ranks
from mcore_rl.observability.console import waiting
from mcore_rl.observability.versions import versions

WITH_HF, WITH_PREFILL, WITH_DECODE = "megatron~hf", "megatron~vllm_prefill", "megatron~vllm_decode"
_MEGATRON = "megatron"


def run(request: Request) -> ParityReport:
    """Score the same tokens under all engines; where they differ, find the module.

    Raises:
        ConfigError: an option or an input is wrong.
        RunFailed: an engine failed.
    """
    plan = checked(request)
    trace_file = Path(tempfile.gettempdir(), f"mcore_rl_verify_{os.getpid()}.txt")
    with run_scope() as scratch, summarize_failure(trace_file, ProcessFailed):
        sequences, scores = _score(plan, scratch)
        gaps = {
            pair: compare(sequences, scores[_MEGATRON], reference)
            for pair, reference in scores.items()
            if pair != _MEGATRON
        }
        missed = {pair: gap for pair, gap in gaps.items() if not _passes(gap, plan)}
        parts = _bisect(plan, sequences, missed, scratch) if missed else {}
    pairs = {pair: _judged(gap, parts.get(pair), request.dtype) for pair, gap in gaps.items()}
    return ParityReport(
        tolerance=plan.tolerance,
        mean_tolerance=plan.mean_tolerance,
        layout=request.layout,
        dtype=request.dtype,
        versions=versions(),
        pairs=pairs,
        texts=_texts(request.model, gaps.values()),
    )


def _score(plan: ParityPlan, logs: Path) -> tuple[list[list[int]], dict[str, Scores]]:
    """The sequences, and everybody's scores of them: by pair, Megatron's own by its name."""
    sequences, scores, request = plan.prompts, {}, plan.request
    if plan.server is not None:
        with _waiting("vLLM continues and scores the prompts"):
            job = partial(by_vllm.score, plan.server, plan.prompts, CONTINUATION)
            answer = run_in_process(job, VLLM, logs, plan.request.timeout_s)
        sequences = answer["sequences"]
        scores[WITH_PREFILL] = Scores(**answer["prefill"])
        scores[WITH_DECODE] = Scores(**answer["decode"])
    if HF in request.against:
        with _waiting("transformers scores them"):
            job = partial(by_transformers.score, plan.reference, request.dtype, sequences)
            answer = run_in_process(job, "transformers", logs, request.timeout_s)
        scores = {WITH_HF: Scores(**answer), **scores}
    with _waiting("Megatron scores them"):
        job = partial(by_megatron.score, plan.engine, request.checkpoint, sequences)
        by_rank = run_on_ranks(job, request.layout.world_size, logs, request.timeout_s)
    scores[_MEGATRON] = by_megatron.gathered(by_rank)
    return sequences, scores


def _passes(gap: Gap, plan: ParityPlan) -> bool:
    mean = plan.mean_tolerance
    return gap.max_abs <= plan.tolerance and (mean is None or gap.mean_abs <= mean)


def _bisect(
    plan: ParityPlan, sequences: list[list[int]], missed: Mapping[str, Gap], logs: Path
) -> dict[str, dict[str, float]]:
    """By missed pair, how far each module is apart on the sequence up to the worst token."""
    worst = {pair: gap.worst[0] for pair, gap in missed.items()}
    tokens = {pair: sequences[at.prompt][: at.position + 1] for pair, at in worst.items()}
    theirs = _traces_of_others(plan, tokens, logs)
    with _waiting("tracing Megatron"):
        job = partial(
            by_megatron.trace, plan.engine, plan.request.checkpoint, list(tokens.values())
        )
        world_size, timeout_s = plan.request.layout.world_size, plan.request.timeout_s
        mine = by_megatron.joined(run_on_ranks(job, world_size, logs, timeout_s))
    return {
        pair: differences(trace, theirs[pair], plan.num_layers)
        for pair, trace in zip(tokens, mine, strict=True)
    }


def _traces_of_others(
    plan: ParityPlan, tokens: Mapping[str, list[int]], logs: Path
) -> dict[str, Trace]:
    found: dict[str, Trace] = {}
    of_vllm = [pair for pair in tokens if pair != WITH_HF]
    if of_vllm and plan.server is not None:
        with _waiting("tracing vLLM"):
            job = partial(by_vllm.trace, plan.server, [tokens[pair] for pair in of_vllm])
            traces = run_in_process(job, VLLM, logs, plan.request.timeout_s)
        found |= zip(of_vllm, traces, strict=True)
    if WITH_HF in tokens:
        with _waiting("tracing transformers"):
            dtype = plan.request.dtype
            job = partial(by_transformers.trace, plan.reference, dtype, [tokens[WITH_HF]])
            [found[WITH_HF]] = run_in_process(job, "transformers", logs, plan.request.timeout_s)
    return found


def _judged(gap: Gap, parts: dict[str, float] | None, dtype: str) -> Pair:
    if parts is None:
        return Pair(True, gap)
    return Pair(False, gap, first_different(parts, dtype), parts)


def _texts(model: str, gaps: Iterable[Gap]) -> dict[int, str]:
    """Texts of the worst tokens and of those before them, where the model has a tokenizer."""
    if not has_tokenizer(model):
        return {}
    worst = [token for gap in gaps for token in gap.worst]
    ids = {i for token in worst for i in (*token.before_ids, token.token_id)}
    tokenizer = read_tokenizer(model)
    return {i: tokenizer.decode([i]) for i in ids}


def _waiting(for_what: str) -> AbstractContextManager[None]:
    return waiting(for_what, Console(stderr=True))
