"""Processes for a job that needs an engine once: no Ray, and no controller.

A process that fails ends the others, and its failure is the error here. All end with this process,
however it ends. What they print goes to files, and becomes part of the error when they fail.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller.compilers import prepare_compilers
from mcore_rl.observability.garbage import leave_garbage_at_exit
from mcore_rl.observability.stacks import answer_signals, in_full, in_short, look_at
from mcore_rl.parallel.rendezvous import RendezvousServer

# Containers of tensors, numbers and text: what torch.load takes without running anything.
Result = Any
Job = Callable[[], Result]  # importable by name, as functools.partial of a function is

_DONE, _BAD_INPUT, _FAILED = "done", "bad input", "failed"  # outcomes of a process
_END_S = 30.0  # how long a process that has answered may take to end
_REASON = re.compile(r"\b\w*(?:Error|Exception)\b: .+")


class ProcessFailed(RuntimeError):
    """The first line says which process and why; the rest is its trace and what it printed."""


def run_on_ranks(job: Job, world_size: int, log_dir: Path, timeout_s: float) -> list[Result]:
    """What `job` returns on each of `world_size` ranks of this machine, by rank.

    `timeout_s` is what the user gave as --timeout.

    A rank finds itself by RANK, WORLD_SIZE, LOCAL_RANK and RENDEZVOUS_*, which join_world of
    parallel/store.py reads, and makes its process groups itself.

    Raises:
        ConfigError: a rank raised it.
        ProcessFailed: a rank raised something else, ended without a result, or did not answer in
            time.
    """
    with RendezvousServer("127.0.0.1") as rendezvous:
        common = {"WORLD_SIZE": str(world_size), **rendezvous.endpoint.environment()}
        environments = {
            f"rank {rank}": {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            for rank in range(world_size)
        }
        return _run(job, environments, log_dir, timeout_s)


def run_in_process(job: Job, name: str, log_dir: Path, timeout_s: float) -> Result:
    """What `job` returns in a separate process; `name` is in its error.

    Raises as `run_on_ranks`.
    """
    return _run(job, {name: {}}, log_dir, timeout_s)[0]


def _run(
    job: Job, environments: Mapping[str, Mapping[str, str]], log_dir: Path, timeout_s: float
) -> list[Result]:
    # Unpickled by hand: that imports torch, for which environment and streams must be ready.
    packed = pickle.dumps(job)
    context = multiprocessing.get_context("spawn")
    processes, pipes, logs = [], [], []
    try:
        for name, environment in environments.items():
            here, there = context.Pipe(duplex=False)
            logs.append(log_dir / f"{name.replace(' ', '_')}.log")
            arguments = (packed, dict(environment), logs[-1], there)
            processes.append(context.Process(target=_main, args=arguments, name=name))
            processes[-1].start()
            there.close()
            pipes.append(here)
        results = _gather(processes, pipes, logs, timeout_s)
        for process in processes:
            process.join(_END_S)
        return results
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _gather(
    processes: Sequence[Any], pipes: Sequence[Connection], logs: Sequence[Path], timeout_s: float
) -> list[Result]:
    import torch

    deadline = time.monotonic() + timeout_s
    results: dict[int, Result] = {}
    while len(results) < len(pipes):
        waiting = [pipe for index, pipe in enumerate(pipes) if index not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = [process for index, process in enumerate(processes) if index not in results]
            raise _silence(silent, timeout_s)
        for pipe in ready:
            index = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                outcome, answer = pipes[index].recv()
            except EOFError:
                processes[index].join(_END_S)
                status = processes[index].exitcode
                outcome, answer = _FAILED, (f"it ended with exit status {status}", "")
            if outcome == _BAD_INPUT:
                raise ConfigError(answer)
            if outcome == _FAILED:
                raise _failure(processes[index].name, answer, logs[index])
            results[index] = torch.load(io.BytesIO(answer), weights_only=True)
    return [results[index] for index in range(len(pipes))]


def _silence(silent: Sequence[Any], timeout_s: float) -> ProcessFailed:
    looks = {process.name: look_at(process.pid) for process in silent}
    first, *others = sorted(looks, key=lambda name: min(look.urgency for look in looks[name]))
    line = f"{first} has not answered in {timeout_s:g} s (--timeout): {in_short(looks[first])}"
    if others:
        line += f". Nor has {'; nor has '.join(f'{n}: {in_short(looks[n])}' for n in others)}"
    return ProcessFailed("\n\n".join([line, *(f"{n}:\n{in_full(looks[n])}" for n in looks)]))


def _failure(name: str, answer: tuple[str, str], log: Path) -> ProcessFailed:
    reason, trace = answer
    printed = log.read_text(errors="replace") if log.exists() else ""
    return ProcessFailed(f"{name}: {_root_cause(reason, printed)}\n{trace}\n{printed}")


def _root_cause(reason: str, printed: str) -> str:
    """The reason, or that of a child process to which it only refers, as in vLLM."""
    if "root cause" not in reason:
        return reason
    found = [match[0] for match in _REASON.finditer(printed) if "root cause" not in match[0]]
    return found[0] if found else reason


def _main(job: bytes, environment: dict[str, str], log: Path, answers: Connection) -> None:
    """A process: run the job and answer (outcome, what there is to tell)."""
    _end_with_parent()
    _print_to(log)
    os.environ.update(environment)
    prepare_compilers()
    answer_signals()
    leave_garbage_at_exit()
    try:
        run = pickle.loads(job)
        answer: tuple[str, Any] = _DONE, _packed(run())
    except ConfigError as error:
        answer = _BAD_INPUT, str(error)
    except BaseException as error:  # noqa: BLE001 (it is raised in the parent)
        reason = " ".join(f"{type(error).__name__}: {error}".split("\n")[0].split())
        answer = _FAILED, (reason, traceback.format_exc())
    sys.stdout.flush()
    answers.send(answer)
    answers.close()
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _packed(result: Result) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _print_to(log: Path) -> None:
    """Both streams go to the file, those of libraries and of processes started from here too."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
