"""mcore-rl convert verify: whether two folders, of either format, contain the same weights."""

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
from mcore_rl.jobs.convert.megatron_folder import is_megatron, open_megatron
from mcore_rl.jobs.convert.options import format_bytes
from mcore_rl.jobs.convert.progress import ByteProgress
from mcore_rl.jobs.convert.sources import MegatronTensors

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_LISTED = 20  # names of each kind in a report


@dataclass(slots=True)
class Difference:
    """The first element that differs of a tensor, and by how much any does."""

    name: str
    index: list[int]
    a: float
    b: float
    max_abs: float  # NaN where only one of the two is
    num_elements: int  # that differ


@dataclass(slots=True)
class Comparison:
    """What two folders have in common."""

    a: str
    b: str
    num_tensors: int = 0  # that both have
    num_bytes: int = 0  # compared, of the narrower side
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    num_different: int = 0
    first_difference: Difference | None = None
    # Dtypes that the two sides keep the same tensors in, with how many: compared in the narrower.
    dtypes: dict[str, int] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return not (self.only_in_a or self.only_in_b or self.misshapen or self.num_different)


class _Side(NamedTuple):
    """The tensors of a folder, by Hugging Face names."""

    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # in the cheapest order for reading
    read: Callable[[str], torch.Tensor]


def verify(a: Path, b: Path, *, as_json: bool) -> bool:
    """Compare two folders and print a report; whether they are equal.

    Raises:
        ConfigError: one of the two is no checkpoint, or is damaged.
    """
    # The bar is shown on a terminal only, apart from the report.
    found = compare(a, b, Console(stderr=True, quiet=not sys.stderr.isatty()))
    if as_json:
        print(json.dumps({"equal": found.equal, **asdict(found)}, indent=1))
    else:
        print("\n".join(report(found)))
    return found.equal


def compare(a: Path, b: Path, console: Console) -> Comparison:
    """Compare every tensor, one at a time."""
    torch.set_num_threads(1)
    left, right = _opened(a, b), _opened(b, a)
    found = Comparison(str(a), str(b))
    found.only_in_a = sorted(left.forms.keys() - right.forms.keys())
    found.only_in_b = sorted(right.forms.keys() - left.forms.keys())
    common = [name for name in left.forms if name in right.forms]
    total = sum(math.prod(left.forms[name][0]) for name in common)
    with ByteProgress("comparing", total * 2, console=console) as progress:
        for name in common:
            (shape, dtype), (other_shape, other_dtype) = left.forms[name], right.forms[name]
            if shape != other_shape:
                found.misshapen.append(name)
                continue
            if dtype != other_dtype:
                pair = f"{format_dtype(dtype)} and {format_dtype(other_dtype)}"
                found.dtypes[pair] = found.dtypes.get(pair, 0) + 1
            difference = _difference(name, left.read(name), right.read(name))
            found.num_tensors += 1
            found.num_bytes += math.prod(shape) * min(dtype.itemsize, other_dtype.itemsize)
            if difference is not None:
                found.num_different += 1
                found.first_difference = found.first_difference or difference
            progress.add(math.prod(shape) * 2)
    return found


def _opened(path: Path, other: Path) -> _Side:
    """A folder; where it does not say which model it is of, the other one does."""
    if not is_megatron(path):
        reader = CheckpointReader(path)
        forms = {
            name: (shape, reader.get_dtype(name)) for name, shape in reader.get_shapes().items()
        }
        return _Side(forms, reader.read_tensor)
    folder = open_megatron(path, None if is_megatron(other) else other)
    forms = {
        name: (tensor.shape, parameter.dtype)
        for parameter in folder.parameters
        for tensor in parameter.weight.rule.tensors
        for name in (tensor.name, *tensor.aliases)
    }
    return _Side(forms, MegatronTensors(folder.reader, folder.parameters).read)


def _difference(name: str, a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    """Where the bits of two tensors differ, in the narrower of their dtypes; None: nowhere."""
    dtype = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    a, b = (t.to(dtype).contiguous() for t in (a, b))
    as_bits = _BITS[dtype.itemsize]
    if torch.equal(a.view(as_bits), b.view(as_bits)):
        return None
    differs = (a.view(as_bits) != b.view(as_bits)).nonzero()
    index = differs[0].tolist()
    pairs = (side[tuple(differs.T)].float() for side in (a, b))
    largest = (next(pairs) - next(pairs)).abs().max()
    one, other = (side[tuple(index)].item() for side in (a, b))
    return Difference(name, index, one, other, float(largest), len(differs))


def report(found: Comparison) -> Iterator[str]:
    """The comparison in lines for a terminal."""
    for pair, count in found.dtypes.items():
        yield f"{count} tensors are {pair}: compared in the narrower"
    for what, names in (
        (f"only in {found.a}", found.only_in_a),
        (f"only in {found.b}", found.only_in_b),
        ("of different shapes", found.misshapen),
    ):
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            yield f"{what}: {', '.join(names[:_LISTED])}{more}"
    if found.first_difference is not None:
        first = found.first_difference
        yield (
            f"{found.num_different} tensors differ; the first is {first.name}: {first.a} and "
            f"{first.b} at {first.index}, {first.num_elements} elements by up to {first.max_abs:g}"
        )
    compared = f"{found.num_tensors} tensors, {format_bytes(found.num_bytes)}"
    yield f"{'equal' if found.equal else 'DIFFERENT'}: {compared} compared"
