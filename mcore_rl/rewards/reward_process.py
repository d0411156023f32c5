"""One of the processes of processes.py: calls a reward, a line of JSON at a time.

{"name": ..., "settings": {...}, "modules": [...], "memory_mb": ...}  first, answered by {}
{"given": [...], "optional": {...}, "timeout_s": ...}                 a call, answered by
{"result": ...} or {"error": ...}
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys

from mcore_rl.rewards.base import get_reward, raised


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a reward prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    asked = json.loads(sys.stdin.readline())
    for module in asked["modules"]:
        importlib.import_module(module)
    reward = get_reward(asked["name"], asked["settings"])
    if asked["memory_mb"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (asked["memory_mb"] << 20,) * 2)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        # A server that was killed cannot kill this process; then the alarm ends it.
        signal.setitimer(signal.ITIMER_REAL, asked["timeout_s"] + 5)
        try:
            result = reward(*asked["given"], **asked["optional"])
            answer = json.dumps({"result": result}, default=float)  # numpy's numbers are no JSON
        except MemoryError:
            raise  # ends this process, as a time limit does
        except Exception as error:  # noqa: BLE001 (the server says what follows from it)
            answer = json.dumps({"error": raised(error)})
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
