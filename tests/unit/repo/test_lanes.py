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
from tests.smoke import SMOKE as SMOKE_TESTS

ROOT = Path(__file__).resolve().parents[3]
NIGHTLY = """
import pytest
from tests.nightly import all_but

@pytest.mark.parametrize("case", all_but(("kept",), ("kept", "more")))
def test_cases(case): pass
"""
SMOKE = """
SMOKE = {
    "tests/dist_cpu/test_b.py": ("test_cases",),
    "tests/e2e/test_e.py": ("test_server",),
}
"""
SHORT = "not nightly and (smoke or not (ranks or server or job))"
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
    "smoke.py": SMOKE,
    "unit/trainers/test_a.py": NIGHTLY + "def test_unit(): pass",
    "unit/trainers/test_fully_async.py": "import pytest\n@pytest.mark.job\ndef test_job(): pass",
    "dist_cpu/test_b.py": NIGHTLY,
    "dist_cpu/test_moe.py": MOE,
    "dist_cpu/test_c.py": "def test_ranks(): pass",
    "e2e/test_d.py": NIGHTLY,
    "e2e/test_e.py": SERVER,
}
UNIT = {f"unit/trainers/test_a.py::{name}" for name in ("test_cases[kept]", "test_unit")}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The settings and hooks of this one, with a few tests that do nothing."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("__init__.py", "conftest.py", "nightly.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests")
    for name, text in FILES.items():
        file = folder / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def start(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    variables = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command, cwd=project, env=variables | {"PYTHONPATH": path}, capture_output=True, text=True
    )


def run(project: Path, *arguments: str) -> dict[str, list[str]]:
    """Return the tests that ran, as file::test, by worker."""
    done = start(project, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    tests_by_worker = defaultdict(list)
    for line in done.stdout.splitlines():
        if " PASSED " in line and line.startswith("[gw"):
            worker, test = line.split()[0], line.split(" PASSED ")[1]
            tests_by_worker[worker].append(test.partition("@")[0].strip().removeprefix("tests/"))
        elif " PASSED" in line:
            tests_by_worker["here"].append(line.partition(" PASSED")[0].removeprefix("tests/"))
    return tests_by_worker


TWO_STEPS = "dist_cpu/test_moe.py::test_two_steps_equal_one_rank"
PAGE = {  # the commands of CONTRIBUTING.md and docs/testing.md, and what runs of the files above
    "pytest tests/unit/trainers": UNIT,
    "pytest tests/unit/trainers/test_fully_async.py": {
        "unit/trainers/test_fully_async.py::test_job"
    },
    "pytest": UNIT,
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


@pytest.mark.job
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


@pytest.mark.job
def test_the_short_lane_is_that_of_the_command_and_runs_first(project: Path) -> None:
    command = (ROOT / "tests" / "run.sh").read_text()
    assert f"lanes='{SHORT}'" in command
    smoke = {"dist_cpu/test_b.py::test_cases[kept]", "e2e/test_e.py::test_server"}
    [tests] = run(project, "-n", "0", "-m", SHORT).values()
    assert {*tests} == UNIT | smoke
    [all_tests] = run(project, "-n", "0", "-m", "not nightly").values()
    assert {*all_tests[: len(tests)]} == {*tests}
    assert "e2e/test_d.py::test_cases[kept]" in all_tests[len(tests) :]


@pytest.mark.job
def test_every_smoke_test_is_there() -> None:
    tests = [f"{file}::{name}" for file, names in SMOKE_TESTS.items() for name in names]
    done = start(ROOT, "-n", "0", "-m", "smoke", "--collect-only", "-q", "-q", *tests)
    listed = [line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == 0, done.stderr
    assert {*listed} == {test.partition("[")[0] for test in tests} and len(listed) >= len(tests)


@pytest.mark.job
def test_a_lane_is_in_one_worker_and_everything_runs_for_an_empty_m(project: Path) -> None:
    tests_by_worker = run(project, "-n", "3", "-m", "")
    assert sum(map(len, tests_by_worker.values())) == 12
    ranks = {f"dist_cpu/test_{name}.py" for name in ("c", "moe")}
    lanes = [ranks, {"e2e/test_d.py"}, {"e2e/test_e.py"}]
    for lane in lanes:
        workers = [
            worker
            for worker, tests in tests_by_worker.items()
            if lane & {test.partition("::")[0] for test in tests}
        ]
        assert len(workers) == 1, tests_by_worker
