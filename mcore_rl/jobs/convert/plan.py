"""What a conversion is made of, worked out before anything is written. Pure but for the dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from mcore_rl.checkpoint.stored import Stored
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.reshard.rules import Shard, Weight

WHOLE = Shard(0, 1)
_SMALLEST_FILE, _LARGEST_FILE = 32 << 20, 1 << 30  # bytes
_NUM_FILES = 8  # so that a small model, too, is work for several processes


@dataclass(frozen=True, slots=True)
class Adapter:
    """The low-rank adapter of a parameter, as ranks in `num_shards` shards computed with it."""

    scale: float
    num_shards: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of Megatron's: what it is made of, where it stands, and how it is stored."""

    weight: Weight
    stored: Stored
    dtype: torch.dtype
    adapter: Adapter | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter, with padding."""
        return self.weight.rule.local_shape(WHOLE)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """Of the Hugging Face tensors that it is made of, copies included."""
        return tuple(name for t in self.weight.rule.tensors for name in (t.name, *t.also))


def num_shards(weight: Weight, layout: Layout) -> int:
    """Over how many ranks of a layout a weight is split."""
    return 1 if weight.axis is None else int(getattr(layout, weight.axis))


def runs(parameters: Sequence[Parameter]) -> Iterator[tuple[Parameter, ...]]:
    """The parameters as files of about equal size, a function of the model alone."""
    total = sum(parameter.nbytes for parameter in parameters)
    limit = min(max(total // _NUM_FILES, _SMALLEST_FILE), _LARGEST_FILE)
    run: list[Parameter] = []
    size = 0
    for parameter in parameters:
        if run and size + parameter.nbytes > limit:
            yield tuple(run)
            run, size = [], 0
        run.append(parameter)
        size += parameter.nbytes
    if run:
        yield tuple(run)


def named_dtype(option: str, allowed: Mapping[str, torch.dtype], name: str) -> torch.dtype:
    """Raises ConfigError for a name that is not allowed."""
    if name not in allowed:
        raise ConfigError(f"{option}={name}; allowed: {', '.join(allowed)}")
    return allowed[name]


def main_dtype(sizes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """The dtype of most elements, from (dtype, elements) of each tensor."""
    totals: dict[torch.dtype, int] = {}
    for dtype, size in sizes:
        totals[dtype] = totals.get(dtype, 0) + size
    return max(totals, key=lambda dtype: totals[dtype])


def short(dtype: torch.dtype) -> str:
    """
    >>> short(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def files_of(role: str, folder: Path) -> dict[str, list[int]]:
    """Size and time of change of every file that a conversion depends on, under `role`/name.

    Folders that are hidden are left out: what is being written may stand in one.
    """
    folders = (folder, *(f for f in folder.iterdir() if f.is_dir() and f.name[0] != "."))
    files = sorted(file for f in folders for file in f.iterdir() if file.is_file())
    stats = {f"{role}/{file.relative_to(folder)}": file.stat() for file in files}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def versions() -> dict[str, str]:
    """Of what decides about bytes."""
    return {name: metadata.version(name) for name in ("mcore-rl", "megatron-core", "torch")}
