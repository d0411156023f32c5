"""The plan of a conversion, made before anything is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from mcore_rl.checkpoint.hf_writer import group_by_size
from mcore_rl.checkpoint.storage_location import StorageLocation
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.reshard.rules import Box, Shard, Weight

WHOLE = Shard(0, 1)
_SMALLEST_FILE, _LARGEST_FILE = 32 << 20, 1 << 30  # bytes
_NUM_FILES = 8  # so that a small model, too, is work for several processes


@dataclass(frozen=True, slots=True)
class PlannedAdapter:
    """The low-rank adapter of a parameter, as ranks in `num_shards` shards computed with it."""

    scale: float
    num_shards: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of Megatron's: what it is made of, where it is, and how it is stored."""

    weight: Weight
    location: StorageLocation
    dtype: torch.dtype
    adapter: PlannedAdapter | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter, with padding."""
        return self.weight.rule.get_local_shape(WHOLE)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def box(self) -> Box:
        """The whole parameter as a box of the tensor that has it in a distributed checkpoint."""
        return self.location.to_tensor_box(Box((0,) * len(self.shape), self.shape))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the Hugging Face tensors that it is made of, copies included."""
        return tuple(name for t in self.weight.rule.tensors for name in (t.name, *t.aliases))


class Buffer:
    """Memory for one tensor after another: filling new memory takes as long as copying."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """A tensor in the bytes from `start` on. Its storage is these bytes and no others.

        Where they are more than there were, their contents are lost.
        """
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(self._memory):
            self._memory = np.empty(0, np.uint8)  # given back before more is taken
            self._memory = np.empty(end, np.uint8)
        return torch.from_numpy(self._memory[start:end]).view(dtype).view(shape)


def num_shards(weight: Weight, layout: Layout) -> int:
    """Over how many ranks of a layout a weight is split."""
    return 1 if weight.axis is None else int(getattr(layout, weight.axis))


def runs(parameters: Sequence[Parameter]) -> Iterator[tuple[Parameter, ...]]:
    """The parameters as files of about equal size, a function of the model alone."""
    total = sum(parameter.nbytes for parameter in parameters)
    limit = min(max(total // _NUM_FILES, _SMALLEST_FILE), _LARGEST_FILE)
    return map(tuple, group_by_size(parameters, limit))


def named_dtype(option: str, allowed: Mapping[str, torch.dtype], name: str) -> torch.dtype:
    """Raises ConfigError for a name that is not allowed."""
    if name not in allowed:
        raise ConfigError(f"{option}={name}; allowed: {', '.join(allowed)}")
    return allowed[name]


def main_dtype(sizes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """The dtype of most elements, from (dtype, elements) of each tensor."""
    totals: Counter[torch.dtype] = Counter()
    for dtype, size in sizes:
        totals[dtype] += size
    return totals.most_common(1)[0][0]


def fingerprint(
    command: str, folders: Mapping[str, Path | None], **options: object
) -> dict[str, object]:
    """All that decides about the bytes of a conversion; of the files in `folders` size and time.

    Hidden folders in them are left out: one may contain what is being written.
    """
    found: dict[str, object] = {"command": command, **options}
    found |= {name: metadata.version(name) for name in ("mcore-rl", "megatron-core", "torch")}
    for role, folder in folders.items():
        if folder is not None:
            for file in filter(Path.is_file, sorted((*folder.glob("*"), *folder.glob("[!.]*/*")))):
                stat = file.stat()
                found[f"{role}/{file.relative_to(folder)}"] = [stat.st_size, stat.st_mtime_ns]
    return found
