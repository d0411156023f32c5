"""The checks for a machine with a GPU, run dry: they need no package but those that they name."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly import all_but

ROOT = Path(__file__).parents[2]
# What tests/gpu/README.md asks for, and the four wheels.
ALLOWED = ("torch", "transformers", "pybind11", "pytest", "setuptools", "psutil")
WHEELS = ("megatron-core", "lapx", "isal", "dill")
CHECKS = all_but(
    ["engine moe bfloat16, push, log-prob head"],  # in one process
    [
        "engine moe bfloat16, push, log-prob head", "bandwidth", "engine dense float32",
        "engine moe float32", "engine dense bfloat16", "engine moe bfloat16", "push",
        "layers dense", "layers moe", "layers fsdp dense", "layers fsdp moe", "log-prob head",
        "adapters moe, profile",
    ],
)  # fmt: skip


def closure(names: tuple[str, ...]) -> set[str]:
    """Return the distributions that these need, with themselves."""
    open_, distributions = [*names], set()
    while open_:
        name = re.sub(r"[-_.]+", "-", open_.pop()).lower()
        if name in distributions:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system
        distributions.add(name)
        open_ += [re.split(r"[ ;<>=!~\[(]", need)[0] for need in needs if "extra ==" not in need]
    return distributions


@pytest.fixture(scope="module")
def bare_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Link the packages of a bare machine into a folder outside of this environment."""
    folder = tmp_path_factory.mktemp("packages")
    for name in sorted(closure(ALLOWED) | {*WHEELS}):
        distribution = importlib.metadata.distribution(name)
        for entry in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (folder / entry).exists():
                (folder / entry).symlink_to(Path(str(distribution.locate_file(entry))))
    return folder


@pytest.mark.parametrize("checks", CHECKS)
def test_checks_run_dry_with_nothing_that_a_bare_machine_lacks(
    tmp_path: Path, bare_packages: Path, checks: str
) -> None:
    python, variables = sys._base_executable, os.environ | {"PYTHONPATH": str(bare_packages)}
    lacks = (
        "import importlib.util as u; print([n for n in ('ray', 'vllm', 'hydra') if u.find_spec(n)])"
    )
    listed = subprocess.run([python, "-c", lacks], env=variables, capture_output=True, text=True)
    assert listed.stdout.strip() == "[]", listed
    lines = tmp_path / "checks.jsonl"
    command = [python, "tests/gpu/run_checks.py", "--dry", "--only", checks]
    result = subprocess.run(
        [*command, "--output", str(lines)],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    environment, *reports = map(json.loads, lines.read_text().splitlines())
    assert "torch" in environment["environment"]
    assert len(reports) == len(checks.split(","))
    assert all(report["status"] == "passed" and report["result"] for report in reports)


@pytest.mark.nightly
def test_checks_with_images_run_dry_where_their_packages_are(tmp_path: Path) -> None:
    command = [sys.executable, "tests/gpu/run_checks.py", "--dry", "--only", "fsdp float32"]
    lines = tmp_path / "checks.jsonl"
    subprocess.run([*command, "--output", str(lines)], cwd=ROOT, check=True, timeout=300)
    _, report = map(json.loads, lines.read_text().splitlines())
    assert report["status"] == "passed" and report["result"]["qwen3_vl"]["is_within"]


def test_checks_that_a_bare_machine_cannot_run_are_reported() -> None:
    command = [sys.executable, "tests/gpu/run_checks.py", "--dry", "--only", "kernels"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert '"status": "not run", "reason": "needs a GPU"' in result.stdout
    wrong = subprocess.run(
        [*command[:-1], "kernel"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2 and "--only: kernel; allowed: kernels, " in wrong.stderr
