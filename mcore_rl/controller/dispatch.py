"""One call on a group of workers becomes one call per rank, and one result. Pure: no Ray.

A worker method has a mode, which says how the arguments are split and the results are joined.

    class ModelWorker:
        @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)
        def compute_log_probs(self, batch: Batch) -> Batch: ...

A batch that is given by reference (RemoteBatch) comes to the worker as a Batch of the columns that
the method `reads`, and of what it returns those go back by reference that it `writes`.

A mode of one's own is declared as those of the table, anywhere:

    ODD_RANKS = DispatchMode(scatter=to_odd_ranks, gather=list_by_rank)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from mcore_rl.config.schema import Layout
from mcore_rl.controller.call_parts import (
    Args,
    CallPart,
    Kwargs,
    Results,
    check_parts,
    entry_to_each,
    has_batches,
    joined_batch,
    list_by_rank,
    only_result,
    split_batches,
    split_batches_for_function,
    split_mini_batches,
    to_all,
    to_rank_zero,
)
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.parallel.mesh import Mesh

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "_mcore_rl_registration"


@dataclass(frozen=True, slots=True)
class DispatchMode:
    """Which ranks are called, with what, and what is returned."""

    scatter: Callable[[Mesh, Args, Kwargs], list[CallPart]]
    gather: Callable[[Sequence[CallPart], Results], Any]


_EVERY_RANK = ("pp", "dp", "cp", "tp")  # in the order of world ranks


class Dispatch:
    """The modes that there are; each is a function of call_parts.py to split and one to join."""

    ONE_TO_ALL: Final = DispatchMode(to_all, list_by_rank)
    ALL_TO_ALL: Final = DispatchMode(entry_to_each, list_by_rank)
    RANK_ZERO: Final = DispatchMode(to_rank_zero, only_result)
    DP_COMPUTE: Final = DispatchMode(partial(split_batches, _EVERY_RANK), joined_batch)
    MEGATRON_COMPUTE: Final = DispatchMode(partial(split_batches, ("dp",)), joined_batch)
    MINI_BATCHES: Final = DispatchMode(split_mini_batches, joined_batch)
    MEGATRON_PP_AS_DP: Final = DispatchMode(partial(split_batches, ("dp", "pp")), joined_batch)
    DP_COMPUTE_WITH_FUNC: Final = DispatchMode(
        partial(split_batches_for_function, _EVERY_RANK), joined_batch
    )


class Execute(StrEnum):
    """On which ranks a mode is carried out."""

    ALL = "all"
    RANK_ZERO = "rank_zero"  # world rank 0 alone, as if the group had no other


ANY_COLUMNS: Final = ("*",)  # of `writes`


@dataclass(frozen=True, slots=True)
class Registration:
    dispatch_mode: DispatchMode
    execute: Execute
    blocking: bool  # whether a plain call waits for the result or returns a Pending
    is_start: bool  # whether it may take timeouts.start_s, or timeouts.call_s
    # Columns of batches by reference, of those that are there; None: all.
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] = ()
    makes: bool = False  # whether it returns batches of new rows, by reference

    def selected(self, value: Any) -> Any:
        """An argument with the columns that the method reads; of a list, each of its batches."""
        if self.reads is None:
            return value
        if has_batches(value):
            return [self.selected(entry) for entry in value]
        if not isinstance(value, RemoteBatch):
            return value
        read = {*self.reads}
        return value.select(*(n for n in value.names if {n, n.partition("/")[0]} & read))

    def scatter(self, mesh: Mesh, args: Args, kwargs: Kwargs) -> list[CallPart]:
        """The parts of one call. Raises TypeError and ValueError for what cannot be split."""
        called = mesh if self.execute is Execute.ALL else Mesh(Layout())
        parts = self.dispatch_mode.scatter(called, args, kwargs)
        check_parts(parts, called)
        return parts


def register(
    *,
    dispatch_mode: DispatchMode = Dispatch.ONE_TO_ALL,
    execute: Execute | str = Execute.ALL,
    blocking: bool = True,
    is_start: bool = False,
    reads: tuple[str, ...] | None = None,
    writes: tuple[str, ...] = (),
    makes: bool = False,
) -> Callable[[F], F]:
    """Marks a worker method as callable through its group.

    `reads` are the columns that are fetched of batches by reference, None for all, and `writes`
    those that the method may add to them. NAME stands for each NAME/PART too, of which a worker
    with an attribute `part` gets its own (`RemoteBatch.of_part`). With `makes` it returns new
    samples: all columns of the batches that it returns are stored where it runs.

    Raises:
        TypeError: `dispatch_mode` is no DispatchMode.
        ValueError: `execute` is neither "all" nor "rank_zero".
    """
    if not isinstance(dispatch_mode, DispatchMode):
        raise TypeError(
            f"dispatch_mode is {dispatch_mode!r}; allowed: an attribute of Dispatch, such as "
            "Dispatch.ONE_TO_ALL, or a DispatchMode of one's own"
        )
    registration = Registration(
        dispatch_mode, Execute(execute), blocking, is_start, reads, writes, makes
    )

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, registration)
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
