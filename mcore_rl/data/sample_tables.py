"""Tables of samples in the folder of a run: their paths and columns. No torch.

A table is a parquet file with a row per sample. Its columns are those of `build_summary_columns`,
texts that its writer adds and, to show each token, those of `build_token_columns`.
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

from mcore_rl.config.atomic_file import write_atomically
from mcore_rl.data.batch import IMAGES, Batch, Jagged, Samples

SAMPLES, EVALUATIONS = "samples", "evaluations"  # folders in the output folder of a run
TOKENIZER = "tokenizer.json"  # in SAMPLES: decodes token ids
METADATA = b"mcore_rl.samples"  # of the schema: JSON with num_samples of the step

TRAJECTORY = ("group", "trajectory", "segment", "num_turns", "status", "replayed")
# One entry per token of the prompt or of the response. Log-probs are by the trainer and by the
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
_LOG_PROBS = ("log_probs", "rollout_log_probs")  # almost no value occurs twice
_ROW_GROUP_SIZE = 64
_STEP_NAME = re.compile(r"step_([0-9]{6,})(\.parquet)?")


def get_table_path(run: Path, step: int, evaluation: str = "") -> Path:
    """Return the path of the samples that a step trains on, or of an evaluation set by its name."""
    name = f"step_{step:06d}"
    if evaluation:
        return run / EVALUATIONS / name / f"{evaluation}.parquet"
    return run / SAMPLES / f"{name}.parquet"


def list_tables(run: Path, evaluation: str = "") -> dict[int, Path]:
    """Return the paths of the tables that exist, by step."""
    steps = _list_steps(run / (EVALUATIONS if evaluation else SAMPLES))
    paths = {step: get_table_path(run, step, evaluation) for step in sorted(steps)}
    return {step: path for step, path in paths.items() if path.is_file()}


def _list_steps(folder: Path) -> dict[int, Path]:
    entries = folder.iterdir() if folder.is_dir() else ()
    matches = [(_STEP_NAME.fullmatch(entry.name), entry) for entry in entries]
    return {int(match[1]): entry for match, entry in matches if match}


def resume_tables(run: Path, step: int, before: Path) -> None:
    """Delete tables of steps after `step`, from which a run resumes.

    A run that resumes in another folder than that of the first run, `before`, gets its tables, and
    the images that its samples name.
    """
    if before.absolute() != run.absolute() and (before / IMAGES).is_dir():
        _link(before / IMAGES, run / IMAGES)
    for name in (SAMPLES, EVALUATIONS):
        for number, entry in _list_steps(run / name).items():
            if number > step:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if before.absolute() == run.absolute():
            continue
        entries = [entry for number, entry in _list_steps(before / name).items() if number <= step]
        if (before / name / TOKENIZER).is_file():
            entries.append(before / name / TOKENIZER)
        for entry in entries:
            _link(entry, run / name / entry.name)


def _link(source: Path, target: Path) -> None:
    """Hard-link a file or the files of a folder (tables never change); copy to another disk."""
    if source.is_dir():
        for entry in source.iterdir():
            _link(entry, target / entry.name)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # No table is written to this name.
    partial_path = target.with_name(f".{target.name}.taken.partial")
    partial_path.unlink(missing_ok=True)
    try:
        os.link(source, partial_path)
    except OSError:  # another disk
        shutil.copyfile(source, partial_path)
    partial_path.replace(target)
    partial_path.unlink(missing_ok=True)  # a rename to another name of the same file does nothing


def select_first_trajectories(batch: Samples, max_samples: int, max_tokens: int) -> list[int]:
    """Select rows of the first whole trajectories within both bounds, at least one trajectory.

    0 is no bound.
    """
    keys = zip(batch.array("group_ids").tolist(), batch.array("trajectories").tolist(), strict=True)
    trajectories: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(keys):
        trajectories.setdefault(key, []).append(row)
    rows: list[int] = []
    num_tokens, tokens = batch.num_tokens.tolist(), 0
    for trajectory in trajectories.values():
        tokens += sum(num_tokens[row] for row in trajectory)
        is_full = (max_samples and len(rows) + len(trajectory) > max_samples) or (
            max_tokens and tokens > max_tokens
        )
        if rows and is_full:
            break
        rows += trajectory
    return sorted(rows)


def drop_server_log_probs(batch: Batch) -> Batch:
    """Drop log_probs that are the servers' (rollout_log_probs) and not the trainer's."""
    if not _has_both(batch) or batch["log_probs"] is not batch["rollout_log_probs"]:
        return batch
    return batch.select(*batch.columns.keys() - {"log_probs"})


def build_summary_columns(batch: Batch) -> dict[str, pa.Array]:
    """Build the columns of one value per sample, by their names in tables.

    If the batch has the data: images (digests), answer and columns (the rest of the data row, as
    JSON), role, advantage (mean over the tokens that the policy chose) and max_logprob_gap (over
    these tokens; null without any).
    """
    columns = {
        "group": pa.array(batch.array("group_ids")),
        "trajectory": pa.array(batch.array("trajectories")),
        "segment": pa.array(batch.array("segments")),
        "num_turns": pa.array(batch.array("turns")),
        "status": pa.array(batch.array("statuses").tolist(), pa.string()),
        "replayed": pa.array(_get_replayed(batch)),
        "reward": pa.array(batch.array("rewards")),
        "finish_reason": pa.array(batch.array("finish_reasons").tolist(), pa.string()),
        "num_tokens": pa.array(batch.jagged("response_ids").lengths),
        "reward_error": pa.array(batch.array("reward_errors").tolist(), pa.string()),
    }
    if IMAGES in batch:
        digests = [text.split() for text in batch.array(IMAGES).tolist()]
        columns[IMAGES] = pa.array(digests, pa.list_(pa.string()))
    if "fields" in batch:
        fields = [json.loads(text) if text.strip() else {} for text in batch.jagged("fields").texts]
        answers = [row.pop("answer", "") for row in fields]
        columns["answer"] = pa.array(map(_format_value, answers), pa.string())
        columns["columns"] = pa.array(map(_format_value, fields), pa.string())
    if "roles" in batch and (batch.array("roles") != "").any():
        columns["role"] = pa.array(batch.array("roles").tolist(), pa.string())
    for name in batch.columns:
        if name.startswith("reward/"):
            columns[name] = pa.array(batch.array(name))
    if "advantages" in batch:
        columns["advantage"] = pa.array([_mean(row) for row in _select_chosen(batch, "advantages")])
    if _has_both(batch):
        rows = zip(*(_select_chosen(batch, name) for name in _LOG_PROBS), strict=True)
        gaps = [np.abs(trainer - server) for trainer, server in rows]
        largest = [float(gap.max()) if len(gap) else None for gap in gaps]
        columns["max_logprob_gap"] = pa.array(largest, pa.float32())
    return columns


def build_token_columns(batch: Batch) -> dict[str, pa.Array]:
    """Build the columns of one list per sample, with an entry per token."""
    columns = {}
    for name, (column, dtype) in _TOKENS.items():
        if column in batch and (column not in _LOG_PROBS or _has_both(batch)):
            columns[name] = _build_lists(batch.jagged(column), dtype)
    return columns


def write_table(path: Path, columns: Mapping[str, pa.Array], num_samples: int) -> None:
    """Write a table atomically; `num_samples` is the number of samples of the step.

    Raises:
        OSError: the table cannot be written; no partial file stays.
    """
    table = pa.table(dict(columns))
    table = table.replace_schema_metadata({METADATA: json.dumps({"num_samples": num_samples})})
    floats = [f"{name}.list.element" for name in _LOG_PROBS if name in columns]
    dictionary = [
        f"{name}.list.element" if pa.types.is_list(table.schema.field(name).type) else name
        for name in columns
        if name not in _LOG_PROBS
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as partial_path:
        pq.write_table(
            table,
            partial_path,
            compression="zstd",
            row_group_size=_ROW_GROUP_SIZE,
            use_dictionary=dictionary,
            use_byte_stream_split=floats,
        )


def _format_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()  # parquet has no half surrogate pairs


def _build_lists(column: Jagged, dtype: npt.DTypeLike) -> pa.Array:
    values = pa.array(column.values.astype(dtype))
    return pa.ListArray.from_arrays(pa.array(column.offsets.astype(np.int32)), values)


def _get_replayed(batch: Batch) -> npt.NDArray[np.bool_]:
    if "replayed" not in batch:
        return np.zeros(len(batch), np.bool_)
    return np.asarray(batch.array("replayed") != 0)


def _has_both(batch: Batch) -> bool:
    return all(name in batch for name in _LOG_PROBS)


def _select_chosen(batch: Batch, name: str) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the values of a column at the tokens that the policy chose, for each sample."""
    rows, masks = batch.jagged(name), batch.jagged("response_mask")
    return (row[mask != 0] for row, mask in zip(rows, masks, strict=True))


def _mean(row: npt.NDArray[np.float32]) -> float:
    return float(row.mean()) if len(row) else 0.0
