"""Samples of a report: conversations with their rewards and the log-probs of their tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.config.regular_file import check_regular
from mcore_rl.data.sample_tables import EVALUATIONS, SAMPLES, TOKENIZER, list_tables
from mcore_rl.observability.console import escape_control
from mcore_rl.tools.report.figures import pick_evenly
from mcore_rl.tools.report.runs import Run
from mcore_rl.tools.samples.page import Page, Span, TokenTexts, build_page, format_number
from mcore_rl.tools.samples.tables import SUMMARY_COLUMNS, SampleReader, Summary, name_damaged_table

MAX_TABLES = 8  # of a run: training steps, the first, the last and others between
MARK_GAP = 0.1  # nats, as of `mcore-rl samples`
_MAX_FACT = 300  # characters of a column
_FEW = 3  # tables that are named in a line
_TEXTS = ("prompt", "response")  # columns
_IDS = ("prompt_ids", "response_ids", "response_mask")
# Columns of a set of `mcore-rl eval` that a sample shows.
_SET = ("row", "number", "prompt", "response", "reward", "response_tokens")
Sample = dict[str, Any]


def collect_samples(run: Run, num: int) -> tuple[list[Sample], list[str]]:
    """Return at most `num` samples of a run, newest first, spread over its tables.

    The second list has notes: that a command writes none, and what is left out of tables that an
    older version has written, whose rows are shown with the columns that are there.

    A sample has label, step, reward, tokens, facts, and messages with spans of text; a span of
    tokens that the policy chose has their numbers: [servers, trainer, advantage], log-probs in
    nats, null where there is none.

    Raises:
        ConfigError: A table cannot be read.
    """
    if not num:
        return [], []
    if run.kind in ("sft", "dpo", "rm"):
        return [], [f"mcore-rl {run.kind} writes no samples: it trains on those of its data."]
    missing: dict[str, list[str]] = {}  # tables without some columns, by the columns
    if run.kind == "eval":
        tables = sorted((run.folder / SAMPLES).glob("*.parquet"))
        share = math.ceil(num / max(len(tables), 1))
        samples = [
            s for table in tables for s in _read_rows_of(table, table.stem, share, _SET, missing)
        ]
        return samples[:num], _describe_missing(missing)
    names = sorted({path.stem for path in run.folder.glob(f"{EVALUATIONS}/step_*/*.parquet")})
    sources = [(name, step) for name in names for step in _list_ends(run.folder, name)]
    steps = pick_evenly([*list_tables(run.folder)], MAX_TABLES)
    sources = [("", step) for step in reversed(steps)] + sources
    share = math.ceil(num / max(len(sources), 1))
    samples = []
    for name, step in sources:
        samples += _read_step(run, name, step, share, missing)
    return samples[:num], _describe_missing(missing)


def _describe_missing(missing: Mapping[str, Sequence[str]]) -> list[str]:
    return [
        f"{', '.join(tables[:_FEW])}{', ...' * (len(tables) > _FEW)}: of another version, without "
        f"the columns {columns}; shown is the rest"
        for columns, tables in missing.items()
    ]


def _list_ends(folder: Path, name: str) -> list[int]:
    """Return the last and the first step of an evaluation."""
    steps = [*list_tables(folder, name)]
    return sorted({*steps[:1], *steps[-1:]}, reverse=True)


def _read_step(
    run: Run, evaluation: str, step: int, num: int, missing: dict[str, list[str]]
) -> Iterator[Sample]:
    """Yield trajectories of a step, at equal distances in its table."""
    reader = SampleReader(str(run.folder), evaluation)
    source = f"{evaluation or 'training'}, step {step}"
    if not {*SUMMARY_COLUMNS} <= {*_open(reader.tables[step]).schema_arrow.names}:
        yield from _read_rows_of(reader.tables[step], source, num, SUMMARY_COLUMNS, missing)
        return
    summaries = pick_evenly(reader.read_summaries([step]), num)
    tokenizer = run.folder / SAMPLES / TOKENIZER
    texts = TokenTexts(tokenizer) if tokenizer.is_file() else None
    for summary in summaries:
        label = f"{source}, group {summary.group}, no. {summary.trajectory}"
        if texts is None or not {*_IDS} <= {*_open(summary.path).schema_arrow.names}:
            # sample_log.tokens=false, perhaps since a resume
            [columns] = _read_rows(summary.path, [summary.rows[-1]])
            yield _build_text_sample(label, source, columns, summary.num_tokens)
        else:
            page = build_page(summary, texts, MARK_GAP, run.folder)
            yield _build_token_sample(label, source, page, summary)


def _build_token_sample(label: str, source: str, page: Page, summary: Summary) -> Sample:
    segments = [
        [
            {
                "role": message.role,
                "about": f"turn {message.turn}: {message.facts}" if message.turn >= 0 else "",
                "spans": [_convert_span(span) for span in message.spans],
            }
            for message in messages
        ]
        for messages in page.segments
    ]
    return {
        "label": label,
        "source": source,
        "reward": _to_json(summary.reward),
        "tokens": summary.num_tokens,
        "gap": None if summary.max_gap is None else _to_json(summary.max_gap),
        "facts": page.facts,
        "segments": segments,
    }


def _convert_span(span: Span) -> dict[str, Any]:
    kind = [name for name in ("chosen" * span.is_chosen, span.part) if name]
    converted: dict[str, Any] = {"text": span.text}
    if kind:
        converted["kind"] = kind
    if span.gap is not None:
        converted["gap"] = _to_json(span.gap)
    if span.tokens:
        converted["tokens"] = [
            [_to_json(token.servers), _to_json(token.trainer), _to_json(token.advantage)]
            for token in span.tokens
        ]
    return converted


def _to_json(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _read_rows_of(
    path: Path, source: str, num: int, needed: Sequence[str], missing: dict[str, list[str]]
) -> Iterator[Sample]:
    """Yield rows of a table of texts, at equal distances: a set of `mcore-rl eval`, or older ones.

    Args:
        needed: Columns of such a table today; those that are not there go to `missing`.
    """
    absent = [name for name in needed if name not in _open(path).schema_arrow.names]
    if absent:
        missing.setdefault(", ".join(absent), []).append(f"{path.parent.name}/{path.name}")
    rows = pick_evenly(range(_open(path).metadata.num_rows), num)
    for row, columns in zip(rows, _read_rows(path, rows), strict=True):
        number = f", no. {columns['number']}" if "number" in columns else ""
        label = f"{source}, row {columns.get('row', row)}{number}"
        num_tokens = columns.get("response_tokens", columns.get("num_tokens"))
        yield _build_text_sample(label, source, columns, num_tokens)


def _build_text_sample(
    label: str, source: str, columns: Mapping[str, Any], num_tokens: int | None
) -> Sample:
    """Build a sample from a row whose tokens are not recorded."""
    messages = [
        {"role": role, "about": "", "spans": [{"text": escape_control(str(columns[name]))}]}
        for role, name in (("context", "prompt"), ("assistant", "response"))
        if name in columns
    ]
    reward = columns.get("reward")
    facts = [
        (name, escape_control(_format_value(value))[:_MAX_FACT])
        for name, value in columns.items()
        if name not in _TEXTS and value not in (None, "")
    ]
    return {
        "label": label,
        "source": source,
        "reward": None if reward is None else _to_json(reward),
        "tokens": num_tokens,
        "gap": None,
        "facts": facts,
        "segments": [messages],
    }


def _format_value(value: object) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def _open(path: Path) -> pq.ParquetFile:
    with name_damaged_table(path):
        check_regular(path)
        return pq.ParquetFile(path)


def _read_rows(path: Path, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows of a table, without lists of tokens."""
    file = _open(path)
    names = [field.name for field in file.schema_arrow if not pa.types.is_list(field.type)]
    with name_damaged_table(path):
        return [*file.read(names).take([*rows]).to_pylist()]
