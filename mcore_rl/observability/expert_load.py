"""Tokens of each expert in steps of a run, and the file expert_load.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config.atomic_file import write_file
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_lines

EXPERT_LOAD_FILE = "expert_load.jsonl"
MAX_STEPS = 50  # of a run that are recorded, at equal distances, and the last
_MAX_TOKENS = 2**53  # of an expert in a step; counts of float64 are exact up to there


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The tokens of each expert in the last optimizer step of a trainer step, over all ranks."""

    step: int
    role: str  # the model: "actor", "critic" or "model"
    layers: Sequence[int]  # decoder layers with experts
    tokens: Sequence[Sequence[int]]  # [layers, experts]


def build_expert_load(step: int, role: str, load: Mapping[str, Sequence[int]]) -> ExpertLoad:
    """Build an ExpertLoad from the tokens of each expert by decoder layer."""
    return ExpertLoad(step, role, [*map(int, load)], [*load.values()])


def is_load_due(step: int, num_steps: int) -> bool:
    """Return whether the load of a step is recorded, in a run of so many steps."""
    return step % -(-num_steps // MAX_STEPS) == 0 or step == num_steps


class ExpertLoadWriter:
    """Writes expert_load.jsonl in the folder of a run; there is none without experts."""

    def __init__(self, folder: Path, earlier: Sequence[ExpertLoad] = ()) -> None:
        """Begin the file with `earlier` steps, in place of an earlier file."""
        self._file = folder / EXPERT_LOAD_FILE
        if not earlier:
            self._file.unlink(missing_ok=True)
            return
        write_file(self._file, "".join(map(_format_row, earlier)))

    def write(self, load: ExpertLoad) -> None:
        """Append the load of a step.

        Raises:
            OSError: The disk is full.
        """
        with self._file.open("a") as file:
            file.write(_format_row(load))


def _format_row(load: ExpertLoad) -> str:
    return json.dumps(asdict(load), separators=(",", ":")) + "\n"


def read_expert_load(path: Path) -> list[ExpertLoad]:
    """Return the rows of an expert_load.jsonl, except a last one that was cut short.

    Raises:
        ConfigError: A row is no JSON object, or not of this form.
    """
    return [_parse_row(row, where) for where, row in read_json_lines(path)]


def _parse_row(row: dict[str, Any], where: str) -> ExpertLoad:
    try:
        tokens = [[int(count) for count in counts] for counts in row["tokens"]]
        load = ExpertLoad(int(row["step"]), str(row["role"]), [*map(int, row["layers"])], tokens)
        if not (tokens and tokens[0]) or {len(counts) for counts in tokens} != {len(tokens[0])}:
            raise ValueError("layers without experts, or that differ in experts")
        if not all(0 <= count <= _MAX_TOKENS for counts in tokens for count in counts):
            raise ValueError(f"tokens below 0, or more than {_MAX_TOKENS}")
        if len(load.layers) != len(tokens):
            raise ValueError(f"{len(load.layers)} layers, {len(tokens)} rows of tokens")
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # int(inf) overflows
        raise ConfigError(f"{where}: no step, role, layers and tokens ({error!r})") from error
    return load
