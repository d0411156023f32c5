"""One call on a group of workers becomes one call per rank, and one result. Pure: no Ray.

A worker method has a mode, which splits the arguments over ranks and joins the results.

    class ModelWorker:
        @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)
        def compute_log_probs(self, batch: Batch) -> Batch: ...

    scored = group.call(ModelWorker.compute_log_probs, batch)

`ModelWorker.compute_log_probs` is a `RemoteMethod`, with the types of the group's side: those of
the method, changed as its mode changes arguments and results. On a worker it is the method itself.

A batch that is given by reference (RemoteBatch) comes to the worker as a Batch of the columns that
the method `reads`. Of the batch that it returns, the columns that it `writes` go back by reference.

Another mode is declared like those of `Dispatch`, in any module. Its type says what a group's call
returns: `Joined[int]`, or the same as a mode of `Dispatch`.

    def send_to_odd_ranks(mesh, args, kwargs):
        odd = tuple(range(1, mesh.world_size, 2))
        return [CallPart(ranks=odd, output_rank=None, args=args, kwargs=kwargs)]

    ODD_RANKS: DispatchMode[OfEachRank] = DispatchMode(send_to_odd_ranks, list_by_rank)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial, update_wrapper
from typing import Any, Concatenate, Final, Literal, Protocol, cast, overload

import numpy as np

from mcore_rl.config.schema import Layout
from mcore_rl.controller.remote_batch import PROMPT_TOKENS, RemoteBatch
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.parallel.balance import DEFAULT_SEQUENCE_COST, partition_evenly
from mcore_rl.parallel.mesh import Mesh

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Results = Mapping[int, Any]  # by world rank; None for ranks that are not an output rank


@dataclass(frozen=True, slots=True)
class CallPart:
    """Ranks that are called with the same arguments."""

    ranks: tuple[int, ...]  # world ranks
    output_rank: int | None  # the rank whose result counts; None: that of each rank
    args: Args
    kwargs: Kwargs
    rows: tuple[int, ...] | None = None  # rows of the caller's batches, if they were split


def send_to_all(mesh: Mesh, args: Args, kwargs: Kwargs) -> list[CallPart]:
    """Give every rank the same arguments."""
    return [CallPart(tuple(range(mesh.world_size)), None, args, kwargs)]


def send_to_rank_zero(mesh: Mesh, args: Args, kwargs: Kwargs) -> list[CallPart]:
    """Give the arguments to world rank 0; call no other rank."""
    return [CallPart((0,), 0, args, kwargs)]


def send_entries(mesh: Mesh, args: Args, kwargs: Kwargs) -> list[CallPart]:
    """Give each rank its entry of every argument, a list or a tuple with one entry a rank.

    Raises:
        ValueError: an argument is no list, or has more or fewer entries.
    """
    for name, value in [*enumerate(args), *kwargs.items()]:
        is_list = isinstance(value, list | tuple)
        if not is_list or len(value) != mesh.world_size:
            problem = f"has {len(value)}" if is_list else f"is a {type(value).__name__}"
            raise ValueError(
                f"argument {name!r} {problem}; it must be a list of {mesh.world_size} entries, one "
                "a rank"
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
    """Split batches by the ranks on mesh axes, balanced by cost; give all else to every rank.

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
    groups = _group_ranks(mesh, axes)
    if len(groups) == 1:
        all_rows = tuple(range(len(batches[0])))
        output_rank = _get_output_rank(mesh, groups[0])
        return [CallPart(groups[0], output_rank, args, kwargs, all_rows)]
    partition = _partition_rows(tuple(_estimate_row_costs(batches)), len(groups))
    return [
        CallPart(
            ranks=ranks,
            output_rank=_get_output_rank(mesh, ranks),
            args=tuple(_take_rows(value, rows) for value in args),
            kwargs={name: _take_rows(value, rows) for name, value in kwargs.items()},
            rows=tuple(rows),
        )
        for ranks, rows in zip(groups, partition, strict=True)
    ]


def split_mini_batches(mesh: Mesh, args: Args, kwargs: Kwargs) -> list[CallPart]:
    """Split each mini-batch of a batch over data-parallel ranks, as `split_batches`.

    The arguments are the batch and the keyword `sizes`: how many consecutive rows each mini-batch
    has. A rank gets its rows of each mini-batch, one after the other, and these sizes. Without
    `sizes` all rows are one mini-batch.

    Raises:
        TypeError: the first argument is no Batch.
        ValueError: the sizes are not those of all rows.
    """
    batch, sizes = args[0] if args else None, kwargs.get("sizes")
    groups = _group_ranks(mesh, ("dp",))
    if not isinstance(batch, Samples):
        raise TypeError(f"mini-batches of a {type(batch).__name__}; allowed: a Batch")
    if sizes is not None and sum(sizes) != len(batch):
        raise ValueError(f"mini-batches of {list(sizes)} rows of a batch of {len(batch)}")
    if sizes is None or len(groups) == 1:
        return split_batches(("dp",), mesh, args, kwargs)
    costs = _estimate_row_costs([batch])
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    partitions: list[list[list[int]]] = []  # rows by mini-batch and data-parallel rank
    for size, end in zip(sizes, ends, strict=True):
        start = end - size
        partition = _partition_rows(tuple(costs[start:end]), len(groups))
        partitions.append([[start + row for row in rows] for rows in partition])
    parts = []
    for ranks, mini_batches in zip(groups, zip(*partitions, strict=True), strict=True):
        all_rows = [row for rows in mini_batches for row in rows]
        part_kwargs = kwargs | {"sizes": [len(rows) for rows in mini_batches]}
        output_rank = _get_output_rank(mesh, ranks)
        part_args = (batch.take(all_rows),)
        parts.append(CallPart(ranks, output_rank, part_args, part_kwargs, tuple(all_rows)))
    return parts


@lru_cache(maxsize=4)  # the update of a step splits the rows that the pass of log-probs has split
def _partition_rows(costs: tuple[float, ...], num_parts: int) -> list[list[int]]:
    return partition_evenly(costs, num_parts)


def split_batches_for_function(
    axes: tuple[str, ...], mesh: Mesh, args: Args, kwargs: Kwargs
) -> list[CallPart]:
    """Split batches for a method whose first argument is a function, which every rank gets.

    Raises:
        TypeError: it is no function, or no argument is a Batch.
        ValueError: batches differ in rows.
    """
    if not args or not callable(args[0]):
        problem = f"a {type(args[0]).__name__}" if args else "missing"
        raise TypeError(f"the first argument is {problem}; it must be a function of a rank's part")
    return split_batches(axes, mesh, args, kwargs)


def list_by_rank(parts: Sequence[CallPart], results: Results) -> list[Any]:
    """Return the results of all ranks that were called."""
    return [results[rank] for rank in sorted(rank for part in parts for rank in part.ranks)]


def get_only_result(parts: Sequence[CallPart], results: Results) -> Any:
    """Return the result of the one rank that was called."""
    (rank,) = parts[0].ranks
    return results[rank]


def join_batches(parts: Sequence[CallPart], results: Results) -> Any:
    """Join batches in the row order of the caller. Return other results as a list by part.

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
    # Empty parts are left out: what a worker returns for no rows may have wrong dtypes.
    filled = [(part, output) for part, output in zip(parts, outputs, strict=True) if part.rows]
    if not filled or len(parts) == 1:
        return outputs[0]
    order = np.concatenate([np.asarray(part.rows, dtype=np.int64) for part, _ in filled])
    joined = type(outputs[0]).concat([output for _, output in filled])
    return joined.take(np.argsort(order).tolist())


def add_input_columns(args: Args, kwargs: Kwargs, output: Any) -> Any:
    """Add the columns of the first batch by reference among the inputs to an output batch.

    If the inputs are lists with an entry for each rank, each output gets the columns of its entry.
    """
    if not isinstance(output, RemoteBatch) and not _has_remote_batches(output):
        return output
    for value in (*args, *kwargs.values()):
        if isinstance(value, RemoteBatch):
            return value.union(output) if isinstance(output, RemoteBatch) else output
        if _has_remote_batches(value) and isinstance(output, list) and len(output) == len(value):
            pairs = zip(value, output, strict=True)
            return [add_input_columns((entry,), {}, result) for entry, result in pairs]
    return output


def _has_remote_batches(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(v, RemoteBatch) for v in value)


def _group_ranks(mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Return the ascending world ranks of each coordinate on these axes, the last axis fastest."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        coordinate = mesh.get_coordinate(rank)
        key = tuple(getattr(coordinate, f"{axis}_rank") for axis in axes)
        groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for _, ranks in sorted(groups.items())]


def _get_output_rank(mesh: Mesh, ranks: tuple[int, ...]) -> int:
    """Return the first rank on the last pipeline stage."""
    stage = mesh.get_coordinate(ranks[-1]).pp_rank  # pp varies slowest
    return next(rank for rank in ranks if mesh.get_coordinate(rank).pp_rank == stage)


def _take_rows(value: Any, rows: list[int]) -> Any:
    return value.take(rows) if isinstance(value, Samples) else value


def _estimate_row_costs(batches: Sequence[Samples]) -> Sequence[float]:
    """Estimate costs from lengths alone: nothing is known of the model here."""
    for batch in batches:
        has_lengths = isinstance(batch, RemoteBatch) and PROMPT_TOKENS in batch.local
        if has_lengths or ("prompt_ids" in batch and "response_ids" in batch):
            return [DEFAULT_SEQUENCE_COST.estimate(int(count)) for count in batch.num_tokens]
    return [1.0] * len(batches[0])


class RemoteMethod[**P, T]:
    """A registered method, as a group calls it: `group.call(method, *args, **kwargs) -> T`."""

    name: str
    registration: Registration
    result_bytes = 0  # of the new samples that a call makes, at most; 0: few

    def with_result_bytes(self, num_bytes: int) -> RemoteMethod[P, T]:
        """Return the method for calls that may return new samples of so many bytes."""
        method = RemoteMethod[P, T]()
        method.name, method.registration = self.name, self.registration
        method.result_bytes = num_bytes
        return method


class WorkerMethod[W, **Q, R, **P, T](RemoteMethod[P, T]):
    """A registered method in its class: the function on a worker, a RemoteMethod on the class."""

    def __init__(
        self, function: Callable[Concatenate[W, Q], R], registration: Registration
    ) -> None:
        self.function, self.registration = function, registration
        self.name = cast(Any, function).__name__
        update_wrapper(cast(Any, self), function)

    @overload
    def __get__(self, worker: None, owner: type[W]) -> RemoteMethod[P, T]: ...
    @overload
    def __get__(self, worker: W, owner: type[W]) -> Callable[Q, R]: ...
    def __get__(self, worker: W | None, owner: type[W]) -> RemoteMethod[P, T] | Callable[Q, R]:
        return self if worker is None else cast(Any, self.function).__get__(worker, owner)


class HostedRank(Protocol):
    """A process of a rank: `WorkerInfo` of Ray, or `RankInfo` of torchrun."""

    @property
    def host(self) -> str:
        """Return the name of the host."""


class RankGroup(Protocol):
    """The ranks of a model, called as one object: the registered methods of its worker class.

    `WorkerGroup` calls them by Ray, `TorchrunGroup` in the processes of torchrun.
    """

    @property
    def worker_infos(self) -> Mapping[int, HostedRank]:
        """Return where each rank runs, by world rank; rank 0 is there."""

    def call[**P, T](self, method: RemoteMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method on the ranks; return what its mode makes of their results."""


# What `register` makes of a method, by what its mode does with arguments and results. A batch may
# be given by reference, and is returned by reference.


class OfEachRank(Protocol):
    """A list of what the method returns on each rank."""

    def __call__[W, **P, R](
        self, method: Callable[Concatenate[W, P], R], /
    ) -> WorkerMethod[W, P, R, P, list[R]]: ...


class SamplesOfEachRank(Protocol):
    """A list of the new samples that the method returns on each rank (`makes`), by reference."""

    def __call__[W, **P](
        self, method: Callable[Concatenate[W, P], Batch | None], /
    ) -> WorkerMethod[W, P, Batch | None, P, list[Samples | None]]: ...


class OfOneRank(Protocol):
    """The result of the method on the one rank that is called."""

    @overload
    def __call__[W, **P, R](
        self, method: Callable[Concatenate[W, Batch, P], R], /
    ) -> WorkerMethod[W, Concatenate[Batch, P], R, Concatenate[Samples, P], R]: ...
    @overload
    def __call__[W, **P, R](
        self, method: Callable[Concatenate[W, P], R], /
    ) -> WorkerMethod[W, P, R, P, R]: ...


class OfParts(Protocol):
    """A batch, joined from the batches of all parts; of other results a list by part."""

    @overload
    def __call__[W, **P](  # type: ignore[overload-overlap]  # a batch is no other result
        self, method: Callable[Concatenate[W, Batch, P], Batch | None], /
    ) -> WorkerMethod[W, Concatenate[Batch, P], Batch | None, Concatenate[Samples, P], Samples]: ...
    @overload
    def __call__[W, **P, R](
        self, method: Callable[Concatenate[W, Batch, P], R], /
    ) -> WorkerMethod[W, Concatenate[Batch, P], R, Concatenate[Samples, P], list[R]]: ...


class Joined[T](Protocol):
    """A value of type T, which the mode makes of the results of a batch's parts."""

    def __call__[W, **P, R](
        self, method: Callable[Concatenate[W, Batch, P], R], /
    ) -> WorkerMethod[W, Concatenate[Batch, P], R, Concatenate[Samples, P], T]: ...


class Untyped(Protocol):
    """Any arguments, and any result."""

    def __call__[W, **P, R](
        self, method: Callable[Concatenate[W, P], R], /
    ) -> WorkerMethod[W, P, R, ..., Any]: ...


@dataclass(frozen=True, slots=True)
class DispatchMode[M]:
    """A function that splits arguments over ranks, and one that joins the results.

    `M` is the type of what `register` makes of a method: `OfEachRank` or another of those above.
    """

    scatter: Callable[[Mesh, Args, Kwargs], list[CallPart]]
    gather: Callable[[Sequence[CallPart], Results], Any]


_EVERY_RANK = ("pp", "dp", "cp", "tp")  # in the order of world ranks


class Dispatch:
    """The built-in modes."""

    ONE_TO_ALL: Final[DispatchMode[OfEachRank]] = DispatchMode(send_to_all, list_by_rank)
    ALL_TO_ALL: Final[DispatchMode[Untyped]] = DispatchMode(send_entries, list_by_rank)
    RANK_ZERO: Final[DispatchMode[OfOneRank]] = DispatchMode(send_to_rank_zero, get_only_result)
    DP_COMPUTE: Final[DispatchMode[OfParts]] = DispatchMode(
        partial(split_batches, _EVERY_RANK), join_batches
    )
    MEGATRON_COMPUTE: Final[DispatchMode[OfParts]] = DispatchMode(
        partial(split_batches, ("dp",)), join_batches
    )
    MINI_BATCHES: Final[DispatchMode[OfParts]] = DispatchMode(split_mini_batches, join_batches)
    MEGATRON_PP_AS_DP: Final[DispatchMode[OfParts]] = DispatchMode(
        partial(split_batches, ("dp", "pp")), join_batches
    )
    DP_COMPUTE_WITH_FUNC: Final[DispatchMode[Untyped]] = DispatchMode(
        partial(split_batches_for_function, _EVERY_RANK), join_batches
    )


class Execute(StrEnum):
    """The ranks that take part in a mode."""

    ALL = "all"
    RANK_ZERO = "rank_zero"  # world rank 0 alone, as if the group had no other


ANY_COLUMNS: Final = ("*",)  # of `writes`


@dataclass(frozen=True, slots=True)
class Registration:
    """Arguments of `register`, as a worker method has them."""

    dispatch_mode: DispatchMode[Any]
    execute: Execute
    is_start: bool  # whether it may take timeouts.start_s, or timeouts.call_s
    # Columns of batches by reference, of those that are there; None: all.
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] = ()
    makes: bool = False  # whether it returns batches of new rows, by reference

    def select_columns(self, value: Any) -> Any:
        """Return an argument with the columns that the method reads; of a list, each batch."""
        if self.reads is None:
            return value
        if _has_remote_batches(value):
            return [self.select_columns(entry) for entry in value]
        if not isinstance(value, RemoteBatch):
            return value
        reads = {*self.reads}
        return value.select(*(n for n in value.names if {n, n.partition("/")[0]} & reads))

    def scatter(self, mesh: Mesh, args: Args, kwargs: Kwargs) -> list[CallPart]:
        """Split a call into parts.

        Raises:
            TypeError, ValueError: it cannot be split, or a part calls a rank twice, or one that
                does not exist.
        """
        called_mesh = mesh if self.execute is Execute.ALL else Mesh(Layout())
        parts = self.dispatch_mode.scatter(called_mesh, args, kwargs)
        _check_parts(parts, called_mesh)
        return parts


def _check_parts(parts: Sequence[CallPart], mesh: Mesh) -> None:
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


@overload
def register(
    *,
    execute: Execute | str = ...,
    is_start: bool = ...,
    reads: tuple[str, ...] | None = ...,
    writes: tuple[str, ...] = ...,
    makes: Literal[False] = ...,
) -> OfEachRank: ...
@overload
def register(
    *,
    dispatch_mode: DispatchMode[OfEachRank] = ...,
    execute: Execute | str = ...,
    is_start: bool = ...,
    reads: tuple[str, ...] | None = ...,
    writes: tuple[str, ...] = ...,
    makes: Literal[True],
) -> SamplesOfEachRank: ...
@overload
def register[M](
    *,
    dispatch_mode: DispatchMode[M],
    execute: Execute | str = ...,
    is_start: bool = ...,
    reads: tuple[str, ...] | None = ...,
    writes: tuple[str, ...] = ...,
    makes: bool = ...,
) -> M: ...
def register(
    *,
    dispatch_mode: DispatchMode[Any] = Dispatch.ONE_TO_ALL,
    execute: Execute | str = Execute.ALL,
    is_start: bool = False,
    reads: tuple[str, ...] | None = None,
    writes: tuple[str, ...] = (),
    makes: bool = False,
) -> Any:
    """Mark a worker method as callable through its group.

    Args:
        reads: Columns of batches by reference that are fetched, None for all. NAME stands for each
            NAME/PART, too, of which a worker with an attribute `part` gets its own
            (`RemoteBatch.select_part`).
        writes: Columns that the method may add to batches by reference.
        makes: The method returns new samples: all columns of the batches that it returns are stored
            where it runs.

    Raises:
        TypeError: `dispatch_mode` is no DispatchMode.
        ValueError: `execute` is neither "all" nor "rank_zero".
    """
    if not isinstance(dispatch_mode, DispatchMode):
        raise TypeError(
            f"dispatch_mode is {dispatch_mode!r}; allowed: an attribute of Dispatch, such as "
            "Dispatch.ONE_TO_ALL, or a DispatchMode of one's own"
        )
    registration = Registration(dispatch_mode, Execute(execute), is_start, reads, writes, makes)

    def mark(method: Callable[..., Any]) -> WorkerMethod[Any, ..., Any, ..., Any]:
        return WorkerMethod(method, registration)

    return mark


def get_registered_methods(worker_class: type) -> dict[str, Registration]:
    """Return the registered methods of a class, also inherited and overridden ones."""
    registrations: dict[str, Registration] = {}
    for base in reversed(worker_class.__mro__):
        for name, method in vars(base).items():
            if isinstance(method, WorkerMethod):
                registrations[name] = method.registration
    return registrations
