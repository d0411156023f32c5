"""Compare a GRPO step of this framework with one of TRL: same model, data, reward and work.

    bash launch/quickstart.sh output_dir=outputs/q
    python benchmarks/against_trl.py outputs/q --trl-python PATH [--shape quickstart|dense-70m]
        [--response-tokens N] [--steps 10] [--beside-load N] [--output FILE] [key=value ...]

`quickstart` is the warm-started checkpoint of that quickstart, 64 prompts x 8 responses and two
optimizer steps per step. `dense-70m` is a Qwen3 of 72 M random parameters, 4 prompts x 8 responses
and one optimizer step. Every response has N tokens: the end of sequence is a token that the model
does not sample. float32 on two threads. `--trl-python` is a Python that can import trl, accelerate,
datasets and this framework's torch and transformers; TRL generates with transformers, as it does by
default. `key=value` are further settings of ours.

Steps alternate, ours and TRL's, while the other side waits, so that other load on the machine meets
both. Medians are compared, and CPU seconds of all processes of a side. "start" ends when the first
step may begin: everything is imported, loaded and connected. With `--beside-load N` the second half
of the steps runs beside N busy processes.
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

from mcore_rl.benchmarks.against_trl_inputs import SHAPES, Shape, write_inputs
from mcore_rl.observability.memory import get_tree_memory_bytes, list_process_tree

FOLDER = Path(__file__).parent
THREADS = 2
PHASES = ("generate_s", "log_probs_s", "update_s", "weight_sync_s", "other_s")


class Side:
    """A program that reports its start and each of its steps as a line of JSON."""

    def __init__(self, program: list[str], folder: Path, settings: dict[str, Any]) -> None:
        environ = os.environ | {"OMP_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "false"}
        self._errors = folder / f"{Path(program[1]).stem}.err"
        self._response_tokens = settings["response_tokens"]
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
        self.start = self._read_report() | self._measure_usage(started)
        self.steps: list[dict[str, Any]] = []
        self.peak_memory_bytes = get_tree_memory_bytes(self._root)

    def run_step(self) -> dict[str, Any]:
        started = time.perf_counter()
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        step = self._read_report() | self._measure_usage(started)
        if step["response_tokens"] != self._response_tokens:
            raise SystemExit(
                f"{self._errors.stem}: responses of {step['response_tokens']} tokens on average, "
                f"not all of {self._response_tokens}"
            )
        step["other_s"] = round(step["wall_s"] - sum(step.get(name, 0) for name in PHASES), 3)
        self.steps.append(step)
        self.peak_memory_bytes = max(self.peak_memory_bytes, get_tree_memory_bytes(self._root))
        return step

    def stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()

    def _read_report(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"{self._errors.name}:\n{self._errors.read_text()[-4000:]}")

    def _measure_usage(self, started: float) -> dict[str, float]:
        wall_s, before = time.perf_counter() - started, self._cpu_s
        self._cpu_s = _sum_cpu_seconds(self._root)
        return {"wall_s": round(wall_s, 3), "cpu_s": round(self._cpu_s - before, 2)}


def _sum_cpu_seconds(root: psutil.Process) -> float:
    """Sum CPU seconds of a process and its descendants, including those that were waited for."""
    total = 0.0
    for process in list_process_tree(root):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


@contextlib.contextmanager
def _run_sides(args: argparse.Namespace, shape: Shape) -> Iterator[dict[str, Side]]:
    """Start one side after the other, so that each start is measured alone."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = write_inputs(args.quickstart, shape, folder) | {
            "steps": args.steps,
            "prompts": shape.prompts,
            "group_size": shape.group_size,
            "optimizer_steps": shape.optimizer_steps,
            "max_prompt_tokens": shape.max_prompt_tokens,
            "response_tokens": args.response_tokens,
            "kv_cache_bytes": shape.kv_cache_bytes,
            "threads": THREADS,
            "seed": args.seed,
            "overrides": args.overrides,
        }
        sides: dict[str, Side] = {}
        programs = {
            "trl": [args.trl_python, str(FOLDER / "against_trl_theirs.py")],
            "mcore_rl": [sys.executable, str(FOLDER / "against_trl_ours.py")],
        }
        for name, program in programs.items():
            sides[name] = Side(program, folder, settings | {"output": str(folder / name)})
            stack.callback(sides[name].stop)
        yield sides


@contextlib.contextmanager
def _run_load(num_processes: int) -> Iterator[None]:
    """Keep `num_processes` processes busy."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _compute_medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    names = [*PHASES, "wall_s", "cpu_s"]
    return {n: round(statistics.median(step.get(n, 0.0) for step in steps), 3) for n in names}


def _divide(values: dict[str, float], bases: dict[str, float]) -> dict[str, float | None]:
    """Divide values by bases that are not 0."""
    return {
        name: round(values[name] / base, 3) if base else None
        for name, base in bases.items()
        if name != "other_s"
    }


def _make_report(
    args: argparse.Namespace,
    shape: Shape,
    sides: dict[str, Side],
    parts: dict[str, slice],
    load: float,
) -> dict[str, Any]:
    medians = {
        part: {name: _compute_medians(side.steps[rows]) for name, side in sides.items()}
        for part, rows in parts.items()
    }
    our_side, trl_side = sides["mcore_rl"], sides["trl"]
    cost = {name: {k: side.start[k] for k in ("wall_s", "cpu_s")} for name, side in sides.items()}
    return {
        "shape": args.shape,
        "prompts": shape.prompts,
        "group_size": shape.group_size,
        "optimizer_steps": shape.optimizer_steps,
        "response_tokens": args.response_tokens,
        "steps": args.steps,
        "load_processes": args.beside_load,
        "overrides": args.overrides,
        "cores": len(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "load_average_at_start": load,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "python": platform.python_version(),
        "ours_over_trl": {
            **{part: _divide(both["mcore_rl"], both["trl"]) for part, both in medians.items()},
            "start": _divide(cost["mcore_rl"], cost["trl"]),
            "memory": round(our_side.peak_memory_bytes / trl_side.peak_memory_bytes, 3),
        },
        "medians": medians,
        **{
            name: {
                "start": side.start,
                "peak_memory_bytes": side.peak_memory_bytes,
                "steps": side.steps,
            }
            for name, side in sides.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("quickstart", type=Path, help="the output folder of a quickstart")
    parser.add_argument("--trl-python", required=True, help="a Python that has TRL")
    parser.add_argument("--shape", choices=SHAPES, default="quickstart")
    parser.add_argument("--response-tokens", type=int, default=24, help="of every response")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--beside-load", type=int, default=0, help="busy processes in 2nd half")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a file for the JSON; otherwise it is printed")
    parser.add_argument("overrides", nargs="*", help="settings of ours, key=value")
    args = parser.parse_intermixed_args()
    shape, load = SHAPES[args.shape], round(os.getloadavg()[0], 2)
    half = args.steps // 2 if args.beside_load else args.steps
    parts = {"alone": slice(0, half), "beside_load": slice(half, args.steps)}
    with _run_sides(args, shape) as sides:
        for part, rows in parts.items():
            with _run_load(args.beside_load if part == "beside_load" else 0):
                for step in range(args.steps)[rows]:
                    for name, side in sides.items():
                        print(f"{step + 1} {name}: {side.run_step()}", file=sys.stderr, flush=True)
        parts = {part: rows for part, rows in parts.items() if range(args.steps)[rows]}
        report = _make_report(args, shape, sides, parts, load)
    text = json.dumps(report, indent=1) + "\n"
    if args.output:
        args.output.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
