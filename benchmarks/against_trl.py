"""A GRPO step of this framework beside one of TRL: same model, data, reward and amount of work.

    bash launch/quickstart.sh output_dir=outputs/q
    python benchmarks/against_trl.py outputs/q --trl-python PATH [--steps 20] [--output FILE]
        [key=value ...]

Both start from the warm-started checkpoint of that quickstart and do 20 steps of 64 prompts x 8
responses with two optimizer steps each, no group left out, on two threads. `--trl-python` is a
Python that can import trl, accelerate, datasets and this framework's torch and transformers; TRL
generates with transformers, as it does where nothing else is asked for. `key=value` are further
settings of ours.

Steps take turns, ours and TRL's, while the other waits: what else the machine does meets both.
Medians are compared, and CPU seconds of all processes of a side, which tell less of the neighbours.
"Ready" is when the first step may begin: everything is imported, loaded and connected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from mcore_rl.observability.memory import get_tree_memory_bytes, list_process_tree

HERE = Path(__file__).parent
THREADS = 2
GROUP_SIZE, PROMPTS, OPTIMIZER_STEPS = 8, 64, 2


class Side:
    """A program that says, in lines of JSON, that it is ready, and what each of its steps was."""

    def __init__(self, program: list[str], folder: Path, settings: dict[str, Any]) -> None:
        environ = os.environ | {"OMP_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "false"}
        self._errors = folder / f"{Path(program[1]).stem}.err"
        started = time.perf_counter()
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [*program, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environ,
            )
        self._root = psutil.Process(self._process.pid)
        self._cpu_s = 0.0
        self.ready = self._told() | self._spent(started)
        self.steps: list[dict[str, Any]] = []
        self.peak_memory_bytes = get_tree_memory_bytes(self._root)

    def step(self) -> None:
        started = time.perf_counter()
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.steps.append(self._told() | self._spent(started))
        self.peak_memory_bytes = max(self.peak_memory_bytes, get_tree_memory_bytes(self._root))

    def end(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()

    def summary(self) -> dict[str, Any]:
        names = [name for name in self.steps[0] if name.endswith("_s")]
        return {
            "median": {n: round(statistics.median(s[n] for s in self.steps), 3) for n in names},
            "ready": self.ready,
            "peak_memory_bytes": self.peak_memory_bytes,
            "steps": self.steps,
        }

    def _told(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"{self._errors.name}:\n{self._errors.read_text()[-4000:]}")

    def _spent(self, started: float) -> dict[str, float]:
        wall_s, before = time.perf_counter() - started, self._cpu_s
        self._cpu_s = _cpu_seconds(self._root)
        return {"wall_s": round(wall_s, 3), "cpu_s": round(self._cpu_s - before, 2)}


def _cpu_seconds(root: psutil.Process) -> float:
    """Of a process and its descendants, those that have ended and were waited for included."""
    total = 0.0
    for process in list_process_tree(root):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


@contextlib.contextmanager
def _sides(args: argparse.Namespace) -> Iterator[dict[str, Side]]:
    """One after the other, so that the start of each is measured alone."""
    settings = {
        "checkpoint": str(args.quickstart / "warm_start"),
        "data": str(args.quickstart / "task" / "train.parquet"),
        "test_data": str(args.quickstart / "task" / "test.parquet"),
        "steps": args.steps,
        "prompts": PROMPTS,
        "group_size": GROUP_SIZE,
        "optimizer_steps": OPTIMIZER_STEPS,
        "threads": THREADS,
        "seed": args.seed,
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides: dict[str, Side] = {}
        programs = {
            "trl": [args.trl_python, str(HERE / "against_trl_theirs.py")],
            "mcore_rl": [sys.executable, str(HERE / "against_trl_ours.py")],
        }
        for name, program in programs.items():
            own = {"output": str(folder / name), "overrides": args.overrides}
            sides[name] = Side(program, folder, settings | own)
            stack.callback(sides[name].end)
        yield sides


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("quickstart", type=Path, help="the output folder of a quickstart")
    parser.add_argument("--trl-python", required=True, help="a Python that has TRL")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a file for the JSON; otherwise it is printed")
    parser.add_argument("overrides", nargs="*", help="settings of ours, key=value")
    args = parser.parse_args()
    with _sides(args) as sides:
        for step in range(args.steps):
            for name, side in sides.items():
                side.step()
                last = side.steps[-1]
                print(f"{step + 1} {name}: {last}", file=sys.stderr, flush=True)
        found = {name: side.summary() for name, side in sides.items()}
    ours, theirs = found["mcore_rl"], found["trl"]
    report = {
        "work": f"{args.steps} steps of {PROMPTS} x {GROUP_SIZE}, {OPTIMIZER_STEPS} updates each",
        "overrides": args.overrides,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "ours_over_trl": {
            "step_wall": round(ours["median"]["wall_s"] / theirs["median"]["wall_s"], 3),
            "step_cpu": round(ours["median"]["cpu_s"] / theirs["median"]["cpu_s"], 3),
            "ready_wall": round(ours["ready"]["wall_s"] / theirs["ready"]["wall_s"], 3),
            "ready_cpu": round(ours["ready"]["cpu_s"] / theirs["ready"]["cpu_s"], 3),
            "memory": round(ours["peak_memory_bytes"] / theirs["peak_memory_bytes"], 3),
        },
        **found,
    }
    text = json.dumps(report, indent=1) + "\n"
    if args.output:
        args.output.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
