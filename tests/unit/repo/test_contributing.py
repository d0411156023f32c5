"""The changes that CONTRIBUTING.md shows apply to the code as it is, and their tests pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("mcore_rl", "models", "examples", "benchmarks", "configs", "tests", "pyproject.toml")


def list_diffs() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.findall(r"^```diff\n(.*?)^```$", text, flags=re.S | re.M)


def copy_code(folder: Path) -> None:
    for name in PARTS:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder)


@pytest.mark.job
def test_each_change_applies_and_its_test_passes(tmp_path):
    copy_code(tmp_path)
    tests = []
    for diff in list_diffs():
        command = ["git", "apply", "--whitespace=error", "-"]
        done = subprocess.run(command, cwd=tmp_path, input=diff, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        tests += re.findall(r"^\+\+\+ b/(tests/\S+)$", diff, flags=re.M)
    assert len(tests) == len(list_diffs()) == 3
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("diff", list_diffs(), ids=lambda diff: diff.split()[1])
def test_a_change_is_one_file_and_its_test(diff):
    files = re.findall(r"^\+\+\+ b/(\S+)$", diff, flags=re.M)
    assert [file.startswith("tests/") for file in files] == [False, True]
