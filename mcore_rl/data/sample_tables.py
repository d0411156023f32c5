"""Tables of samples in the folder of a run: where they are, and what is in them. No torch.

A table is a parquet file with a row a sample. Its columns are those of `summary_columns`, the texts
that its writer adds and, to see each token, those of `token_columns`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.data.batch import Batch, Jagged, Samples

SAMPLES, EVALUATIONS = "samples", "evaluations"  # folders in the output folder of a run
TOKENIZER = "tokenizer.json"  # in SAMPLES: what token ids are text by
METADATA = b"mcore_rl.samples"  # of the schema: JSON with num_samples, those that there were

TRAJECTORY = ("group", "trajectory", "segment", "num_turns", "status", "replayed")
# One entry a token of the prompt, or of the response. Log-probs are of the trainer and of the
# servers, in nats; a table has both or neither.
_TOKENS = {
    "prompt_ids": ("prompt_ids", np.int32),
    "response_ids": ("response_ids", np.int32),
    "response_mask": ("response_mask", np.int8),
    "turn_numbers": ("turn_numbers", np.int32),
    "weight_versions": ("weight_versions", np.int32),
    "log_probs": ("log_probs", np.float32),
    "rollout_log_probs": ("rollout_log_probs", np.float32),
    "token_advantages": ("advantages", np.float32),
    "process_rewards": ("process_rewards", np.float32),
}
TOKEN_COLUMNS = tuple(_TOKENS)
_LOG_PROBS = ("log_probs", "rollout_log_probs")  # which no two tokens share
_ROWS_OF_A_GROUP = 64  # are read at once
_OF_STEP = re.compile(r"step_([0-9]{6,})(\.parquet)?")


def table_path(run: Path, step: int, evaluation: str = "") -> Path:
    """Of the samples that a step trains on or, by its name, of a set that it evaluates."""
    name = f"step_{step:06d}"
    if evaluation:
        return run / EVALUATIONS / name / f"{evaluation}.parquet"
    return run / SAMPLES / f"{name}.parquet"


def tables_in(run: Path, evaluation: str = "") -> dict[int, Path]:
    """Those that there are, by step."""
    steps = _by_step(run / (EVALUATIONS if evaluation else SAMPLES))
    paths = {step: table_path(run, step, evaluation) for step in sorted(steps)}
    return {step: path for step, path in paths.items() if path.is_file()}


def _by_step(folder: Path) -> dict[int, Path]:
    entries = folder.iterdir() if folder.is_dir() else ()
    found = [(_OF_STEP.fullmatch(entry.name), entry) for entry in entries]
    return {int(match[1]): entry for match, entry in found if match}


def go_on_after(run: Path, step: int, before: Path) -> None:
    """Leaves the tables of a run that goes on after `step`: without those of later steps.

    If it goes on in another folder than it began in, `before`, it gets the tables from there.
    """
    for name in (SAMPLES, EVALUATIONS):
        for number, entry in _by_step(run / name).items():
            if number > step:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if before.absolute() == run.absolute():
            continue
        kept = [entry for number, entry in _by_step(before / name).items() if number <= step]
        if (before / name / TOKENIZER).is_file():
            kept.append(before / name / TOKENIZER)
        for entry in kept:
            _take(entry, run / name / entry.name)


def _take(source: Path, target: Path) -> None:
    """A file, or a folder of files. Nothing writes into a table: both folders may have the same."""
    if source.is_dir():
        for entry in source.iterdir():
            _take(entry, target / entry.name)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.taken.partial")  # which no table is written under
    aside.unlink(missing_ok=True)
    try:
        os.link(source, aside)
    except OSError:  # another disk
        shutil.copyfile(source, aside)
    aside.replace(target)
    aside.unlink(missing_ok=True)  # a rename to another name of the same file does nothing


def first_trajectories(batch: Samples, max_samples: int, max_tokens: int) -> list[int]:
    """Rows of the first trajectories, whole ones, within both bounds; of one at least.

    0 is no bound.
    """
    keys = zip(batch.array("group_ids").tolist(), batch.array("trajectories").tolist(), strict=True)
    trajectories: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(keys):
        trajectories.setdefault(key, []).append(row)
    rows: list[int] = []
    num_tokens, tokens = batch.num_tokens.tolist(), 0
    for own in trajectories.values():
        tokens += sum(num_tokens[row] for row in own)
        is_full = (max_samples and len(rows) + len(own) > max_samples) or (
            max_tokens and tokens > max_tokens
        )
        if rows and is_full:
            break
        rows += own
    return sorted(rows)


def with_own_log_probs(batch: Batch) -> Batch:
    """Without log_probs where they are not the trainer's own but the servers': nothing differs."""
    if not _has_both(batch) or batch["log_probs"] is not batch["rollout_log_probs"]:
        return batch
    return batch.select(*batch.columns.keys() - {"log_probs"})


def summary_columns(batch: Batch) -> dict[str, pa.Array]:
    """One value a sample, under the names that tables have.

    answer and columns (the others of the data row, as JSON), role, advantage (the mean over the
    response's tokens that the policy chose) and max_logprob_gap (of those tokens; null without
    one) are there where the batch tells of them.
    """
    found = {
        "group": pa.array(batch.array("group_ids")),
        "trajectory": pa.array(batch.array("trajectories")),
        "segment": pa.array(batch.array("segments")),
        "num_turns": pa.array(batch.array("turns")),
        "status": pa.array(batch.array("statuses").tolist(), pa.string()),
        "replayed": pa.array(_replayed(batch)),
        "reward": pa.array(batch.array("rewards")),
        "finish_reason": pa.array(batch.array("finish_reasons").tolist(), pa.string()),
        "num_tokens": pa.array(batch.jagged("response_ids").lengths),
        "reward_error": pa.array(batch.array("reward_errors").tolist(), pa.string()),
    }
    if "fields" in batch:
        fields = [json.loads(text) if text.strip() else {} for text in batch.jagged("fields").texts]
        answers = [row.pop("answer", "") for row in fields]
        found["answer"] = pa.array(map(_format_value, answers), pa.string())
        found["columns"] = pa.array(map(_format_value, fields), pa.string())
    if "roles" in batch and (batch.array("roles") != "").any():
        found["role"] = pa.array(batch.array("roles").tolist(), pa.string())
    for name in batch.columns:
        if name.startswith("reward/"):
            found[name] = pa.array(batch.array(name))
    if "advantages" in batch:
        found["advantage"] = pa.array([_mean(row) for row in _chosen(batch, "advantages")])
    if _has_both(batch):
        rows = zip(*(_chosen(batch, name) for name in _LOG_PROBS), strict=True)
        gaps = [np.abs(trainer - server) for trainer, server in rows]
        largest = [float(gap.max()) if len(gap) else None for gap in gaps]
        found["max_logprob_gap"] = pa.array(largest, pa.float32())
    return found


def token_columns(batch: Batch) -> dict[str, pa.Array]:
    """One list a sample, with an entry a token."""
    found = {}
    for name, (column, dtype) in _TOKENS.items():
        if column in batch and (column not in _LOG_PROBS or _has_both(batch)):
            found[name] = _lists(batch.jagged(column), dtype)
    return found


def write_table(path: Path, columns: Mapping[str, pa.Array], num_samples: int) -> None:
    """Whole or not at all. `num_samples` is how many there were to write. Raises OSError."""
    table = pa.table(dict(columns))
    table = table.replace_schema_metadata({METADATA: json.dumps({"num_samples": num_samples})})
    aside = path.with_name(f".{path.name}.partial")
    floats = [f"{name}.list.element" for name in _LOG_PROBS if name in columns]
    others = [
        f"{name}.list.element" if pa.types.is_list(table.schema.field(name).type) else name
        for name in columns
        if name not in _LOG_PROBS
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            table,
            aside,
            compression="zstd",
            row_group_size=_ROWS_OF_A_GROUP,
            use_dictionary=others,
            use_byte_stream_split=floats,
        )
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _format_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()  # parquet has no half surrogate pairs


def _lists(column: Jagged, dtype: npt.DTypeLike) -> pa.Array:
    values = pa.array(column.values.astype(dtype))
    return pa.ListArray.from_arrays(pa.array(column.offsets.astype(np.int32)), values)


def _replayed(batch: Batch) -> npt.NDArray[np.bool_]:
    if "replayed" not in batch:
        return np.zeros(len(batch), np.bool_)
    return np.asarray(batch.array("replayed") != 0)


def _has_both(batch: Batch) -> bool:
    return all(name in batch for name in _LOG_PROBS)


def _chosen(batch: Batch, name: str) -> Iterator[npt.NDArray[np.float32]]:
    """A column along response tokens, where the policy chose the token, sample by sample."""
    rows, masks = batch.jagged(name), batch.jagged("response_mask")
    return (row[mask != 0] for row, mask in zip(rows, masks, strict=True))


def _mean(row: npt.NDArray[np.float32]) -> float:
    return float(row.mean()) if len(row) else 0.0
