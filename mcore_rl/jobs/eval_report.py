"""What an evaluation says of the responses to one data set: samples, metrics, a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from mcore_rl.agents.single_turn import Tokenizer, decode_response
from mcore_rl.algorithms.estimates import compute_mean_and_error, majority_at_k, pass_at_k
from mcore_rl.config.schema import ScoringConfig
from mcore_rl.data.batch import Batch
from mcore_rl.observability.console import get_stdout_console
from mcore_rl.rewards.registry import FindAnswer

Metrics = dict[str, Any]  # numbers, and {"mean": ..., "standard_error": ...} of what has an error
_SETS_OF_A_TABLE = 3


@dataclass(frozen=True, slots=True)
class SetSamples:
    """n responses to each prompt, in the order of the prompts."""

    n: int
    columns: dict[str, list[Any]]  # of the table of samples, an entry a response
    has_answers: bool

    @classmethod
    def of(
        cls,
        prompts: Batch,
        samples: Batch,
        tokenizer: Tokenizer,
        find_answer: FindAnswer | None,
        config: ScoringConfig,
        stop: Sequence[str] = (),
    ) -> SetSamples:
        """From prompts and what a RolloutPool made of them, with these stop strings."""
        place = {group: row for row, group in enumerate(prompts.array("group_ids").tolist())}
        asked = [place[group] for group in samples.array("group_ids").tolist()]
        order = sorted(range(len(samples)), key=asked.__getitem__)  # stable: the numbers are kept
        samples, n = samples.take(order), len(samples) // len(prompts)
        of_prompt = [row for row in range(len(prompts)) for _ in range(n)]
        ends = samples.array("finish_reasons").tolist()
        ids = samples.jagged("response_ids")
        texts = [_text(tokenizer, i.tolist(), e, stop) for i, e in zip(ids, ends, strict=True)]
        fields = [json.loads(entry) for entry in prompts.jagged("fields").texts]
        errors = samples.array("reward_errors").tolist()
        scored = f"reward/{config.term}" if config.term else "rewards"
        # A term without a column: the reward of every response has failed.
        found = samples.array(scored) if scored in samples else np.full(len(samples), np.nan)
        scores = np.nan_to_num(found, nan=-np.inf)
        prompt_texts = [tokenizer.decode(p.tolist()) for p in prompts.jagged("prompt_ids")]
        columns: dict[str, list[Any]] = {
            "row": [int(prompts.array("rows")[row]) for row in of_prompt],
            "number": [number for _ in range(len(prompts)) for number in range(n)],
            "prompt": [prompt_texts[row] for row in of_prompt],
            "response": texts,
            "answer": [str(fields[row]["answer"]) for row in of_prompt],
            "reward": samples.array("rewards").tolist(),
            "correct": [
                bool(score >= config.correct_from) and not error
                for score, error in zip(scores, errors, strict=True)
            ],
            "finish_reason": ends,
            "response_tokens": ids.lengths.tolist(),
            "reward_error": errors,
        }
        if find_answer is not None:
            answers = [find_answer(t, e) for t, e in zip(texts, ends, strict=True)]
            columns["extracted_answer"] = answers
        for name in sorted(samples.columns):
            if name.startswith("reward/"):
                columns[name] = samples.array(name).tolist()
        return cls(n, columns, find_answer is not None)

    @classmethod
    def read(cls, path: Path, n: int) -> SetSamples:
        """From the file of its table."""
        columns = pq.read_table(path).to_pydict()
        return cls(n, columns, "extracted_answer" in columns)

    def groups(self, column: str) -> list[list[Any]]:
        """A list a prompt."""
        values = self.columns[column]
        return [values[start : start + self.n] for start in range(0, len(values), self.n)]

    def table(self) -> pa.Table:
        given = {"extracted_answer": pa.string()}  # all of them may be null
        arrays = {name: pa.array(v, given.get(name)) for name, v in self.columns.items()}
        return pa.table(arrays)


def _text(tokenizer: Tokenizer, token_ids: list[int], end: str, stop: Sequence[str]) -> str:
    """One that a stop string ends has no token that says so."""
    whole = tokenizer.decode(token_ids) if stop else ""
    return whole if any(s in whole for s in stop) else decode_response(tokenizer, token_ids, end)


def metrics_of(samples: SetSamples, ks: Sequence[int]) -> Metrics:
    """Those of one set. Standard errors are over prompts."""
    correct, n = samples.groups("correct"), samples.n
    values = {
        "reward": [np.mean(group) for group in samples.groups("reward")],
        f"mean@{n}": [np.mean(group) for group in correct],
    }
    values |= {f"pass@{k}": [pass_at_k(n, sum(group), k) for group in correct] for k in ks}
    if samples.has_answers:
        answers = samples.groups("extracted_answer")
        votes = [majority_at_k(a, c, ks) for a, c in zip(answers, correct, strict=True)]
        values |= {f"majority@{k}": [row[i] for row in votes] for i, k in enumerate(ks)}
    found: Metrics = {
        "prompts": len(correct),
        "responses": len(samples.columns["correct"]),
        "reward_errors": sum(map(bool, samples.columns["reward_error"])),
        "cut_off": float(np.mean([e == "length" for e in samples.columns["finish_reason"]])),
    }
    values["response_tokens"] = [np.mean(group) for group in samples.groups("response_tokens")]
    for name, column in values.items():
        mean, error = compute_mean_and_error(column)
        found[name] = {"mean": mean, "standard_error": error}
    return found


def print_table(found: Mapping[str, Metrics], console: Console | None = None) -> None:
    """A row a metric, a column a set; after ± is the standard error.

    Several tables where one would not fit on a screen of 80 columns.
    """
    names = list(found)
    for first in range(0, len(names), _SETS_OF_A_TABLE):
        shown = {name: found[name] for name in names[first : first + _SETS_OF_A_TABLE]}
        title = "mean ± standard error over prompts" if not first else None
        table = Table(title=title, title_justify="left")
        table.add_column("")
        for name in shown:
            table.add_column(name, justify="right", overflow="fold")
        for metric in next(iter(shown.values())):
            cells = [_cell(metric, metrics[metric]) for metrics in shown.values()]
            table.add_row(metric, *cells)
        (console or get_stdout_console()).print(table)


def _cell(metric: str, value: Any) -> str:
    if not isinstance(value, dict):
        return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
    digits = 1 if metric == "response_tokens" else 3
    error = value["standard_error"]
    after = "" if error is None else f" ± {error:.{digits}f}"
    return f"{value['mean']:.{digits}f}{after}"
