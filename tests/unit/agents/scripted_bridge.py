"""A scripted process of an environment, started in place of an interpreter.

The name of the environment is what it does. Its rollouts are those of a program with one turn.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

LOCK = threading.Lock()
CANCELLED: list[int] = []


def say(answer: dict[str, Any]) -> None:
    with LOCK:
        print(json.dumps(answer), flush=True)


def ask_policy(run: dict[str, Any]) -> tuple[int, int]:
    """Ask the policy; return the numbers of tokens of the prompt and of its answer."""
    body = {"model": run["model"], "messages": [{"role": "user", "content": run["task"]}]}
    headers = {"Authorization": f"Bearer {run['api_key']}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{run['base_url']}/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as answer:
        usage = json.load(answer)["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def rollout(kind: str, run: dict[str, Any]) -> None:
    prompt, new = ask_policy(run)
    if kind == "dies":
        print("no memory is left", file=sys.stderr, flush=True)
        signal.raise_signal(signal.SIGKILL)
    if kind == "waits" and run["task"] == "waits":
        return
    result = {
        "error": "TaskError: no such city" if kind == "fails" else None,
        "reward": 1.5 + len(CANCELLED),
        "rewards": {"right": 1.0, "short": 0.5},
        "metrics": {"length": 3.0},
        "turns": None,
        "usage": [[prompt, new + (kind == "lies")]],
        "is_truncated": False,
        "is_timeout": kind == "late",
    }
    say({"id": run["id"], **result})


def main() -> None:
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    settings = json.loads(sys.stdin.readline())
    kind = settings["environment"]
    if kind == "refused":
        say({"error": "ModuleNotFoundError: no such taskset"})
        return
    if kind == "silent":
        time.sleep(60)
    if kind == "leaves":
        child = subprocess.Popen(["sleep", "600"])
        print("child", child.pid, file=sys.stderr, flush=True)
    say({"version": "0.3.1" if kind == "old" else "0.4.0", "agent": "agent"})
    for line in sys.stdin:
        what = json.loads(line)
        if kind == "hangs":
            hang_here()
        if what["op"] == "ping":
            say({"id": what["id"]})
        elif what["op"] == "cancel":
            CANCELLED.append(what["run"])
        else:
            threading.Thread(target=rollout, args=(kind, what), daemon=True).start()


def hang_here() -> None:
    time.sleep(60)


if __name__ == "__main__":
    main()
