"""Runs the GPU checks in the order of their worth, each in a process with a time limit.

Those that measure nothing run first, some side by side; then the others, one at a time. One JSON
line per check goes to the output file and to the terminal as soon as the check ends;
tests/gpu/README.md says how to read them. tests/gpu/run.sh prepares a bare machine and starts this.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
KILL_S = 5.0  # between SIGTERM and SIGKILL
IMAGE_PACKAGES = ("PIL", "pyarrow", "torchvision")
TAIL = 6000  # characters of the output of a check that failed
Result = dict[str, object]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    shows: str
    command: tuple[str, ...]  # after the interpreter
    limit_s: float
    needs: tuple[str, ...] = ()  # packages beyond those of every check
    # Package of this environment or of the interpreter PACKAGE_PYTHON; a dry run has a stand-in.
    needs_beside: str = ""
    needs_gpu: bool = False
    needs_program: str = ""
    is_timed: bool = True  # it has the machine to itself


def script(name: str, case: str = "") -> tuple[str, ...]:
    return (str(FOLDER / f"check_{name}.py"), *(("--case", case) if case else ()))


def tests(name: str) -> tuple[str, ...]:
    return (
        "-m",
        "pytest",
        "-q",
        "-x",
        "-c",
        os.devnull,
        "--noconftest",
        f"tests/gpu/test_{name}.py",
    )


FAMILIES = {
    "qwen3": "dense", "qwen3_moe": "moe", "gpt_oss": "gpt-oss", "qwen3_next": "qwen3-next",
    "qwen3_5_moe": "qwen3.5-moe", "deepseek_v3": "deepseek-v3", "deepseek_v32": "deepseek-v3.2",
    "minimax_m2": "minimax-m2",
}  # fmt: skip
TRANSFORMER_ENGINE = ("transformer_engine",)
ENGINE_CHECKS = tuple(
    Check(f"engine {family} {dtype}{suffix}", "scores, two steps, save and load equal "
          f"transformers{reason}", script("engine", f"{model}-{dtype}-{modules}"), 150, needs=needs,
          is_timed=False)
    for modules, suffix, reason, needs in (
        ("torch", "", "", ()),
        ("te", " te", ", with Transformer Engine", TRANSFORMER_ENGINE),
    )
    for dtype in ("float32", "bfloat16")
    for model, family in FAMILIES.items()
)  # fmt: skip
CHECKS = (
    Check("kernels", "CUDA kernels of csrc equal its C++, bit for bit", tests("kernels"), 120,
          needs_gpu=True, is_timed=False),
    Check("bandwidth", "copies, casts and float8 as a share of a device copy",
          ("benchmarks/csrc_kernels.py",), 60),
    Check("attention", "attention without Transformer Engine equals plain attention",
          tests("attention"), 60, needs_gpu=True, is_timed=False),
    *ENGINE_CHECKS,
    Check("adapters dense", "adapters are trained as by plain autograd, the weights are frozen",
          script("adapters", "qwen3"), 120, is_timed=False),
    Check("adapters moe", "the same with adapters of experts", script("adapters", "qwen3_moe"), 120,
          is_timed=False),
    Check("profile", "a trace with the kernels of a step, and a snapshot of the memory",
          script("profile"), 120, is_timed=False),
    Check("fsdp float32", "the FSDP2 engine equals transformers: ten families, three of them with "
          "images", script("fsdp", "float32"), 120, needs=IMAGE_PACKAGES, is_timed=False),
    Check("fsdp bfloat16", "the same in bfloat16", script("fsdp", "bfloat16"), 120,
          needs=IMAGE_PACKAGES, is_timed=False),
    Check("push", "weights to another process by CUDA IPC: equal, GB/s by way to verify",
          script("push"), 90),
    Check("layers dense", "four layers of Qwen3-8B: step time, share of the matmul rate, host "
          "waits, offload GB/s", script("layers", "dense"), 120),
    Check("layers moe", "the same of Qwen3-30B-A3B", script("layers", "moe"), 120),
    Check("layers fsdp dense", "four layers of Qwen3-8B in the FSDP2 engine",
          script("layers", "fsdp-dense"), 120),
    Check("layers fsdp moe", "four layers of Qwen3-30B-A3B in the FSDP2 engine",
          script("layers", "fsdp-moe"), 120),
    Check("layers te dense", "four layers of Qwen3-8B with Transformer Engine",
          script("layers", "te-dense"), 120, needs=TRANSFORMER_ENGINE),
    Check("layers te moe", "four layers of Qwen3-30B-A3B with Transformer Engine",
          script("layers", "te-moe"), 200, needs=TRANSFORMER_ENGINE),
    Check("layers fp8 dense", "four layers of Qwen3-8B, matrix products in float8 blocks",
          script("layers", "fp8-dense"), 120, needs=TRANSFORMER_ENGINE),
    Check("layers fp8 moe", "four layers of Qwen3-30B-A3B, matrix products in float8 blocks",
          script("layers", "fp8-moe"), 200, needs=TRANSFORMER_ENGINE),
    Check("calibrate", "rates of the card as the planner measures them", script("calibrate"), 60),
    Check("cpu offload", "Adam on the host takes the same steps, also after the engine was away",
          script("cpu_offload"), 60, is_timed=False),
    Check("log-prob head", "time and memory of the head against plain cross-entropy",
          script("logprob"), 60),
    Check("memcheck", "compute-sanitizer finds no bad access in a kernel",
          script("memory"), 90, needs_gpu=True, needs_program="compute-sanitizer",
          is_timed=False),
    Check("server runner 2", "vLLM beside an engine: answers, sleep, wake, push (model runner V2)",
          script("server", "runner2"), 300, needs=("vllm",)),
    Check("server runner 1", "the same with model runner V1", script("server", "runner1"), 300,
          needs=("vllm",), needs_gpu=True),
    Check("server graphs", "the same with compiled graphs", script("server", "graphs"), 300,
          needs=("vllm",), needs_gpu=True),
    Check("server float8", "the same in float8 blocks: log-prob gap, GB/s of codes",
          script("server", "float8"), 300, needs=("vllm",), needs_gpu=True),
    Check("server drafts", "vLLM drafts with a prediction layer: greedy tokens, log-probs, "
          "acceptance", script("server", "drafts"), 300, needs=("vllm",)),
    Check("sglang", "servers of SGLang keep the contract of rollout backends", script("sglang"),
          600, needs_beside="sglang"),
    Check("quickstart", "the quickstart on one GPU learns", script("job"), 300,
          needs=("vllm", "ray", "hydra")),
)  # fmt: skip


def environment() -> Result:
    """Describe the machine: card, driver, versions."""
    import torch

    versions = {}
    for name in ("megatron-core", "transformers", "vllm", "ray", "triton", "transformer-engine"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    result: Result = {"python": platform.python_version(), "torch": torch.__version__, **versions}
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        result |= {"card": card.name, "memory_gib": round(card.total_memory / 2**30, 1)}
        result |= {"capability": f"{card.major}.{card.minor}", "driver": driver}
        result |= {
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return result


def missing(check: Check, *, dry: bool) -> str:
    """Say what keeps a check from running on this machine; empty if nothing does."""
    import torch

    if check.needs_gpu and (dry or not torch.cuda.is_available()):
        return "needs a GPU"
    for package in check.needs:
        if importlib.util.find_spec(package) is None:
            return f"needs the package {package}"
    package = "" if dry else check.needs_beside
    variable = f"{package.upper()}_PYTHON"
    if package and not os.environ.get(variable) and importlib.util.find_spec(package) is None:
        return f"needs the package {package}, or {variable}"
    if check.needs_program:
        from shutil import which

        if which(check.needs_program) is None:
            return f"needs the program {check.needs_program}"
    return ""


def run(check: Check, limit_s: float, *, dry: bool) -> Result:
    """Run one check; its process group is ended at the limit."""
    command = [sys.executable, "-X", "faulthandler", *check.command]
    if check.needs_program:
        command = [check.needs_program, "--error-exitcode", "9", *command]
    if dry:
        if check.command[0].startswith("benchmarks"):
            command += ["--megabytes", "8"]
        else:
            command.append("--dry")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    variables["CHECK_LIMIT_S"] = str(limit_s)
    if importlib.util.find_spec("flashinfer") is None:
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=limit_s)
        status = "passed" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, errors = process.communicate(timeout=KILL_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
        status = f"exceeded {limit_s:.0f} s"
    result: Result = {"check": check.name, "status": status, "shows": check.shows}
    result["seconds"] = round(time.monotonic() - start, 1)
    try:  # the last line, or all of the output, is JSON
        lines = output.strip().splitlines()
        result["result"] = json.loads(lines[-1] if lines[-1].startswith("{") else output)
    except (ValueError, IndexError):
        result["output"] = output[-400:]
    if status != "passed":
        errors = re.sub("^Extension modules: .*$", "", errors, flags=re.MULTILINE)
        result["output"], result["errors"] = output[-TAIL:], errors[-TAIL:]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=12.0, help="for all checks together")
    parser.add_argument("--output", type=Path, default=Path("gpu_checks.jsonl"))
    parser.add_argument("--only", default="", help="names of checks, separated by commas")
    parser.add_argument("--dry", action="store_true", help="small sizes, without a GPU")
    parser.add_argument("--list", action="store_true", help="say what each check shows")
    given = parser.parse_args()
    if given.list:
        for check in CHECKS:
            print(f"{check.name:24} {check.limit_s:4.0f} s  {check.shows}")
        return 0
    names = [name.strip() for name in given.only.split(",") if name.strip()]
    if unknown := sorted(set(names) - {check.name for check in CHECKS}):
        allowed = ", ".join(check.name for check in CHECKS)
        parser.error(f"--only: {', '.join(unknown)}; allowed: {allowed}")
    deadline = time.monotonic() + 60 * given.minutes
    given.output.parent.mkdir(parents=True, exist_ok=True)
    lock, results = threading.Lock(), []
    with given.output.open("a") as file:

        def report(line: Result) -> None:
            text = json.dumps(line)
            with lock:
                results.append(line)
                print(text, flush=True)
                print(text, file=file, flush=True)

        def run_and_report(check: Check) -> None:
            left = deadline - time.monotonic()
            reason = missing(check, dry=given.dry) or ("no time left" if left < 10 else "")
            if reason:
                report({"check": check.name, "status": "not run", "reason": reason})
            else:
                report(run(check, min(check.limit_s, left), dry=given.dry))

        report({"environment": environment()})
        chosen = [check for check in CHECKS if not names or check.name in names]
        with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
            list(pool.map(run_and_report, (check for check in chosen if not check.is_timed)))
        for check in chosen:
            if check.is_timed:
                run_and_report(check)
    bad = [
        line["check"]
        for line in results
        if line.get("status", "passed") not in ("passed", "not run")
    ]
    print("failed: " + (", ".join(map(str, bad)) or "none"))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
