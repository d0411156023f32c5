"""Choice of tests: when each runs, and in which worker."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from tests.nightly import all_but
from tests.pages import select_commands

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
MOE = """
import pytest
from tests.nightly import all_but

@pytest.mark.parametrize("name", all_but(("moe/tp2",), ("moe/tp2", "moe/pp2 vpp2")))
def test_two_steps_equal_one_rank(name): pass
"""
FILES = {
    "unit/trainers/test_a.py": NIGHTLY + "def test_unit(): pass",
    "dist_cpu/test_b.py": NIGHTLY,
    "dist_cpu/test_moe.py": MOE,
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
    variables = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=project, env=variables | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tests_by_worker = defaultdict(set)
    for line in done.stdout.splitlines():
        if " PASSED " in line and line.startswith("[gw"):
            worker, test = line.split()[0], line.split(" PASSED ")[1]
            tests_by_worker[worker].add(test.partition("@")[0].strip().removeprefix("tests/"))
        elif " PASSED" in line:
            tests_by_worker["here"].add(line.partition(" PASSED")[0].removeprefix("tests/"))
    return tests_by_worker


TWO_STEPS = "dist_cpu/test_moe.py::test_two_steps_equal_one_rank"
PAGE = {  # the commands of CONTRIBUTING.md and docs/testing.md, and what runs of the files above
    "pytest tests/unit/trainers": {f"unit/trainers/test_a.py::{name}" for name in UNIT},
    "pytest": {f"unit/trainers/test_a.py::{name}" for name in UNIT},
    "pytest -m ranks": {
        *("dist_cpu/test_c.py::test_ranks", f"{TWO_STEPS}[moe/tp2]", f"{TWO_STEPS}[moe/pp2 vpp2]"),
        *(f"dist_cpu/test_b.py::test_cases[{case}]" for case in ("kept", "more")),
    },
    "pytest tests/dist_cpu/test_moe.py": {f"{TWO_STEPS}[moe/tp2]"},
    f'pytest "tests/{TWO_STEPS}[moe/pp2 vpp2]"': {f"{TWO_STEPS}[moe/pp2 vpp2]"},
    'pytest -m "ranks and not nightly" -k tp2': {f"{TWO_STEPS}[moe/tp2]"},
}


def test_the_page_has_these_commands():
    assert [command.text for command in select_commands("tests")] == [*PAGE]


@pytest.mark.parametrize(("command", "expected"), PAGE.items(), ids=[*PAGE])
def test_a_command_of_the_page_runs_the_tests_that_it_says(
    project: Path, command, expected
) -> None:
    few = ("-n", "0") if "-m" in command else ()  # workers take seconds to start
    actual = run(project, *shlex.split(command)[1:], *few)
    assert set().union(*actual.values()) == expected
    assert ".py" not in command or [*actual] == ["here"]  # a single file runs without workers


def test_a_commit_runs_gates_of_the_test_command():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    gates = (ROOT / "tests" / "run.sh").read_text()
    for hook in hooks:
        command = hook["entry"].replace(".venv/bin/", "")
        assert f"gate '{hook['name']}' {command}" in gates


def test_a_daily_case_that_is_no_case_is_an_error():
    with pytest.raises(ValueError, match=r"^daily, but no case: .*gone"):
        all_but(("gone",), ("here",))


def test_a_lane_is_in_one_worker_and_everything_runs_for_an_empty_m(project: Path) -> None:
    tests_by_worker = run(project, "-n", "3", "-m", "")
    assert len(set().union(*tests_by_worker.values())) == 11
    ranks = {f"dist_cpu/test_{name}.py" for name in ("b", "c", "moe")}
    lanes = [ranks, {"e2e/test_d.py"}, {"e2e/test_e.py"}]
    for lane in lanes:
        workers = [
            worker
            for worker, tests in tests_by_worker.items()
            if lane & {test.partition("::")[0] for test in tests}
        ]
        assert len(workers) == 1, tests_by_worker
