"""Batches: named columns with one row per sample, never padded.

A column is a `Jagged` array (one variable-length row per sample) or a plain numpy array (one value
per sample). A batch contains data, never settings. numpy, so that Ray moves columns without a copy.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mcore_rl.data.sample import Sample

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """Variable-length rows, concatenated: row i is values[offsets[i]:offsets[i + 1]].

    >>> Jagged.pack([[1, 2], [3]], np.int64).lengths.tolist()
    [2, 1]
    """

    values: Array  # [total length]
    offsets: npt.NDArray[np.int64]  # [number of rows + 1]

    def __reduce__(self) -> tuple[Any, ...]:  # subclasses are unpickled as Jagged
        return Jagged, (self.values, self.offsets)

    @classmethod
    def pack(cls, rows: Iterable[Sequence[float] | Array], dtype: npt.DTypeLike) -> Jagged:
        """Concatenate rows."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        return cls(np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype), offsets)

    @classmethod
    def pack_texts(cls, texts: Iterable[str]) -> Jagged:
        """Concatenate texts as UTF-8 bytes; numpy's texts take 4 bytes * the longest length."""
        return cls.pack((np.frombuffer(text.encode(), np.uint8) for text in texts), np.uint8)

    @property
    def texts(self) -> list[str]:
        """Texts that pack_texts has packed."""
        return [row.tobytes().decode() for row in self]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of entries of each row."""
        return np.diff(self.offsets)

    def with_values(self, values: Array) -> Jagged:
        """Return a Jagged of other values with the same row lengths."""
        if len(values) != len(self.values):
            raise ValueError(f"{len(values)} values for rows of {len(self.values)} in all")
        return Jagged(values, self.offsets)

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        """Concatenate the rows of all parts, with the dtype of the first."""
        values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
        dtype = parts[0].values.dtype
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([p.lengths for p in parts]))])
        joined = np.concatenate(values).astype(dtype, copy=False)
        return Jagged(joined, offsets.astype(np.int64))

    def take(self, rows: Sequence[int]) -> Jagged:
        """Select rows, in this order."""
        if not len(rows):  # slicing keeps the shape of an entry
            return Jagged(self.values[:0], np.zeros(1, dtype=np.int64))
        index = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[index]
        offsets = np.zeros(len(index) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] < _MIN_ROW_COPY * len(index):
            shifts = np.repeat(self.offsets[index] - offsets[:-1], lengths)
            return Jagged(self.values[shifts + np.arange(offsets[-1])], offsets)
        return Jagged(np.concatenate([self[i] for i in index]), offsets)


Column = Jagged | Array
_MIN_ROW_COPY = 64  # mean row length from which copying row by row is faster than an index
IMAGES = "images"
PICKED_KEYS = "picked_keys"  # of sparse attention: engine/megatron/indexer_replay.py
MODEL_INPUTS = ("prompt_ids", "response_ids", IMAGES)  # columns that a forward pass reads
NO_STATE = -1  # in state_ids
NO_VERSION = -2  # in oldest_versions and newest_versions
UNSET = -1  # in cross_entropy_mask: the loss decides
# Values of response tokens in columns that not all batches have.
FILL_VALUES = {
    "process_rewards": np.float32(0),
    "state_ids": np.int64(NO_STATE),
    "cross_entropy_mask": np.int8(UNSET),
    "fields": np.uint8(ord(" ")),  # blanks are no JSON
}
MAX_FIELD = 4000  # JSON characters to which a sample truncates a value of its data row


def _encode_fields(fields: Mapping[str, Any]) -> str:
    """Encode the columns of a data row as JSON, with long values truncated."""
    values = {name: json.dumps(value, default=str) for name, value in fields.items()}
    is_long = {name for name, text in values.items() if len(text) > MAX_FIELD}
    shown = {n: f"{values[n][:MAX_FIELD]} ..." if n in is_long else v for n, v in fields.items()}
    return json.dumps(shown, default=str)


def pack_images(digests: Sequence[Sequence[str]]) -> dict[str, Column]:
    """Return the column of images, if any sample has one."""
    texts = [" ".join(names) for names in digests]
    return {IMAGES: np.array(texts, dtype=np.str_)} if any(texts) else {}


def _collect_versions(samples: Sequence[Sample]) -> dict[str, Column]:
    """Return the oldest and the newest version of the weights that chose a token of each sample."""
    rows = []
    for sample in samples:
        pairs = zip(sample.weight_versions, sample.response_mask, strict=True)
        rows.append([version for version, mask in pairs if mask] or [NO_VERSION])
    return {
        "oldest_versions": np.array([min(versions) for versions in rows], np.int64),
        "newest_versions": np.array([max(versions) for versions in rows], np.int64),
    }


def _number_turns(sample: Sample) -> Array:
    """Return the policy's turn of each response token; all are turn 0 where none are marked."""
    numbers = np.full(len(sample.response_ids), -1 if sample.turn_spans else 0, np.int32)
    for number, span in enumerate(sample.turn_spans):
        numbers[span.start : span.end] = number
    return numbers


class Samples(ABC):
    """Interface of Batch and of RemoteBatch (controller/remote_batch.py), for code on the driver.

    A Batch has all columns in memory; a RemoteBatch has references to columns along tokens.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Names of all columns."""

    @abstractmethod
    def array(self, name: str) -> Array:
        """Return a column of one value per sample; TypeError for a jagged one."""

    @abstractmethod
    def lengths(self, name: str) -> npt.NDArray[np.int64]:
        """Return the number of entries of each row of a jagged column: [samples]."""

    @property
    @abstractmethod
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Prompt and response tokens of each sample: [samples]."""

    @abstractmethod
    def with_columns(self, **columns: Array) -> Self:
        """Return the batch with these columns of one value per sample."""

    @abstractmethod
    def select(self, *names: str) -> Self:
        """Return a batch of these columns."""

    def select_inputs(self) -> Self:
        """Return a batch of the columns that a forward pass reads."""
        return self.select(*(name for name in MODEL_INPUTS if name in self))

    @abstractmethod
    def drop_columns(self, *names: str) -> Self:
        """Return a batch without these columns, whether it has them or not."""

    @abstractmethod
    def rename_columns(self, **names: str) -> Self:
        """Return a batch with jagged columns renamed: old=new."""

    @abstractmethod
    def union(self, other: Self) -> Self:
        """Return the columns of both batches of the same samples; `other` wins."""

    @abstractmethod
    def take(self, rows: Sequence[int]) -> Self:
        """Return a batch of these rows, in this order."""

    @staticmethod
    @abstractmethod
    def concat(batches: Sequence[Any]) -> Any:
        """Return a batch of the rows of all batches."""


class Batch(Samples):
    """Rows of samples as named columns of equal length. Immutable: each change is a new batch.

    Standard columns, jagged with one entry per response token unless stated otherwise:

    - prompt_ids (one per prompt token), response_ids, response_mask, rollout_log_probs,
      weight_versions, log_probs, reference_log_probs, entropy, values, advantages, returns,
      process_rewards, token_rewards, correction_weights, policy_mask, top_entropy_mask,
      sum_pi_squared; cross_entropy_mask (-1: unset); state_ids (-1: none); turn_numbers (policy
      turns of the sample, from 0; -1: the token is in none)
    - weights of losses: loss_weights, kl_weights, entropy_weights, cross_entropy_weights,
      distillation_weights
    - teacher_shares, teacher_log_probs, teacher_ids, teacher_top_log_probs: see Teachers in
      trainers/roles.py
    - routed_experts: [MoE layers, experts per token] per prompt and response token, and
      stage_routed_experts, those of a pipeline rank; a batch of servers has
      stage_routed_experts/LAYERS for each
    - picked_keys: [layers, index_topk] per prompt and response token
      (engine/megatron/indexer_replay.py)
    - fields: columns of the data row as JSON (Jagged.pack_texts; blanks: none)

    One value per sample: rewards, reward/PART (NaN if the reward failed), reward_errors (empty if
    it did not), baseline_rewards, group_ids, roles (of the policy, in a loop with several),
    trajectories (index in the group), segments (index in the trajectory: data/trajectories.py),
    turns (of the policy), oldest_versions and newest_versions (of the weights that chose its
    tokens; -2: none did), finish_reasons, statuses (of the trajectory: TrajectoryStatus), replayed
    (1 if the sample is of an earlier step), images (digests in the run's ImageStore, joined by
    blanks).
    """

    def __init__(self, columns: dict[str, Column]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of a batch differ in length: {lengths}")
        self.columns = columns

    @classmethod
    def collate(cls, samples: Sequence[Sample]) -> Batch:
        """Build the columns of samples."""
        parts = dict.fromkeys(part for s in samples for part in s.reward_parts)
        optional: dict[str, Column] = {}
        if any(s.process_rewards for s in samples):
            rows = (s.process_rewards or [0.0] * len(s.response_ids) for s in samples)
            optional["process_rewards"] = Jagged.pack(rows, np.float32)
        if any(s.state_ids for s in samples):
            states = (s.state_ids or [NO_STATE] * len(s.response_ids) for s in samples)
            optional["state_ids"] = Jagged.pack(states, np.int64)
        if any(s.cross_entropy_mask for s in samples):
            masks = (s.cross_entropy_mask or [UNSET] * len(s.response_ids) for s in samples)
            optional["cross_entropy_mask"] = Jagged.pack(masks, np.int8)
        if any(s.fields for s in samples):
            optional["fields"] = Jagged.pack_texts(_encode_fields(s.fields) for s in samples)
        return cls(
            {
                **optional,
                "prompt_ids": Jagged.pack((s.prompt_ids for s in samples), np.int64),
                "response_ids": Jagged.pack((s.response_ids for s in samples), np.int64),
                "response_mask": Jagged.pack((s.response_mask for s in samples), np.int8),
                "rollout_log_probs": Jagged.pack(
                    (s.rollout_log_probs for s in samples), np.float32
                ),
                "weight_versions": Jagged.pack((s.weight_versions for s in samples), np.int64),
                "turn_numbers": Jagged.pack((_number_turns(s) for s in samples), np.int32),
                **_collect_versions(samples),
                "rewards": np.array([s.reward for s in samples], dtype=np.float32),
                "group_ids": np.array([s.group_id for s in samples], dtype=np.int64),
                "roles": np.array([s.role for s in samples], dtype=np.str_),
                "trajectories": np.array([s.trajectory for s in samples], dtype=np.int64),
                "turns": np.array([max(len(s.turn_spans), 1) for s in samples], dtype=np.int64),
                "segments": np.array([s.segment for s in samples], dtype=np.int64),
                "reward_errors": np.array([s.reward_error for s in samples], dtype=np.str_),
                "finish_reasons": np.array([s.finish_reason for s in samples], dtype=np.str_),
                "statuses": np.array([s.status for s in samples], dtype=np.str_),
                **pack_images([s.images for s in samples]),
                **{
                    f"reward/{part}": np.array(
                        [s.reward_parts.get(part, np.nan) for s in samples], np.float32
                    )
                    for part in parts
                },
            }
        )

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(
                f"the batch has no column {name!r}; it has {sorted(self.columns)}"
            ) from None

    def jagged(self, name: str) -> Jagged:
        """Return a jagged column; TypeError for one of one value per sample."""
        column = self[name]
        if not isinstance(column, Jagged):
            raise TypeError(f"column {name!r} has one value per sample, not one row per sample")
        return column

    def array(self, name: str) -> Array:
        column = self[name]
        if isinstance(column, Jagged):
            raise TypeError(f"column {name!r} has one row per sample, not one value per sample")
        return column

    def lengths(self, name: str) -> npt.NDArray[np.int64]:
        return self.jagged(name).lengths

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        return self.jagged("prompt_ids").lengths + self.jagged("response_ids").lengths

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        columns = self.columns.values()
        return sum(c.values.nbytes if isinstance(c, Jagged) else c.nbytes for c in columns)

    def with_columns(self, **columns: Column) -> Batch:
        return Batch({**self.columns, **columns})

    def select(self, *names: str) -> Batch:
        return Batch({name: self[name] for name in names})

    def drop_columns(self, *names: str) -> Batch:
        return Batch({name: c for name, c in self.columns.items() if name not in names})

    def rename_columns(self, **names: str) -> Batch:
        return Batch({names.get(name, name): c for name, c in self.columns.items()})

    def union(self, other: Batch) -> Batch:
        return self.with_columns(**other.columns)

    @property
    def names(self) -> list[str]:
        return [*self.columns]

    def take(self, rows: Sequence[int]) -> Batch:
        index = np.asarray(rows, dtype=np.int64)
        columns = {id(c): c for c in self.columns.values()}  # a column under two names stays one
        taken = {k: c.take(rows) if isinstance(c, Jagged) else c[index] for k, c in columns.items()}
        return Batch({name: taken[id(c)] for name, c in self.columns.items()})

    def to_arrays(self) -> dict[str, dict[str, Array]]:
        """Return the columns as arrays of numbers, for saving: text as Unicode code points."""
        arrays: dict[str, dict[str, Array]] = {}
        for name, column in self.columns.items():
            if isinstance(column, Jagged):
                arrays[name] = {"values": column.values, "offsets": column.offsets}
            elif column.dtype.kind == "U":
                letters = np.ascontiguousarray(column).view(np.uint32)
                arrays[name] = {"letters": letters.reshape(len(column), column.dtype.itemsize // 4)}
            else:
                arrays[name] = {"numbers": column}
        return arrays

    @staticmethod
    def load_arrays(arrays: Mapping[str, Mapping[str, Array]]) -> Batch:
        """Build the batch of which to_arrays returned these arrays."""
        columns: dict[str, Column] = {}
        for name, parts in arrays.items():
            if "offsets" in parts:
                columns[name] = Jagged(parts["values"], parts["offsets"])
            elif "letters" in parts:
                letters = np.ascontiguousarray(parts["letters"])
                columns[name] = letters.view(f"<U{letters.shape[1]}").reshape(-1)
            else:
                columns[name] = parts["numbers"]
        return Batch(columns)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Concatenate batches; fill parts of rewards, FILL_VALUES and images that some lack.

        Parts of rewards are filled with NaN. Batches without rows are left out.

        Raises:
            KeyError: a batch lacks another column.
        """
        batches = [batch for batch in batches if len(batch)] or batches[:1]
        names = {name for batch in batches for name in batch.columns}
        parts = {n for n in names if n.startswith("reward/") or n in (*FILL_VALUES, IMAGES)}
        batches = [batch._fill_columns(parts) for batch in batches]
        first = batches[0]
        columns: dict[str, Column] = {}
        for batch in batches:
            if missing := sorted(names - batch.columns.keys()):
                raise KeyError(f"a batch to be joined has no column {missing[0]!r}")
        for name, column in first.columns.items():
            if isinstance(column, Jagged):
                columns[name] = Jagged.concat([batch.jagged(name) for batch in batches])
            else:
                columns[name] = np.concatenate([batch.array(name) for batch in batches])
        return Batch(columns)

    def _fill_columns(self, names: Iterable[str]) -> Batch:
        """Add missing columns: parts of rewards as NaN, FILL_VALUES, and images as none."""
        missing = sorted({*names} - self.columns.keys())
        filled: dict[str, Column] = {n: np.full(len(self), np.nan, np.float32) for n in missing}
        if IMAGES in filled:
            filled[IMAGES] = np.full(len(self), "")
        for name in FILL_VALUES.keys() & missing:
            ids = self.jagged("response_ids")
            filled[name] = ids.with_values(np.full(len(ids.values), FILL_VALUES[name]))
        return self.with_columns(**filled) if missing else self
