"""Versions of what a node runs, told without importing it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from mcore_rl.observability.process import detect_lane, list_versions
from mcore_rl.tools.doctor.findings import Fact, NodeReport

_RUNNER, _RUNNER_CHECK = "VLLM_USE_V2_MODEL_RUNNER", "vLLM's model runner"
_CUDA = re.compile(r"^cuda\b.*= *'([\d.]+)'", re.MULTILINE)


def facts() -> dict[str, Fact]:
    found = {"python": platform.python_version(), **list_versions()}
    if cuda := cuda_of_torch():
        found["CUDA of torch"] = cuda
    return {name: Fact(value) for name, value in found.items()}


def look_at_model_runner(report: NodeReport) -> None:
    """Tell which of its two model runners vLLM would take for servers (config/vllm.py:703).

    V2 where Triton runs, V1 elsewhere; the variable decides for both.
    """
    asked, kind = os.environ.get(_RUNNER), detect_lane()
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
    here = {"extra": detect_lane()}
    return {one.name: one for one in required if one.marker is None or one.marker.evaluate(here)}
