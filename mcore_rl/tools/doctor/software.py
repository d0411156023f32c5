"""Versions of what a node runs, told without importing it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from mcore_rl.controller.compilers import TOOLS, compiler_environment, is_gpu_node
from mcore_rl.observability.versions import lane, versions
from mcore_rl.tools.doctor.findings import Fact, NodeReport

_RUNNER, _RUNNER_CHECK = "VLLM_USE_V2_MODEL_RUNNER", "vLLM's model runner"
_CUDA = re.compile(r"^cuda\b.*= *'([\d.]+)'", re.MULTILINE)


def facts() -> dict[str, Fact]:
    found = {"python": platform.python_version(), **versions()}
    if cuda := cuda_of_torch():
        found["CUDA of torch"] = cuda
    return {name: Fact(value) for name, value in found.items()}


def look_at_model_runner(report: NodeReport) -> None:
    """Tell which of its two model runners vLLM would take for servers (config/vllm.py:703).

    V2 where Triton runs, V1 elsewhere; the variable decides for both.
    """
    asked, kind = os.environ.get(_RUNNER), lane()
    if kind == "none":
        return
    has_triton = _has_triton(kind)
    is_number = asked is None or re.fullmatch(r"\s*[+-]?\d+\s*", asked)
    is_v2 = has_triton if asked is None or not is_number else bool(int(asked))
    if not is_number or (is_v2 and not has_triton):
        wanted = "0 or 1" if has_triton else "0, because Triton is missing"
        remedy = f"unset {_RUNNER}: a server would end at its start"
        report.add(_RUNNER_CHECK, "fail", f"{_RUNNER}={asked!r}", wanted, remedy)
        return
    report.facts[_RUNNER_CHECK] = Fact("V2" if is_v2 else "V1", "warn")


def look_at_compilers(report: NodeReport) -> None:
    """On a node with GPUs, tell whether servers have what FlashInfer compiles with.

    Without it vLLM does not use FlashInfer's kernels, and prints that at one of its quieter levels
    (utils/flashinfer.py:95 of vLLM).
    """
    if not is_gpu_node() or importlib.util.find_spec("flashinfer") is None:
        return
    if importlib.util.find_spec("flashinfer_cubin") is not None:
        report.add("FlashInfer", "ok", "compiled kernels of flashinfer-cubin")
        return
    path = compiler_environment(os.environ, Path("/")).get("PATH", os.environ.get("PATH", ""))
    places = {tool: shutil.which(tool, path=path) for tool in TOOLS}
    if toolkit := os.environ.get("CUDA_HOME") or os.environ.get(
        "CUDA_PATH"
    ):  # it looks there alone
        places["nvcc"] = shutil.which(os.path.join(toolkit, "bin", "nvcc"))
    missing = [tool for tool, place in places.items() if place is None]
    value = f"no {' and no '.join(missing)}" if missing else ", ".join(map(str, places.values()))
    remedy = "bash launch/setup_env.sh has ninja; CUDA_HOME names a CUDA 13 toolkit with nvcc"
    wanted = f"{' and '.join(TOOLS)}, or servers do without FlashInfer's kernels"
    report.add("FlashInfer", "warn" if missing else "ok", value, wanted, remedy)


def _has_triton(kind: str) -> bool:
    """Whether Triton has a backend for this kind of environment (triton_utils/importing.py:14)."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return False
    return kind == "gpu" or (Path(spec.origin).parent / "backends" / "cpu").is_dir()


def cuda_of_torch() -> str:
    """That torch was built with; empty for none."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    found = _CUDA.search(file.read_text()) if file and file.exists() else None
    return found[1] if found else ""


def pins() -> dict[str, Requirement]:
    """What the lane of this environment asks for, by package."""
    required = map(Requirement, metadata.requires("mcore-rl") or ())
    here = {"extra": lane()}
    return {one.name: one for one in required if one.marker is None or one.marker.evaluate(here)}
