"""The outcome of a comparison, as JSON and as tables."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mcore_rl.config.schema import Layout
from mcore_rl.jobs.parity.compare import Gap, WorstToken
from mcore_rl.jobs.parity.modules import THRESHOLDS

_NUM_SHOWN = 3  # of the worst tokens of a pair


@dataclass(frozen=True, slots=True)
class Pair:
    """Megatron and one other engine. The last three fields are for a pair that did not pass."""

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
