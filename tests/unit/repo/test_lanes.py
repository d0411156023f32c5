"""Which tests run when, and in which worker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NIGHTLY = """
import pytest
from tests.nightly import all_but

@pytest.mark.parametrize("case", all_but(("kept",), ("kept", "more")))
def test_cases(case): pass
"""
SERVER = """
import pytest
pytestmark = pytest.mark.server
def test_server(): pass
"""
FILES = {
    "unit/room/test_a.py": NIGHTLY + "def test_unit(): pass",
    "dist_cpu/test_b.py": NIGHTLY,
    "dist_cpu/test_c.py": "def test_ranks(): pass",
    "e2e/test_d.py": NIGHTLY,
    "e2e/test_e.py": SERVER,
}
UNIT = {"test_cases[kept]", "test_unit"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The settings and hooks of this one, with a few tests that do nothing."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("conftest.py", "nightly.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests")
    for name, text in FILES.items():
        file = folder / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def run(project: Path, *arguments: str) -> dict[str, set[str]]:
    """Tests that ran, as file::test, by worker."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    kept = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=project, env=kept | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = defaultdict(set)
    for line in done.stdout.splitlines():
        if " PASSED " in line and line.startswith("[gw"):
            worker, test = line.split()[0], line.split(" PASSED ")[1]
            found[worker].add(test.partition("@")[0].strip().removeprefix("tests/"))
        elif " PASSED" in line:
            found["here"].add(line.split()[0].removeprefix("tests/"))
    return found


def test_without_arguments_unit_tests_run_and_nothing_else(project: Path) -> None:
    ran = set().union(*run(project).values())
    assert ran == {f"unit/room/test_a.py::{name}" for name in UNIT}


def test_a_file_that_is_named_runs_here_without_nightly(project: Path) -> None:
    ran = run(project, "tests/dist_cpu/test_b.py")
    assert ran == {"here": {"dist_cpu/test_b.py::test_cases[kept]"}}


def test_a_test_that_is_named_runs(project: Path) -> None:
    name = "dist_cpu/test_b.py::test_cases[more]"
    assert run(project, f"tests/{name}") == {"here": {name}}


def test_a_lane_is_in_one_worker_and_everything_runs_for_an_empty_m(project: Path) -> None:
    found = run(project, "-n", "3", "-m", "")
    assert len(set().union(*found.values())) == 9
    lanes = [{"dist_cpu/test_b.py", "dist_cpu/test_c.py"}, {"e2e/test_d.py"}, {"e2e/test_e.py"}]
    for lane in lanes:
        workers = [
            worker
            for worker, tests in found.items()
            if lane & {test.partition("::")[0] for test in tests}
        ]
        assert len(workers) == 1, found
