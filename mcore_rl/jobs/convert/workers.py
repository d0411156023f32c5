"""Units of work, done in this process or dealt out to others.

A worker process imports what a unit needs and no Megatron. It ends with its parent, however that
ends, and takes no interrupt from the terminal: the parent does, and ends it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from mcore_rl.config.errors import ConfigError
from mcore_rl.jobs.failure import RunFailed


class Unit(Protocol):
    """One output file. Units can be pickled, and are done in any order."""

    @property
    def name(self) -> str:
        """Of the file."""
        ...

    @property
    def nbytes(self) -> int:
        """Of the file, but for headers."""
        ...

    @property
    def memory_bytes(self) -> int:
        """That writing it takes at most."""
        ...

    def write(self, folder: Path, wrote: Callable[[int], None], kept: dict[str, Any]) -> Any:
        """Write the file, aside and then renamed, telling how many bytes have been written.

        `kept` is for what the units of one process share, such as an open reader. Returns what JSON
        can hold.
        """
        ...


Done = tuple[Unit, Any]
Wrote = Callable[[int], None]
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
        return
    with _started(workers, folder, tuple(kinds)) as pipes:
        yield partial(_dealt_out, pipes)


def _done_here(
    folder: Path, kept: dict[str, Any], units: Sequence[Unit], wrote: Wrote
) -> Iterator[Done]:
    for unit in units:
        yield unit, _written(unit, folder, wrote, kept)


def _dealt_out(pipes: list[Connection], units: Sequence[Unit], wrote: Wrote) -> Iterator[Done]:
    left, idle = list(reversed(units)), list(pipes)
    busy: dict[Connection, Unit] = {}
    while left or busy:
        while left and idle:
            unit, pipe = left.pop(), idle.pop()
            pipe.send(unit)
            busy[pipe] = unit
        for ready in wait(list(busy)):
            assert isinstance(ready, Connection)
            pipe = ready
            try:
                kind, answer = pipe.recv()
            except EOFError:
                raise RunFailed(f"the process that wrote {busy[pipe].name} has died") from None
            if kind == "error":
                raise answer
            if kind == "wrote":
                wrote(answer)
            else:
                yield busy.pop(pipe), answer
                idle.append(pipe)


@contextmanager
def _started(count: int, folder: Path, kinds: tuple[type[Unit], ...]) -> Iterator[list[Connection]]:
    """Processes that write units into `folder`: a pipe to each. They are gone at the end."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    # A mask is inherited: an interrupt from the terminal is for this process alone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, folder, kinds), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for pipe in pipes:
            _is_ready(pipe)
        yield pipes
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _is_ready(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        raise RunFailed("a worker process did not start") from None


def _serve(pipe: Connection, folder: Path, kinds: tuple[type[Unit], ...]) -> None:
    """A worker process: it writes what it is sent until it is killed or its parent is gone.

    It is ready when the modules of `kinds`, most of its imports, are there.
    """
    del kinds  # that they have been unpickled is what they are for
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _use_one_thread()
    kept: dict[str, Any] = {}
    with suppress(EOFError, BrokenPipeError):  # the parent has gone
        pipe.send(None)  # ready
        while True:
            unit: Unit = pipe.recv()
            try:
                answer = _written(unit, folder, lambda count: pipe.send(("wrote", count)), kept)
            except (ConfigError, OSError) as error:
                pipe.send(("error", error))
            else:
                pipe.send(("done", answer))


def _use_one_thread() -> None:
    """Of torch, where it has been imported: the modules of units that compute import it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def _written(unit: Unit, folder: Path, wrote: Wrote, kept: dict[str, Any]) -> Any:
    try:
        return unit.write(folder, wrote, kept)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # a full disk, say, is no bad input
            raise error.__cause__ from None
        raise


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
