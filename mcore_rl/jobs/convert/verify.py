"""mcore-rl convert verify: compare the weights of two folders, of either format."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from mcore_rl.checkpoint.hf import CheckpointReader, format_dtype
from mcore_rl.config.checks import check_model_exists
from mcore_rl.jobs.convert.megatron_checkpoint import (
    MegatronTensors,
    is_megatron_checkpoint,
    open_megatron_checkpoint,
)
from mcore_rl.jobs.convert.plan import format_bytes
from mcore_rl.jobs.convert.run import ByteProgress
from mcore_rl.reshard.rules import join_slices, list_logical_tensors

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_LISTED = 20  # names of each kind in a report


@dataclass(slots=True)
class Difference:
    """The first different element of a tensor, and the largest difference."""

    name: str
    index: list[int]
    a: float
    b: float
    max_abs: float  # NaN if only one of the two is NaN
    num_elements: int  # number of different elements


@dataclass(slots=True)
class Comparison:
    """Result of the comparison of two folders."""

    a: str
    b: str
    num_tensors: int = 0  # in both folders
    num_bytes: int = 0  # compared, in the narrower dtype
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    num_different: int = 0
    first_difference: Difference | None = None
    # Numbers of tensors by pair of different dtypes; compared in the narrower.
    dtypes: dict[str, int] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return not (self.only_in_a or self.only_in_b or self.misshapen or self.num_different)


class _Side(NamedTuple):
    """The tensors of a folder, by Hugging Face names."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # in the fastest order to read
    read: Callable[[str], torch.Tensor]


def verify(a: Path, b: Path, *, is_json: bool) -> bool:
    """Compare two folders and print a report; return whether they are equal.

    Raises:
        ConfigError: One of the two is no checkpoint, or is damaged.
    """
    for folder in (a, b):
        check_model_exists("DIR", folder)
    # Progress goes to a terminal only.
    comparison = compare_folders(a, b, Console(stderr=True, quiet=not sys.stderr.isatty()))
    if is_json:
        print(json.dumps({"equal": comparison.equal, **asdict(comparison)}, indent=1))
    else:
        print("\n".join(format_report(comparison)))
    return comparison.equal


def compare_folders(a: Path, b: Path, console: Console) -> Comparison:
    """Compare all tensors, one at a time."""
    torch.set_num_threads(1)
    left, right = _open_folder(a, b), _open_folder(b, a)
    comparison = Comparison(str(a), str(b))
    comparison.only_in_a = sorted(left.tensors.keys() - right.tensors.keys())
    comparison.only_in_b = sorted(right.tensors.keys() - left.tensors.keys())
    common = [name for name in left.tensors if name in right.tensors]
    total = sum(math.prod(left.tensors[name][0]) for name in common)
    with ByteProgress("comparing", total * 2, console=console) as progress:
        for name in common:
            (shape, dtype), (other_shape, other_dtype) = left.tensors[name], right.tensors[name]
            if shape != other_shape:
                comparison.misshapen.append(name)
                continue
            if dtype != other_dtype:
                pair = f"{format_dtype(dtype)} and {format_dtype(other_dtype)}"
                comparison.dtypes[pair] = comparison.dtypes.get(pair, 0) + 1
            difference = _find_difference(name, left.read(name), right.read(name))
            comparison.num_tensors += 1
            comparison.num_bytes += math.prod(shape) * min(dtype.itemsize, other_dtype.itemsize)
            if difference is not None:
                comparison.num_different += 1
                comparison.first_difference = comparison.first_difference or difference
            progress.add(math.prod(shape) * 2)
    return comparison


def _open_folder(path: Path, other: Path) -> _Side:
    """Open a folder; `other` may tell the model of a Megatron checkpoint that does not."""
    if not is_megatron_checkpoint(path):
        reader = CheckpointReader(path)
        tensors = {
            name: (shape, reader.get_dtype(name)) for name, shape in reader.get_shapes().items()
        }
        return _Side(tensors, reader.read_tensor)
    reference = None if is_megatron_checkpoint(other) else other
    checkpoint = open_megatron_checkpoint(path, reference)
    dtypes = {name: p.dtype for p in checkpoint.parameters for name in p.names}
    logical = list_logical_tensors([p.weight for p in checkpoint.parameters])
    tensors = {t.name: (t.shape, dtypes[t.name]) for t in join_slices(logical)}
    stored = MegatronTensors(checkpoint.reader, checkpoint.parameters)
    frozen = {plan.name: (plan.shape, plan.dtype) for plan in checkpoint.plan_frozen()}
    if not frozen:
        return _Side(tensors, stored.read)
    companions = CheckpointReader(checkpoint.companions)

    def read(name: str) -> torch.Tensor:
        return companions.read_tensor(name) if name in frozen else stored.read(name)

    return _Side(tensors | frozen, read)


def _find_difference(name: str, a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    """Compare the bits of two tensors in the narrower of their dtypes; None if they are equal."""
    dtype = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    a, b = (t.to(dtype).contiguous() for t in (a, b))
    bits = _BITS[dtype.itemsize]
    if torch.equal(a.view(bits), b.view(bits)):
        return None
    indices = (a.view(bits) != b.view(bits)).nonzero()
    first = indices[0].tolist()
    values = (tensor[tuple(indices.T)].float() for tensor in (a, b))
    largest = (next(values) - next(values)).abs().max()
    a_value, b_value = (tensor[tuple(first)].item() for tensor in (a, b))
    return Difference(name, first, a_value, b_value, float(largest), len(indices))


def format_report(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of a report for a terminal."""
    for pair, count in comparison.dtypes.items():
        yield f"{count} tensors are {pair}: compared in the narrower"
    for heading, names in (
        (f"only in {comparison.a}", comparison.only_in_a),
        (f"only in {comparison.b}", comparison.only_in_b),
        ("of different shapes", comparison.misshapen),
    ):
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            yield f"{heading}: {', '.join(names[:_LISTED])}{more}"
    if comparison.first_difference is not None:
        first = comparison.first_difference
        yield (
            f"{comparison.num_different} tensors differ; the first is {first.name}: {first.a} and "
            f"{first.b} at {first.index}, {first.num_elements} elements by up to {first.max_abs:g}"
        )
    compared = f"{comparison.num_tensors} tensors, {format_bytes(comparison.num_bytes)}"
    yield f"{'equal' if comparison.equal else 'DIFFERENT'}: {compared} compared"
