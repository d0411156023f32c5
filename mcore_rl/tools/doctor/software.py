"""Versions of what a node runs, told without importing it."""

from __future__ import annotations

import importlib.util
import platform
import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from mcore_rl.observability.versions import lane, versions
from mcore_rl.tools.doctor.findings import Fact

_CUDA = re.compile(r"^cuda\b.*= *'([\d.]+)'", re.MULTILINE)


def facts() -> dict[str, Fact]:
    found = {"python": platform.python_version(), **versions()}
    if cuda := cuda_of_torch():
        found["CUDA of torch"] = cuda
    return {name: Fact(value) for name, value in found.items()}


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
