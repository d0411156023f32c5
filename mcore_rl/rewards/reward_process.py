"""One of the processes of processes.py: calls a reward, a line of JSON at a time.

{"name": ..., "settings": {...}, "modules": [...], "memory_mb": ..., "path": [...]}
                                        first, answered by {}, or by {"error": ...} and its end
{"given": [...], "optional": {...}, "timeout_s": ...}
                                        a call, answered by {"error": ...} or
{"result": ..., "errors": {...}}        where `errors` are those in the places of a batched result
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mcore_rl.rewards.base import get_reward, raised, shown


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a reward prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    asked = json.loads(sys.stdin.readline())
    try:
        reward = _loaded(asked)
    except Exception as error:  # noqa: BLE001 (the server says what follows from it)
        told = f"{type(error).__name__}: {error}"
        print(json.dumps({"error": told}), file=answers, flush=True)
        return
    if asked["memory_mb"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (asked["memory_mb"] << 20,) * 2)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        # A server that was killed cannot kill this process; then the alarm ends it.
        signal.setitimer(signal.ITIMER_REAL, asked["timeout_s"] + 5)
        try:
            answer = _answer(reward(*asked["given"], **asked["optional"]))
        except MemoryError:
            raise  # ends this process, as a time limit does
        except Exception as error:  # noqa: BLE001 (the server says what follows from it)
            answer = json.dumps({"error": raised(error)})
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, file=answers, flush=True)


def _loaded(asked: Mapping[str, Any]) -> Callable[..., Any]:
    sys.path += [folder for folder in asked["path"] if folder not in sys.path]
    for module in asked["modules"]:
        importlib.import_module(module)
    return get_reward(asked["name"], asked["settings"])


def _answer(result: object) -> str:
    errors: dict[int, str] = {}
    if isinstance(result, list | tuple):
        failed = [(n, one) for n, one in enumerate(result) if isinstance(one, Exception)]
        errors = {number: raised(error) for number, error in failed}
        result = [None if number in errors else one for number, one in enumerate(result)]
    return json.dumps({"result": result, "errors": errors}, default=_plain)


def _plain(value: Any) -> float | str:
    """What is no JSON: a number, as numpy has them, or what an error shows of it."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return shown(value)


if __name__ == "__main__":
    main()
