"""Units of work, done in this process or by a pool of others.

A worker process imports what a unit needs and no Megatron. It ends with its parent, however that
ends, and ignores interrupts from the terminal: the parent handles them, and ends it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mcore_rl.config.errors import ConfigError
from mcore_rl.jobs.failure import RunFailed

Wrote = Callable[[int], None]
# Processes are forked by one that has imported what units need, and does nothing else: a spawned
# one would take 2 s of CPU time for that.
_START = "forkserver"
_TELL_S = 0.2  # how often bytes that others have written are counted


class Unit(Protocol):
    """One output file. Units can be pickled, and are done in any order."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...  # of the file, but for headers

    @property
    def memory_bytes(self) -> int: ...  # that writing it takes at most

    def write(self, folder: Path, wrote: Wrote, kept: dict[str, Any]) -> Any:
        """Write the file, aside and then renamed, telling how many bytes have been written.

        `kept` is for what the units of one process share, such as an open reader. Returns what JSON
        can hold.
        """
        ...


Done = tuple[Unit, Any]
Writer = Callable[[Sequence[Unit], Wrote], Iterator[Done]]


@contextmanager
def writer(
    workers: int, folder: Path, kinds: Collection[type[Unit]], kept: Mapping[str, Any]
) -> Iterator[Writer]:
    """What writes units of these kinds into `folder`: each comes with what it returned, when done.

    It raises ConfigError and OSError as a unit raised them, while the others stop, and RunFailed
    when a worker died. With one worker all is done in this process, with `kept` for the units to
    share. Others are ready here.
    """
    if workers == 1:
        _use_one_thread()
        yield partial(_done_here, folder, dict(kept))
    else:
        with _started(workers, folder, tuple(kinds)) as pools:
            yield partial(_dealt_out, pools)


def _done_here(
    folder: Path, kept: dict[str, Any], units: Sequence[Unit], wrote: Wrote
) -> Iterator[Done]:
    for unit in units:
        yield unit, _write(unit, folder, wrote, kept)


# Pools of one process, so that it is known which one has died, and the bytes that each has written.
_Pools = Mapping[ProcessPoolExecutor, Any]


def _dealt_out(pools: _Pools, units: Sequence[Unit], wrote: Wrote) -> Iterator[Done]:
    left, idle, told = list(reversed(units)), list(pools), 0
    busy: dict[Future[Any], tuple[Unit, ProcessPoolExecutor]] = {}
    while left or busy:
        while left and idle:
            unit, pool = left.pop(), idle.pop()
            busy[pool.submit(_write_there, unit)] = unit, pool
        done, _ = wait(busy, _TELL_S, FIRST_COMPLETED)
        written = sum(count.value for count in pools.values())
        wrote(written - told)
        told = written
        for future in done:
            unit, pool = busy.pop(future)
            try:
                result = future.result()
            except BrokenProcessPool:
                raise RunFailed(f"the process that wrote {unit.name} has died") from None
            yield unit, result
            idle.append(pool)


@contextmanager
def _started(count: int, folder: Path, kinds: tuple[type[Unit], ...]) -> Iterator[_Pools]:
    """Processes that write units into `folder`. They are gone at the end."""
    context, others = multiprocessing.get_context(_START), set(multiprocessing.active_children())
    context.set_forkserver_preload(sorted({kind.__module__ for kind in kinds}))
    pools: dict[ProcessPoolExecutor, Any] = {}
    # A mask is inherited: an interrupt from the terminal is for this process alone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(count):
            written = context.RawValue("q")
            arguments = (folder, written, kinds)
            pools[ProcessPoolExecutor(1, context, _begin, arguments)] = written
        ready = [pool.submit(_use_one_thread) for pool in pools]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for future in ready:
            future.result()
        yield pools
    except BrokenProcessPool:
        raise RunFailed("a worker process has died") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        for pool in pools:
            pool.shutdown(cancel_futures=True)


_process: list[Any] = []  # of a worker process: its folder, how it counts, what its units share


def _begin(folder: Path, written: Any, kinds: tuple[type[Unit], ...]) -> None:
    """A worker process begins; with `kinds` it has imported their modules, most of its imports."""

    def wrote(num_bytes: int) -> None:
        written.value += num_bytes

    _process[:] = folder, wrote, {}
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _use_one_thread() -> None:
    """Of torch, where it has been imported: the modules of units that compute import it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def _write_there(unit: Unit) -> Any:
    return _write(unit, *_process)


def _write(unit: Unit, folder: Path, wrote: Wrote, kept: dict[str, Any]) -> Any:
    try:
        return unit.write(folder, wrote, kept)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # a full disk, say, is no bad input
            raise error.__cause__ from None
        raise
