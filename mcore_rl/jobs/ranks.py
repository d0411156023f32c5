"""Processes for a job that needs an engine once, without Ray and controller.

A process that fails ends the others, and its failure is raised here. All end with this process,
however it ends. Their output goes to files, and becomes part of the error if they fail.
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
from mcore_rl.controller.compilers import is_gpu_node, prepare_compilers
from mcore_rl.observability.process import skip_gc_at_exit
from mcore_rl.observability.stacks import (
    dump_stacks_on_signal,
    format_stacks,
    inspect_process,
    summarize_states,
)
from mcore_rl.parallel.rendezvous import RendezvousServer

# Containers of tensors, numbers and text, which torch.load loads with weights_only.
Result = Any
Job = Callable[[], Result]  # importable by name, as functools.partial of a function is

_DONE, _BAD_INPUT, _FAILED = "done", "bad input", "failed"  # outcomes of a process
_END_S = 30.0  # timeout of the end of a process that has answered
_REASON = re.compile(r"\b\w*(?:Error|Exception)\b: .+")


class ProcessFailed(RuntimeError):
    """A process failed. The first line names it and the reason; its traceback and output follow."""


def run_on_ranks(
    job: Job, world_size: int, log_dir: Path, timeout_s: float, preload: Sequence[str] = ()
) -> list[Result]:
    """Run `job` on `world_size` ranks of this machine; return the results by rank.

    A rank has RANK, WORLD_SIZE, LOCAL_RANK and RENDEZVOUS_* in its environment, which join_world
    reads, and makes its process groups itself.

    Args:
        timeout_s: The value of --timeout.
        preload: Modules to import once for the processes of all calls, on a node without GPUs: a
            fork server keeps them. The first call of this process decides which.

    Raises:
        ConfigError: A rank raised it.
        ProcessFailed: A rank raised another error, ended without a result, or did not answer in
            time.
    """
    with RendezvousServer("127.0.0.1") as rendezvous:
        common = {"WORLD_SIZE": str(world_size), **rendezvous.endpoint.to_environment()}
        environments = {
            f"rank {rank}": {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            for rank in range(world_size)
        }
        return _run(job, environments, log_dir, timeout_s, preload)


def run_in_process(
    job: Job, name: str, log_dir: Path, timeout_s: float, preload: Sequence[str] = ()
) -> Result:
    """Run `job` in a separate process and return its result; see run_on_ranks.

    Args:
        name: Name of the process in errors.
    """
    return _run(job, {name: {}}, log_dir, timeout_s, preload)[0]


def _run(
    job: Job,
    environments: Mapping[str, Mapping[str, str]],
    log_dir: Path,
    timeout_s: float,
    preload: Sequence[str],
) -> list[Result]:
    # Each process unpickles it when environment and streams are ready, since that imports torch.
    pickled = pickle.dumps(job)
    context = _choose_context(preload)
    processes, pipes, logs = [], [], []
    try:
        for name, environment in environments.items():
            receiver, sender = context.Pipe(duplex=False)
            logs.append(log_dir / f"{name.replace(' ', '_')}.log")
            # A fork server has the environment of its start.
            arguments = (pickled, {**os.environ, **environment}, logs[-1], sender)
            processes.append(context.Process(target=_main, args=arguments, name=name))
            processes[-1].start()
            sender.close()
            pipes.append(receiver)
        results = _gather(processes, pipes, logs, timeout_s)
        for process in processes:
            process.join(_END_S)
        return results
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _choose_context(preload: Sequence[str]) -> Any:
    """Return how processes start: each from nothing, or from a fork server with modules.

    Importing Megatron may start CUDA, which does not survive a fork.
    """
    if not preload or is_gpu_node():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload])
    return context


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
            raise _build_timeout_error(silent, timeout_s)
        for pipe in ready:
            index = pipes.index(pipe)
            try:
                outcome, answer = pipes[index].recv()
            except EOFError:
                processes[index].join(_END_S)
                status = processes[index].exitcode
                outcome, answer = _FAILED, (f"it ended with exit status {status}", "")
            if outcome == _BAD_INPUT:
                raise ConfigError(answer)
            if outcome == _FAILED:
                raise _build_error(processes[index].name, answer, logs[index])
            results[index] = torch.load(io.BytesIO(answer), weights_only=True)
    return [results[index] for index in range(len(pipes))]


def _build_timeout_error(silent: Sequence[Any], timeout_s: float) -> ProcessFailed:
    """Return an error with what the processes are doing, the most urgent first."""
    looks = {process.name: inspect_process(process.pid) for process in silent}
    first, *rest = sorted(looks, key=lambda name: min(look.urgency for look in looks[name]))
    line = (
        f"{first} has not answered in {timeout_s:g} s (--timeout): {summarize_states(looks[first])}"
    )
    if rest:
        line += f". Nor has {'; nor has '.join(f'{n}: {summarize_states(looks[n])}' for n in rest)}"
    return ProcessFailed("\n\n".join([line, *(f"{n}:\n{format_stacks(looks[n])}" for n in looks)]))


def _build_error(name: str, answer: tuple[str, str], log: Path) -> ProcessFailed:
    reason, trace = answer
    printed = log.read_text(errors="replace") if log.exists() else ""
    return ProcessFailed(f"{name}: {_find_root_cause(reason, printed)}\n{trace}\n{printed}")


def _find_root_cause(reason: str, printed: str) -> str:
    """Return the reason, or that of a child process to which it only refers, as in vLLM."""
    if "root cause" not in reason:
        return reason
    reasons = [match[0] for match in _REASON.finditer(printed) if "root cause" not in match[0]]
    return reasons[0] if reasons else reason


def _main(job: bytes, environment: dict[str, str], log: Path, answers: Connection) -> None:
    """Run the job in a process; send (outcome, result or error)."""
    _end_with_parent()
    _redirect_output(log)
    os.environ.update(environment)
    prepare_compilers()
    dump_stacks_on_signal()
    skip_gc_at_exit()
    try:
        run = pickle.loads(job)
        answer: tuple[str, Any] = _DONE, _serialize(run())
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


def _serialize(result: Result) -> bytes:
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


def _redirect_output(log: Path) -> None:
    """Redirect both streams to a file, for libraries and child processes too."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
