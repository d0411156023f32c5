"""One call on a group of workers becomes one call per rank, and one result. Pure: no Ray.

A worker method has a mode; `scatter` splits the arguments and `gather` joins the results.

    class ModelWorker:
        @register(dispatch_mode=Dispatch.DP_COMPUTE)
        def compute_log_probs(self, batch: Batch) -> Batch: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import numpy as np

from mcore_rl.data.batch import Batch
from mcore_rl.parallel.balance import DEFAULT_SEQUENCE_COST, balanced_partition
from mcore_rl.parallel.mesh import Mesh

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "_mcore_rl_registration"


class Dispatch(StrEnum):
    """Which ranks are called, with what, and what is returned."""

    ONE_TO_ALL = "one_to_all"  # every rank, the same arguments; a list of results by rank
    RANK_ZERO = "rank_zero"  # world rank 0 only; its result
    DP_COMPUTE = (
        "dp_compute"  # every rank, batches split by DP rank; one batch, or a list by DP rank
    )


@dataclass(frozen=True, slots=True)
class Registration:
    dispatch_mode: Dispatch
    blocking: bool  # whether a plain call waits for the result or returns a Pending
    is_start: bool  # whether it may take timeouts.start_s, or timeouts.call_s


def register(
    *,
    dispatch_mode: Dispatch = Dispatch.ONE_TO_ALL,
    blocking: bool = True,
    is_start: bool = False,
) -> Callable[[F], F]:
    """Marks a worker method as callable through its group."""

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, Registration(Dispatch(dispatch_mode), blocking, is_start))
        return method

    return mark


def registered_methods(worker_class: type) -> dict[str, Registration]:
    """The registered methods of a class, also inherited ones. An override inherits the mark."""
    marks = [
        {n: getattr(m, _ATTRIBUTE) for n, m in vars(base).items() if hasattr(m, _ATTRIBUTE)}
        for base in reversed(worker_class.__mro__)
    ]
    return {name: mark for found in marks for name, mark in found.items()}


class Group(Protocol):
    """The ranks of a model, called as one object: the registered methods of its worker class."""

    def __getattr__(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class CallPart:
    """The arguments of one call, the same for all its ranks."""

    ranks: tuple[int, ...]  # world ranks that get them
    output_rank: int | None  # the one of them whose result counts; None: each rank's counts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: tuple[int, ...] | None = None  # rows of the caller's batches, when they were split


def scatter(
    mode: Dispatch, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[CallPart]:
    """The parts of one call. Raises ValueError when batches to be split differ in length."""
    if mode is Dispatch.ONE_TO_ALL:
        return [CallPart(tuple(range(mesh.world_size)), None, args, kwargs)]
    if mode is Dispatch.RANK_ZERO:
        return [CallPart((0,), 0, args, kwargs)]
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Batch)]
    if not batches:
        raise TypeError("a DP_COMPUTE method was called without a Batch to split")
    if len({len(batch) for batch in batches}) > 1:
        raise ValueError(f"batches of one call differ in rows: {[len(b) for b in batches]}")
    rows_of = balanced_partition(_row_costs(batches), mesh.sizes["dp"])
    return [_dp_part(mesh, dp_rank, rows, args, kwargs) for dp_rank, rows in enumerate(rows_of)]


def gather(mode: Dispatch, parts: Sequence[CallPart], results: Mapping[int, Any]) -> Any:
    """One result from those of the ranks that count; `results` is keyed by world rank.

    DP_COMPUTE: batches are joined in the row order of the caller; anything else is a list by DP
    rank. Raises ValueError when a rank returns a batch with other rows than it was given.
    """
    if mode is Dispatch.ONE_TO_ALL:
        return [results[rank] for rank in parts[0].ranks]
    outputs = [results[part.output_rank] for part in parts if part.output_rank is not None]
    if mode is Dispatch.RANK_ZERO:
        return outputs[0]
    if not all(isinstance(output, Batch) for output in outputs):
        return outputs
    for part, output in zip(parts, outputs, strict=True):
        if len(output) != len(part.rows or ()):
            raise ValueError(
                f"rank {part.output_rank} returned a batch of {len(output)} rows for "
                f"{len(part.rows or ())}; a method that changes the rows must not return a Batch"
            )
    return _in_caller_order(parts, outputs)


def _dp_part(
    mesh: Mesh, dp_rank: int, rows: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallPart:
    def part_of(value: Any) -> Any:
        return value.take(rows) if isinstance(value, Batch) else value

    ranks = mesh.ranks(dp_rank=dp_rank)
    last_stage = mesh.sizes["pp"] - 1
    (output,) = mesh.ranks(dp_rank=dp_rank, tp_rank=0, cp_rank=0, pp_rank=last_stage)
    return CallPart(
        ranks=tuple(ranks),
        output_rank=output,
        args=tuple(part_of(value) for value in args),
        kwargs={name: part_of(value) for name, value in kwargs.items()},
        rows=tuple(rows),
    )


def _row_costs(batches: Sequence[Batch]) -> Sequence[float]:
    """By the default cost of a sequence: nothing is known of the model here."""
    for batch in batches:
        if "prompt_ids" in batch and "response_ids" in batch:
            return [DEFAULT_SEQUENCE_COST.of(int(count)) for count in batch.num_tokens]
    return [1.0] * len(batches[0])


def _in_caller_order(parts: Sequence[CallPart], outputs: Sequence[Batch]) -> Batch:
    # Empty parts are left out: what a worker returns for no rows may have wrong dtypes.
    filled = [(part, output) for part, output in zip(parts, outputs, strict=True) if part.rows]
    if not filled:
        return outputs[0]
    order = np.concatenate([np.asarray(part.rows, dtype=np.int64) for part, _ in filled])
    return Batch.concat([output for _, output in filled]).take(np.argsort(order).tolist())
