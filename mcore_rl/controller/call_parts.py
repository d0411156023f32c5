"""How dispatch modes split a call over ranks, and join the results. Pure: no Ray.

A function that splits takes the mesh of the group and the arguments, and returns parts; one that
joins takes those parts and the results by world rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_rl.controller.remote_batch import PROMPT_TOKENS, RemoteBatch
from mcore_rl.data.batch import Samples
from mcore_rl.parallel.balance import DEFAULT_SEQUENCE_COST, partition_evenly
from mcore_rl.parallel.mesh import Mesh

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Results = Mapping[int, Any]  # by world rank; None of those whose results do not count


@dataclass(frozen=True, slots=True)
class CallPart:
    """The arguments of one call, the same for all its ranks."""

    ranks: tuple[int, ...]  # world ranks that get them
    output_rank: int | None  # the one of them whose result counts; None: each rank's counts
    args: Args
    kwargs: Kwargs
    rows: tuple[int, ...] | None = None  # rows of the caller's batches, when they were split


def check_parts(parts: Sequence[CallPart], mesh: Mesh) -> None:
    """Raises ValueError for parts that are not calls on ranks of the mesh, at most one a rank."""
    called: set[int] = set()
    for part in parts:
        for rank in part.ranks:
            if rank in called or not 0 <= rank < mesh.world_size:
                why = "twice" if rank in called else f"in a group of {mesh.world_size} ranks"
                raise ValueError(f"the dispatch mode calls rank {rank} {why}")
            called.add(rank)
        if part.output_rank is not None and part.output_rank not in part.ranks:
            raise ValueError(
                f"the dispatch mode takes the result of rank {part.output_rank}, which is not "
                f"among the ranks of that part, {list(part.ranks)}"
            )
    if not called:
        raise ValueError("the dispatch mode calls no rank")


def to_all(mesh: Mesh, args: Args, kwargs: Kwargs) -> list[CallPart]:
    """Every rank gets the same arguments."""
    return [CallPart(tuple(range(mesh.world_size)), None, args, kwargs)]


def to_rank_zero(mesh: Mesh, args: Args, kwargs: Kwargs) -> list[CallPart]:
    """World rank 0 gets the arguments; no other rank is called."""
    return [CallPart((0,), 0, args, kwargs)]


def entry_to_each(mesh: Mesh, args: Args, kwargs: Kwargs) -> list[CallPart]:
    """Every argument is a list or a tuple with an entry for each rank.

    Raises:
        ValueError: one is not, or has more or fewer entries.
    """
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, list | tuple) or len(value) != mesh.world_size:
            is_list = isinstance(value, list | tuple)
            found = f"has {len(value)}" if is_list else f"is a {type(value).__name__}"
            raise ValueError(
                f"argument {name!r} {found}; it must be a list of {mesh.world_size} entries, one a "
                "rank"
            )
    return [
        CallPart(
            ranks=(rank,),
            output_rank=rank,
            args=tuple(value[rank] for value in args),
            kwargs={name: value[rank] for name, value in kwargs.items()},
        )
        for rank in range(mesh.world_size)
    ]


def split_batches(axes: tuple[str, ...], mesh: Mesh, args: Args, kwargs: Kwargs) -> list[CallPart]:
    """Batches are split by the ranks on these axes, balanced by cost; the rest goes to all.

    Parts are in the order of the axes, the last fastest. Ranks that differ on other axes only get
    the same part, and the first of them on the last pipeline stage returns the result. A part may
    have no rows.

    Raises:
        TypeError: no argument is a Batch.
        ValueError: batches differ in rows.
    """
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Samples)]
    if not batches:
        raise TypeError("a method that splits batches was called without a Batch")
    if len({len(batch) for batch in batches}) > 1:
        raise ValueError(f"batches of one call differ in rows: {[len(b) for b in batches]}")
    groups = _groups(mesh, axes)
    if len(groups) == 1:
        whole = tuple(range(len(batches[0])))
        return [CallPart(groups[0], _first_of_last_stage(mesh, groups[0]), args, kwargs, whole)]
    rows_of = partition_evenly(_row_costs(batches), len(groups))
    return [
        CallPart(
            ranks=ranks,
            output_rank=_first_of_last_stage(mesh, ranks),
            args=tuple(_rows_of(value, rows) for value in args),
            kwargs={name: _rows_of(value, rows) for name, value in kwargs.items()},
            rows=tuple(rows),
        )
        for ranks, rows in zip(groups, rows_of, strict=True)
    ]


def split_mini_batches(mesh: Mesh, args: Args, kwargs: Kwargs) -> list[CallPart]:
    """Each mini-batch of a batch is split as by `split_batches`, over data-parallel ranks.

    The arguments are the batch and `sizes`, by its name: how many consecutive rows each mini-batch
    has. A rank gets its rows of each of them, one after the other, and these sizes. Without `sizes`
    all rows are one mini-batch.

    Raises:
        TypeError: the first argument is no Batch.
        ValueError: the sizes are not those of all rows.
    """
    batch, sizes = args[0] if args else None, kwargs.get("sizes")
    groups = _groups(mesh, ("dp",))
    if not isinstance(batch, Samples):
        raise TypeError(f"mini-batches of a {type(batch).__name__}; allowed: a Batch")
    if sizes is not None and sum(sizes) != len(batch):
        raise ValueError(f"mini-batches of {list(sizes)} rows of a batch of {len(batch)}")
    if sizes is None or len(groups) == 1:
        return split_batches(("dp",), mesh, args, kwargs)
    costs = _row_costs([batch])
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    rows_of: list[list[list[int]]] = []  # by mini-batch and data-parallel rank
    for size, end in zip(sizes, ends, strict=True):
        start = end - size
        divided = partition_evenly(costs[start:end], len(groups))
        rows_of.append([[start + row for row in rows] for rows in divided])
    found = []
    for ranks, of_each in zip(groups, zip(*rows_of, strict=True), strict=True):
        rows, its = [row for one in of_each for row in one], {"sizes": [*map(len, of_each)]}
        output_rank = _first_of_last_stage(mesh, ranks)
        part = CallPart(ranks, output_rank, (batch.take(rows),), kwargs | its, tuple(rows))
        found.append(part)
    return found


def split_batches_for_function(
    axes: tuple[str, ...], mesh: Mesh, args: Args, kwargs: Kwargs
) -> list[CallPart]:
    """The same for a method whose first argument is a function, which every rank gets.

    Raises:
        TypeError: it is no function, or no argument is a Batch.
        ValueError: batches differ in rows.
    """
    if not args or not callable(args[0]):
        found = f"a {type(args[0]).__name__}" if args else "missing"
        raise TypeError(f"the first argument is {found}; it must be a function of a rank's part")
    return split_batches(axes, mesh, args, kwargs)


def list_by_rank(parts: Sequence[CallPart], results: Results) -> list[Any]:
    """The results of all ranks that were called."""
    return [results[rank] for rank in sorted(rank for part in parts for rank in part.ranks)]


def only_result(parts: Sequence[CallPart], results: Results) -> Any:
    """The result of the one rank that was called."""
    (rank,) = parts[0].ranks
    return results[rank]


def joined_batch(parts: Sequence[CallPart], results: Results) -> Any:
    """Batches are joined in the row order of the caller; anything else is a list by part.

    Raises:
        ValueError: a rank returned a batch with other rows than it was given.
    """
    outputs = [results[part.output_rank] for part in parts if part.output_rank is not None]
    if not all(isinstance(output, Samples) for output in outputs):
        return outputs
    for part, output in zip(parts, outputs, strict=True):
        if len(output) != len(part.rows or ()):
            raise ValueError(
                f"rank {part.output_rank} returned a batch of {len(output)} rows for "
                f"{len(part.rows or ())}; a method that changes the rows must not return a Batch"
            )
    return _in_caller_order(parts, outputs)


def with_given(args: Args, kwargs: Kwargs, found: Any) -> Any:
    """A batch by reference that came back, with the columns of the first one that was given.

    Where each rank was given an entry of its own, each result with the columns of that.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, RemoteBatch):
            return value.union(found) if isinstance(found, RemoteBatch) else found
        if has_batches(value) and isinstance(found, list) and len(found) == len(value):
            pairs = zip(value, found, strict=True)
            return [with_given((entry,), {}, one) for entry, one in pairs]
    return found


def has_batches(value: Any) -> bool:
    """Whether it is a list with batches by reference: what `entry_to_each` takes."""
    return isinstance(value, list | tuple) and any(isinstance(v, RemoteBatch) for v in value)


def _groups(mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Ascending world ranks of each coordinate on these axes, the last axis fastest."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        at = mesh.get_coordinate(rank)
        found.setdefault(tuple(getattr(at, f"{axis}_rank") for axis in axes), []).append(rank)
    return [tuple(ranks) for _, ranks in sorted(found.items())]


def _first_of_last_stage(mesh: Mesh, ranks: tuple[int, ...]) -> int:
    stage = mesh.get_coordinate(ranks[-1]).pp_rank  # pp varies slowest
    return next(rank for rank in ranks if mesh.get_coordinate(rank).pp_rank == stage)


def _rows_of(value: Any, rows: list[int]) -> Any:
    return value.take(rows) if isinstance(value, Samples) else value


def _row_costs(batches: Sequence[Samples]) -> Sequence[float]:
    """By the default cost of a sequence: nothing is known of the model here."""
    for batch in batches:
        has_lengths = isinstance(batch, RemoteBatch) and PROMPT_TOKENS in batch.own
        if has_lengths or ("prompt_ids" in batch and "response_ids" in batch):
            return [DEFAULT_SEQUENCE_COST.estimate(int(count)) for count in batch.num_tokens]
    return [1.0] * len(batches[0])


def _in_caller_order(parts: Sequence[CallPart], outputs: Sequence[Any]) -> Any:
    # Empty parts are left out: what a worker returns for no rows may have wrong dtypes.
    filled = [(part, output) for part, output in zip(parts, outputs, strict=True) if part.rows]
    if not filled or len(parts) == 1:
        return outputs[0]
    order = np.concatenate([np.asarray(part.rows, dtype=np.int64) for part, _ in filled])
    joined = type(outputs[0]).concat([output for _, output in filled])
    return joined.take(np.argsort(order).tolist())
