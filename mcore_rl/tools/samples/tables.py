"""Reader of the sample tables of a run: summaries of trajectories, and the tokens of one."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.config.checks import check_exists
from mcore_rl.config.errors import ConfigError, describe_error
from mcore_rl.config.regular_file import check_regular
from mcore_rl.data.batch import IMAGES
from mcore_rl.data.sample_tables import METADATA, TOKEN_COLUMNS, TRAJECTORY, list_tables

# Columns of a table that a summary needs.
SUMMARY_COLUMNS = (*TRAJECTORY, "reward", "reward_error", "finish_reason", "num_tokens")
_OPTIONAL = ("role", "advantage", "max_logprob_gap", "answer", "columns")
_OLDER = "of a version of mcore-rl before there was `mcore-rl samples`"
_DIGEST = re.compile("[0-9a-f]+")  # no other name is looked for among the images
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """Fields of a trajectory, without its tokens. Rewards are those of its last sample."""

    path: Path  # of the table
    rows: tuple[int, ...]  # in it, one a segment
    step: int
    group: int
    trajectory: int
    role: str
    num_turns: int
    num_tokens: int  # of all responses
    status: str
    finish_reason: str
    reward: float
    reward_error: str
    parts: Mapping[str, float]  # NaN without a reward
    advantage: float | None  # mean over the tokens that the policy chose
    max_gap: float | None  # of log-probs, in nats
    is_replayed: bool
    answer: str | None  # the reference of the data row
    columns: Mapping[str, Any]  # the other columns of the data row


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of a sample, prompt and response: all arrays are [tokens]."""

    ids: Array
    is_chosen: Array  # by the policy, and trained here
    turns: Array  # of the policy, from 0; -1: of none
    versions: Array  # of the weights; -1: none
    trainer: Array  # log-probs in nats, as of the servers below; NaN where there is none
    servers: Array
    advantages: Array  # NaN where there is none
    rewards: Array  # share of the reward of a token; NaN where there is none
    images: tuple[str, ...] = ()  # digests in the run's ImageStore, in the order of the tokens


SORTS: dict[str, Callable[[Summary], float]] = {  # the largest first
    "reward": lambda s: s.reward,
    "gap": lambda s: -1.0 if s.max_gap is None else _rank_nan_largest(s.max_gap),
    "length": lambda s: s.num_tokens,
}


def _rank_nan_largest(value: float) -> float:
    return math.inf if math.isnan(value) else value


class SampleReader:
    """The tables of a run; of an evaluation, by the name of its set, instead of training."""

    def __init__(self, run: str, evaluation: str = "") -> None:
        """Open a run; raise ConfigError if it is no folder of a run, or has no tables."""
        check_exists("RUN", run)
        self.tables = list_tables(Path(run), evaluation)
        if self.tables:
            return
        if not (Path(run) / "config.json").is_file():
            raise ConfigError(f"RUN={run!r} is not the output folder of a run: no config.json")
        if evaluation:
            names = sorted({path.stem for path in Path(run).glob("evaluations/step_*/*.parquet")})
            hint = f"allowed: {', '.join(names)}" if names else "there are none"
            raise ConfigError(f"--evaluation={evaluation!r}: {run} has none of that name; {hint}")
        raise ConfigError(
            f"RUN={run!r} has no samples: no step has been trained yet, or sample_log.every=0"
        )

    def select_steps(self, text: str) -> list[int]:
        """Return the steps of a text: "" is the last one, "all" all, "3" or "3-7" these.

        Raises:
            ConfigError: There is none of them, or the text is not of that form.
        """
        known = list(self.tables)
        if text in ("", "all"):
            return known if text else known[-1:]
        first, dash, last = text.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ConfigError(f"--step={text!r}; allowed: all, a step, or two as in 3-7")
        bounds = int(first), int(last or first)
        if steps := [step for step in known if bounds[0] <= step <= bounds[1]]:
            return steps
        between = f", from {known[0]} to {known[-1]}" if len(known) > 1 else f": {known[0]}"
        raise ConfigError(
            f"--step={text}: there is no table of it; there are tables of {len(known)} steps"
            f"{between}"
        )

    def read_summaries(self, steps: Sequence[int]) -> list[Summary]:
        """Return all trajectories of these steps, in the order of their tables."""
        summaries: list[Summary] = []
        for step in steps:
            with name_damaged_table(self.tables[step]):
                summaries += _read_summaries(self.tables[step], step)
        return summaries

    def count_left_out(self, steps: Sequence[int]) -> int:
        """Return the samples that sample_log.max_rows and max_tokens left out of these steps."""
        num_left_out = 0
        for step in steps:
            file = _open_file(self.tables[step])
            with name_damaged_table(self.tables[step]):
                num_left_out += _count_written(file) - file.metadata.num_rows
        return num_left_out


def read_segments(summary: Summary) -> list[Segment]:
    """Return the tokens of a trajectory.

    Raises:
        ConfigError: The table has none, or cannot be read.
    """
    names = set(_open_file(summary.path).schema_arrow.names)
    if missing := sorted({"prompt_ids", "response_ids", "response_mask"} - names):
        raise ConfigError(
            f"{summary.path} has no tokens ({', '.join(missing)}): sample_log.tokens=false; "
            "allowed: --list"
        )
    with name_damaged_table(summary.path):
        return [_build_segment(_read_row(summary.path, row)) for row in summary.rows]


def _read_summaries(path: Path, step: int) -> Iterator[Summary]:
    file = _open_file(path)
    names = file.schema_arrow.names
    if missing := [name for name in SUMMARY_COLUMNS if name not in names]:
        raise ConfigError(f"{path} has no column {', '.join(missing)}: it is {_OLDER}")
    parts = [name for name in names if name.startswith("reward/")]
    columns = [*SUMMARY_COLUMNS, *parts, *(name for name in _OPTIONAL if name in names)]
    rows = file.read(columns).to_pylist()
    trajectories: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(rows):
        trajectories.setdefault((row["group"], row["trajectory"]), []).append(number)
    for (group, trajectory), numbers in trajectories.items():
        numbers.sort(key=lambda number: rows[number]["segment"])
        segments = [rows[number] for number in numbers]
        gaps = [
            row["max_logprob_gap"] for row in segments if row.get("max_logprob_gap") is not None
        ]
        yield Summary(
            path=path,
            rows=tuple(numbers),
            step=step,
            group=group,
            trajectory=trajectory,
            role=segments[-1].get("role", ""),
            num_turns=sum(row["num_turns"] for row in segments),
            num_tokens=sum(row["num_tokens"] for row in segments),
            status=segments[-1]["status"],
            finish_reason=segments[-1]["finish_reason"],
            reward=segments[-1]["reward"],
            reward_error=segments[-1]["reward_error"],
            parts={name.removeprefix("reward/"): segments[-1][name] for name in parts},
            advantage=segments[-1].get("advantage"),
            max_gap=max(gaps, key=_rank_nan_largest, default=None),
            is_replayed=segments[-1]["replayed"],
            answer=segments[-1].get("answer"),
            columns=json.loads(segments[-1].get("columns") or "{}"),
        )


def _build_segment(row: Mapping[str, list[Any]]) -> Segment:
    num_prompt = len(row["prompt_ids"])

    def get_column(name: str, default: float, dtype: type) -> Array:
        values = row.get(name, [default] * len(row["response_ids"]))
        return np.array([default] * num_prompt + values, dtype)

    chosen = get_column("response_mask", 0, np.bool_)

    def get_chosen(name: str) -> Array:
        return np.where(chosen, get_column(name, math.nan, np.float64), math.nan)

    return Segment(
        ids=np.array(row["prompt_ids"] + row["response_ids"], np.int64),
        is_chosen=chosen,
        turns=get_column("turn_numbers", -1, np.int64),
        versions=get_column("weight_versions", -1, np.int64),
        trainer=get_chosen("log_probs"),
        servers=get_chosen("rollout_log_probs"),
        advantages=get_chosen("token_advantages"),
        rewards=get_chosen("process_rewards"),
        images=tuple(name for name in row.get(IMAGES, ()) if _DIGEST.fullmatch(name)),
    )


def _read_row(path: Path, row: int) -> dict[str, list[Any]]:
    metadata = _open_file(path).metadata
    group = 0
    while row >= metadata.row_group(group).num_rows:
        row -= metadata.row_group(group).num_rows
        group += 1
    (fields,) = _read_row_group(path, group).slice(row, 1).to_pylist()
    return {name: values for name, values in fields.items() if values is not None}


@functools.lru_cache(maxsize=2)
def _read_row_group(path: Path, group: int) -> pa.Table:
    file = _open_file(path)
    columns = [n for n in (*TOKEN_COLUMNS, IMAGES) if n in file.schema_arrow.names]
    table: pa.Table = file.read_row_group(group, columns)
    return table


@functools.lru_cache(maxsize=8)
def _open_file(path: Path) -> pq.ParquetFile:
    with name_damaged_table(path):
        check_regular(path)
        return pq.ParquetFile(path, memory_map=True)


def _count_written(file: pq.ParquetFile) -> int:
    metadata = (file.schema_arrow.metadata or {}).get(METADATA)
    return int(json.loads(metadata)["num_samples"]) if metadata else file.metadata.num_rows


@contextmanager
def name_damaged_table(path: Path) -> Iterator[None]:
    """Raise ConfigError with the path if reading inside fails: at pages, texts or JSON in them."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {describe_error(error, 200)}") from error
