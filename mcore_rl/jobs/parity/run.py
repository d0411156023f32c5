"""Comparison of Megatron with other engines on the same tokens, and the report on it.

Engines run one after the other, each in separate processes.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.controller.process_cleanup import clean_up_on_exit
from mcore_rl.data.tokenizer import has_tokenizer, read_tokenizer
from mcore_rl.jobs.failure import summarize_failure
from mcore_rl.jobs.parity import engines
from mcore_rl.jobs.parity.engines import Scores, Trace
from mcore_rl.jobs.parity.settings import (
    CONTINUATION,
    HF,
    VLLM,
    ParityPlan,
    ParitySettings,
    build_plan,
)
from mcore_rl.jobs.ranks import run_in_process, run_on_ranks
from mcore_rl.observability.console import print_rows, show_line, show_paragraph, show_waiting
from mcore_rl.observability.process import list_versions

WITH_HF, WITH_PREFILL, WITH_DECODE = "megatron~hf", "megatron~vllm_prefill", "megatron~vllm_decode"
_NUM_SHOWN = 3  # worst tokens of a pair in the printed table
_NUM_WORST = 5  # worst tokens of a pair in the report
_NUM_BEFORE = 8  # tokens shown before a worst token
_LAYER_MODULES = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp.gate", "mlp")
# Relative difference from which on a module counts as different, by dtype. Measured on tiny models
# of all families: rounding gives below 1e-6 in float32; in bfloat16 below 2e-2 in dense models, but
# up to 3e-1 where it tips a router. Faults of weights and settings give 7e-4 (an epsilon) to 1.
THRESHOLDS = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True, slots=True)
class WorstToken:
    prompt: int  # which sequence, from 0
    position: int  # which of its tokens, from 0
    token_id: int
    before_ids: list[int]  # up to _NUM_BEFORE tokens before it
    log_prob: float
    reference_log_prob: float


@dataclass(frozen=True, slots=True)
class LogProbGap:
    """Absolute differences of log-probs, in nats; infinite where a log-prob is not finite."""

    num_tokens: int
    max_abs: float
    mean_abs: float
    p50_abs: float
    p90_abs: float
    p99_abs: float
    argmax_agreement: float  # share of tokens where both engines have the same argmax
    worst: list[WorstToken] = field(default_factory=list)  # largest difference first


@dataclass(frozen=True, slots=True)
class Pair:
    """Megatron and one other engine. Only a pair that did not pass has the last two fields."""

    passed: bool
    gap: LogProbGap
    first_differing_module: str | None = None
    module_differences: dict[str, float] | None = None  # relative, in the model's order


@dataclass(frozen=True, slots=True)
class ParityReport:
    tolerance: float
    mean_tolerance: float | None
    layout: Layout
    dtype: str
    versions: dict[str, str]
    pairs: dict[str, Pair]
    texts: dict[int, str]  # text of each reported token id; empty without a tokenizer

    @property
    def passed(self) -> bool:
        return all(pair.passed for pair in self.pairs.values())

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data; infinite numbers become None."""
        return {
            "passed": self.passed,
            "tolerance": self.tolerance,
            "mean_tolerance": self.mean_tolerance,
            "layout": asdict(self.layout),
            "dtype": self.dtype,
            "versions": self.versions,
            "pairs": {name: self._pair_to_json(pair) for name, pair in self.pairs.items()},
        }

    def _pair_to_json(self, pair: Pair) -> dict[str, Any]:
        entries = {"passed": pair.passed, **asdict(pair.gap)}
        for token, entry in zip(pair.gap.worst, entries["worst"], strict=True):
            entry["text"] = self._format_text(token)
        if not pair.passed:
            entries["first_differing_module"] = pair.first_differing_module
            entries["module_differences"] = pair.module_differences
        return {name: _replace_infinities(entry) for name, entry in entries.items()}

    def _format_text(self, token: WorstToken) -> str | None:
        """Return the text before a token, then the token in brackets; None without a tokenizer."""
        if not self.texts:
            return None
        before = "".join(self.texts[i] for i in token.before_ids)
        return f"{before}[{self.texts[token.token_id]}]"

    def print(self, console: Console) -> None:
        """Print a table of the pairs, their worst tokens, and where failed pairs first differ."""
        bounds = f"max {self.tolerance:g}"
        if self.mean_tolerance is not None:
            bounds += f", mean {self.mean_tolerance:g}"
        show_line(f"Differences of log-probs in nats, {self.dtype}; allowed: {bounds}", console)
        headings = ("pair", "result", "tokens", "max", "mean", "p99", "argmax")
        print_rows(headings, [*self._list_rows()], console, num_texts=2)
        for name, pair in self.pairs.items():
            show_line(f"\nThe worst tokens of {name}:", console)
            for token in pair.gap.worst[:_NUM_SHOWN]:
                self._print_token(token, console)
        for name, pair in self.pairs.items():
            if not pair.passed:
                show_line(f"\n{name}: {self._describe_failure(pair)}", console)

    def _list_rows(self) -> Iterator[Sequence[str]]:
        for name, pair in self.pairs.items():
            gap = pair.gap
            sizes = [f"{size:.1e}" for size in (gap.max_abs, gap.mean_abs, gap.p99_abs)]
            result = "passed" if pair.passed else "FAILED"
            yield name, result, str(gap.num_tokens), *sizes, f"{gap.argmax_agreement:.1%}"

    def _print_token(self, token: WorstToken, console: Console) -> None:
        place = f"prompt {token.prompt}, position {token.position}, token {token.token_id}"
        log_probs = [f"Megatron {token.log_prob:.6f}", f"other {token.reference_log_prob:.6f}"]
        context = self._format_text(token) or " ".join(map(str, token.before_ids))
        show_paragraph(place, [*log_probs, f"after: {context!r}"], console)

    def _describe_failure(self, pair: Pair) -> str:
        first, differences = pair.first_differing_module, pair.module_differences or {}
        if first is not None:
            caveat = "; in bfloat16 rounding may do that to a router, --dtype float32 would tell"
            return (
                f"the first module that differs is {first} (by {differences[first]:.1e} of its "
                f"output){caveat if self.dtype == 'bfloat16' else ''}"
            )
        limit, largest = THRESHOLDS[self.dtype], max(differences.values(), default=math.nan)
        return (
            f"no module differs by more than {limit:g} of its output (the most is {largest:.1e}): "
            "small differences add up"
        )


def _replace_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _replace_infinities(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_replace_infinities(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run(settings: ParitySettings) -> ParityReport:
    """Score the same tokens with all engines; where they differ, find the first module.

    Raises:
        ConfigError: an option or an input is wrong.
        RunFailed: an engine failed.
    """
    plan = build_plan(settings)
    trace_file = Path(tempfile.gettempdir(), f"mcore_rl_verify_{os.getpid()}.txt")
    with clean_up_on_exit() as scratch_dir, summarize_failure(trace_file, ConfigError):
        processes = _EngineProcesses(plan, scratch_dir)
        sequences, gaps = _compare_scores(plan, processes)
        failed = {pair: gap for pair, gap in gaps.items() if not _is_within_tolerance(gap, plan)}
        modules = _compare_modules(plan, processes, sequences, failed) if failed else {}
    pairs = {
        pair: _build_pair(gap, modules.get(pair), settings.dtype) for pair, gap in gaps.items()
    }
    return ParityReport(
        tolerance=plan.tolerance,
        mean_tolerance=plan.mean_tolerance,
        layout=settings.layout,
        dtype=settings.dtype,
        versions=list_versions(),
        pairs=pairs,
        texts=_decode_tokens(settings.model, gaps.values()),
    )


@dataclass(frozen=True, slots=True)
class _EngineProcesses:
    """Runs functions of engines.py in separate processes, whose output goes to `log_dir`."""

    plan: ParityPlan
    log_dir: Path

    def run_on_megatron(
        self, title: str, job: Callable[..., Any], sequences: list[list[int]]
    ) -> list[Any]:
        """Run a job on all ranks of the layout; return the results by rank."""
        settings = self.plan.settings
        rank_job = partial(job, self.plan.engine, settings.checkpoint, sequences)
        world_size = settings.layout.world_size
        with show_waiting(title, Console(stderr=True), has_lines=False):
            return run_on_ranks(rank_job, world_size, self.log_dir, settings.timeout_s)

    def run_on_hf(self, title: str, job: Callable[..., Any], sequences: list[list[int]]) -> Any:
        """Run a job with the model that transformers loads."""
        model_job = partial(job, self.plan.reference, self.plan.settings.dtype, sequences)
        return self._run_process(title, "transformers", model_job)

    def run_on_vllm(self, title: str, job: Callable[..., Any], *arguments: Any) -> Any:
        """Run a job that starts a vLLM server."""
        return self._run_process(title, VLLM, partial(job, self.plan.server, *arguments))

    def _run_process(self, title: str, name: str, job: Callable[[], Any]) -> Any:
        with show_waiting(title, Console(stderr=True), has_lines=False):
            return run_in_process(job, name, self.log_dir, self.plan.settings.timeout_s)


def _compare_scores(
    plan: ParityPlan, processes: _EngineProcesses
) -> tuple[list[list[int]], dict[str, LogProbGap]]:
    """Score the sequences with all engines; return them and the gap of each pair."""
    sequences, references = plan.prompts, {}
    if plan.server is not None:
        title = "vLLM continues and scores the prompts"
        result = processes.run_on_vllm(title, engines.score_with_vllm, plan.prompts, CONTINUATION)
        sequences = result["sequences"]
        references = {WITH_PREFILL: result["prefill"], WITH_DECODE: result["decode"]}
    if HF in plan.settings.against:
        result = processes.run_on_hf("transformers scores them", engines.score_with_hf, sequences)
        references = {WITH_HF: result, **references}
    rank_scores = processes.run_on_megatron(
        "Megatron scores them", engines.score_with_megatron, sequences
    )
    scores = engines.merge_scores(rank_scores)
    gaps = {
        pair: compare_log_probs(sequences, scores, Scores(**reference))
        for pair, reference in references.items()
    }
    return sequences, gaps


def _is_within_tolerance(gap: LogProbGap, plan: ParityPlan) -> bool:
    mean = plan.mean_tolerance
    return gap.max_abs <= plan.tolerance and (mean is None or gap.mean_abs <= mean)


def _compare_modules(
    plan: ParityPlan,
    processes: _EngineProcesses,
    sequences: list[list[int]],
    failed: Mapping[str, LogProbGap],
) -> dict[str, dict[str, float]]:
    """Trace the sequence of each failed pair up to its worst token; return module differences."""
    worst = {pair: gap.worst[0] for pair, gap in failed.items()}
    inputs = {pair: sequences[token.prompt][: token.position + 1] for pair, token in worst.items()}
    references: dict[str, Trace] = {}
    if vllm_inputs := {pair: ids for pair, ids in inputs.items() if pair != WITH_HF}:
        traces = processes.run_on_vllm(
            "tracing vLLM", engines.trace_with_vllm, list(vllm_inputs.values())
        )
        references |= zip(vllm_inputs, traces, strict=True)
    if WITH_HF in inputs:
        [references[WITH_HF]] = processes.run_on_hf(
            "tracing transformers", engines.trace_with_hf, [inputs[WITH_HF]]
        )
    rank_traces = processes.run_on_megatron(
        "tracing Megatron", engines.trace_with_megatron, list(inputs.values())
    )
    return {
        pair: compare_traces(trace, references[pair], plan.num_layers)
        for pair, trace in zip(inputs, engines.merge_traces(rank_traces), strict=True)
    }


def _build_pair(gap: LogProbGap, differences: dict[str, float] | None, dtype: str) -> Pair:
    if differences is None:
        return Pair(True, gap)
    return Pair(False, gap, find_first_different(differences, dtype), differences)


def _decode_tokens(model: str, gaps: Iterable[LogProbGap]) -> dict[int, str]:
    """Return the text of each worst token and of those before it; {} without a tokenizer."""
    if not has_tokenizer(model):
        return {}
    worst = [token for gap in gaps for token in gap.worst]
    ids = {i for token in worst for i in (*token.before_ids, token.token_id)}
    tokenizer = read_tokenizer(model)
    return {i: tokenizer.decode([i]) for i in ids}


def compare_log_probs(
    sequences: Sequence[list[int]], scores: Scores, reference: Scores
) -> LogProbGap:
    """Compare the log-probs of the last tokens of each sequence, those that both scored.

    Args:
        scores: Megatron's.
        reference: The other engine's; it may have scored fewer tokens.
    """
    counts = [
        min(len(row), len(other))
        for row, other in zip(scores.log_probs, reference.log_probs, strict=True)
    ]
    log_probs = _concatenate_last(scores.log_probs, counts)
    expected = _concatenate_last(reference.log_probs, counts)
    argmax_ids = _concatenate_last(scores.top_ids, counts)
    expected_argmax_ids = _concatenate_last(reference.top_ids, counts)
    is_finite = np.isfinite(log_probs) & np.isfinite(expected)
    with np.errstate(invalid="ignore"):
        gaps = np.where(is_finite, np.abs(log_probs - expected), np.inf)
    # A percentile is one of the differences: the larger neighbor, never an interpolation.
    p50, p90, p99 = (float(np.percentile(gaps, p, method="higher")) for p in (50, 90, 99))
    positions = [
        (row, len(ids) - count + index)
        for row, (ids, count) in enumerate(zip(sequences, counts, strict=True))
        for index in range(count)
    ]
    worst = []
    for index in np.argsort(-gaps, kind="stable")[:_NUM_WORST]:
        row, position = positions[index]
        ids = sequences[row]
        before_ids = ids[max(0, position - _NUM_BEFORE) : position]
        values = float(log_probs[index]), float(expected[index])
        worst.append(WorstToken(row, position, ids[position], before_ids, *values))
    return LogProbGap(
        num_tokens=len(gaps),
        max_abs=float(gaps.max()),
        mean_abs=float(gaps.mean()),
        p50_abs=p50,
        p90_abs=p90,
        p99_abs=p99,
        argmax_agreement=float((argmax_ids == expected_argmax_ids).mean()),
        worst=worst,
    )


def _concatenate_last(
    rows: Sequence[Sequence[float]], counts: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Return the last `counts[i]` entries of each row i in one array."""
    parts = [row[len(row) - count :] for row, count in zip(rows, counts, strict=True)]
    return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts])


def list_module_names(num_layers: int) -> list[str]:
    """Return the names of the modules that an engine may trace, in the order of the model."""
    layers = [f"model.layers.{n}.{name}" for n in range(num_layers) for name in _LAYER_MODULES]
    return ["model.embed_tokens", *layers, "model.norm", "lm_head"]


def compare_traces(trace: Trace, reference: Trace, num_layers: int) -> dict[str, float]:
    """Return ||trace - reference|| / ||reference|| of each module in both, in the model's order."""
    names = [name for name in list_module_names(num_layers) if name in trace and name in reference]
    return {name: _compute_relative_difference(trace[name], reference[name]) for name in names}


def _compute_relative_difference(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative error; infinite for another shape or for values that are not finite."""
    if output.shape != reference.shape:
        return float("inf")
    norm = reference.double().norm()
    difference = float((output.double() - reference.double()).norm() / norm.clamp(min=1e-30))
    return difference if difference == difference else float("inf")


def find_first_different(differences: Mapping[str, float], dtype: str) -> str | None:
    """Return the first module over the threshold of the dtype, if any."""
    limit = THRESHOLDS[dtype]
    return next((name for name, difference in differences.items() if difference > limit), None)
