"""The comparison: each engine in processes of its own, one after the other; and its outcome."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.controller.process_cleanup import clean_up_on_exit
from mcore_rl.data.tokenizer import has_tokenizer, read_tokenizer
from mcore_rl.jobs.failure import summarize_failure
from mcore_rl.jobs.parity import engines
from mcore_rl.jobs.parity.compare import (
    THRESHOLDS,
    Gap,
    Scores,
    Trace,
    WorstToken,
    compare,
    differences,
    first_different,
)
from mcore_rl.jobs.parity.settings import CONTINUATION, HF, VLLM, ParityPlan, Request, checked
from mcore_rl.jobs.ranks import run_in_process, run_on_ranks
from mcore_rl.observability.console import show_waiting
from mcore_rl.observability.process import list_versions

WITH_HF, WITH_PREFILL, WITH_DECODE = "megatron~hf", "megatron~vllm_prefill", "megatron~vllm_decode"
_NUM_SHOWN = 3  # of the worst tokens of a pair


@dataclass(frozen=True, slots=True)
class Pair:
    """Megatron and one other engine. The last two fields are for a pair that did not pass."""

    passed: bool
    gap: Gap
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
    texts: dict[int, str]  # of the tokens in the report, by id; empty without a tokenizer

    @property
    def passed(self) -> bool:
        return all(pair.passed for pair in self.pairs.values())

    def as_json(self) -> dict[str, Any]:
        """What json.dumps takes with allow_nan=False: null stands for what is infinite."""
        return {
            "passed": self.passed,
            "tolerance": self.tolerance,
            "mean_tolerance": self.mean_tolerance,
            "layout": asdict(self.layout),
            "dtype": self.dtype,
            "versions": self.versions,
            "pairs": {name: self._pair_as_json(pair) for name, pair in self.pairs.items()},
        }

    def _pair_as_json(self, pair: Pair) -> dict[str, Any]:
        found = {"passed": pair.passed, **asdict(pair.gap)}
        for token, entry in zip(pair.gap.worst, found["worst"], strict=True):
            entry["text"] = self._text(token)
        if not pair.passed:
            found["first_differing_module"] = pair.first_differing_module
            found["module_differences"] = pair.module_differences
        return _without_infinities(found)

    def _text(self, token: WorstToken) -> str | None:
        """The tokens before it, and it in brackets."""
        if not self.texts:
            return None
        before = "".join(self.texts[i] for i in token.before_ids)
        return f"{before}[{self.texts[token.token_id]}]"

    def print(self, console: Console) -> None:
        """A table of the pairs, one of their worst tokens, and what missed pairs come down to."""
        bounds = f"max {self.tolerance:g}"
        if self.mean_tolerance is not None:
            bounds += f", mean {self.mean_tolerance:g}"
        title = f"Differences of log-probs in nats, {self.dtype}; allowed: {bounds}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for heading in ("", "tokens", "max", "mean", "p99", "argmax", ""):
            table.add_column(heading, justify="left" if heading == "" else "right", no_wrap=True)
        for name, pair in self.pairs.items():
            gap = pair.gap
            sizes = (gap.max_abs, gap.mean_abs, gap.p99_abs)
            table.add_row(
                name,
                str(gap.num_tokens),
                *(f"{size:.1e}" for size in sizes),
                f"{gap.argmax_agreement:.1%}",
                "passed" if pair.passed else "FAILED",
            )
        console.print(table)
        console.print(self._worst_tokens())
        for name, pair in self.pairs.items():
            if not pair.passed:
                console.print(f"{name}: {self._finding(pair)}", markup=False, highlight=False)

    def _worst_tokens(self) -> Table:
        table = Table(title="The worst tokens", title_justify="left", box=box.SIMPLE_HEAD)
        for heading in ("", "prompt", "position", "token", "Megatron", "the other", "context"):
            table.add_column(heading, justify="left" if heading in ("", "context") else "right")
        for name, pair in self.pairs.items():
            for token in pair.gap.worst[:_NUM_SHOWN]:
                context = self._text(token) or " ".join(map(str, token.before_ids))
                table.add_row(
                    name,
                    str(token.prompt),
                    str(token.position),
                    str(token.token_id),
                    f"{token.log_prob:.6f}",
                    f"{token.reference_log_prob:.6f}",
                    context.replace("[", r"\["),
                )
        return table

    def _finding(self, pair: Pair) -> str:
        first, found = pair.first_differing_module, pair.module_differences or {}
        if first is not None:
            named = (
                f"the first module that differs is {first} (by {found[first]:.1e} of its output)"
            )
            doubt = "; in bfloat16 rounding may do that to a router, --dtype float32 would tell"
            return named + (doubt if self.dtype == "bfloat16" else "")
        limit, largest = THRESHOLDS[self.dtype], max(found.values(), default=math.nan)
        return (
            f"no module differs by more than {limit:g} of its output (the most is {largest:.1e}): "
            "small differences add up"
        )


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinities(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_infinities(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run(request: Request) -> ParityReport:
    """Score the same tokens under all engines; where they differ, find the module.

    Raises:
        ConfigError: an option or an input is wrong.
        RunFailed: an engine failed.
    """
    plan = checked(request)
    trace_file = Path(tempfile.gettempdir(), f"mcore_rl_verify_{os.getpid()}.txt")
    with clean_up_on_exit() as scratch, summarize_failure(trace_file, ConfigError):
        processes = _Processes(plan, scratch)
        sequences, gaps = _score(plan, processes)
        missed = {pair: gap for pair, gap in gaps.items() if not _passes(gap, plan)}
        parts = _bisect(plan, processes, sequences, missed) if missed else {}
    pairs = {pair: _judged(gap, parts.get(pair), request.dtype) for pair, gap in gaps.items()}
    return ParityReport(
        tolerance=plan.tolerance,
        mean_tolerance=plan.mean_tolerance,
        layout=request.layout,
        dtype=request.dtype,
        versions=list_versions(),
        pairs=pairs,
        texts=_texts(request.model, gaps.values()),
    )


@dataclass(frozen=True, slots=True)
class _Processes:
    """Runs functions of engines.py; what they print goes to files in `logs`."""

    plan: ParityPlan
    logs: Path

    def megatron(self, doing: str, job: Callable[..., Any], tokens: list[list[int]]) -> list[Any]:
        request = self.plan.request
        on_rank = partial(job, self.plan.engine, request.checkpoint, tokens)
        with show_waiting(doing, Console(stderr=True), has_lines=False):
            return run_on_ranks(on_rank, request.layout.world_size, self.logs, request.timeout_s)

    def hf(self, doing: str, job: Callable[..., Any], tokens: list[list[int]]) -> Any:
        of_model = partial(job, self.plan.reference, self.plan.request.dtype, tokens)
        return self._alone(doing, "transformers", of_model)

    def vllm(self, doing: str, job: Callable[..., Any], *given: Any) -> Any:
        return self._alone(doing, VLLM, partial(job, self.plan.server, *given))

    def _alone(self, doing: str, name: str, job: Callable[[], Any]) -> Any:
        with show_waiting(doing, Console(stderr=True), has_lines=False):
            return run_in_process(job, name, self.logs, self.plan.request.timeout_s)


def _score(plan: ParityPlan, processes: _Processes) -> tuple[list[list[int]], dict[str, Gap]]:
    """The sequences that are scored, and by pair how far Megatron is from the other."""
    sequences, others = plan.prompts, {}
    if plan.server is not None:
        doing = "vLLM continues and scores the prompts"
        answer = processes.vllm(doing, engines.vllm_scores, plan.prompts, CONTINUATION)
        sequences = answer["sequences"]
        others = {WITH_PREFILL: answer["prefill"], WITH_DECODE: answer["decode"]}
    if HF in plan.request.against:
        answer = processes.hf("transformers scores them", engines.hf_scores, sequences)
        others = {WITH_HF: answer, **others}
    by_rank = processes.megatron("Megatron scores them", engines.megatron_scores, sequences)
    mine = engines.gathered(by_rank)
    return sequences, {p: compare(sequences, mine, Scores(**their)) for p, their in others.items()}


def _passes(gap: Gap, plan: ParityPlan) -> bool:
    mean = plan.mean_tolerance
    return gap.max_abs <= plan.tolerance and (mean is None or gap.mean_abs <= mean)


def _bisect(
    plan: ParityPlan, processes: _Processes, sequences: list[list[int]], missed: Mapping[str, Gap]
) -> dict[str, dict[str, float]]:
    """By missed pair, how far each module is apart on the sequence up to the worst token."""
    worst = {pair: gap.worst[0] for pair, gap in missed.items()}
    tokens = {pair: sequences[at.prompt][: at.position + 1] for pair, at in worst.items()}
    theirs: dict[str, Trace] = {}
    if of_vllm := {pair: ids for pair, ids in tokens.items() if pair != WITH_HF}:
        traces = processes.vllm("tracing vLLM", engines.vllm_traces, list(of_vllm.values()))
        theirs |= zip(of_vllm, traces, strict=True)
    if WITH_HF in tokens:
        [theirs[WITH_HF]] = processes.hf(
            "tracing transformers", engines.hf_traces, [tokens[WITH_HF]]
        )
    by_rank = processes.megatron("tracing Megatron", engines.megatron_traces, list(tokens.values()))
    return {
        pair: differences(mine, theirs[pair], plan.num_layers)
        for pair, mine in zip(tokens, engines.joined(by_rank), strict=True)
    }


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
