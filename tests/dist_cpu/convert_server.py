"""A process that starts conversions in processes of their own, on demand: importing takes seconds.

It says when it is ready. Then a line of its input, [plan, output, workers, report], starts one; a
line of its output is its process id. What it printed goes to the file `report`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mcore_rl.jobs.convert import to_hf, to_megatron  # noqa: F401  (what plans are made of)
from mcore_rl.jobs.convert.plan import Resources
from mcore_rl.jobs.convert.run import run


def convert(plan: str, output: str, workers: int, report: str) -> None:
    conversion = pickle.loads(Path(plan).read_bytes())
    console = Console(width=200, record=True, file=io.StringIO())
    run(replace(conversion, output=Path(output)), Resources(workers=workers), console)
    Path(report).write_text(console.export_text())


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            convert(*json.loads(line))
            os._exit(0)
        print(child, flush=True)


if __name__ == "__main__":
    serve()
