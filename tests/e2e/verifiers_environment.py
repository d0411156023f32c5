"""The interpreter with verifiers, which a test makes where it is not there."""

from __future__ import annotations

import subprocess

import pytest

from tests.pages import ROOT

FOLDERS = str(ROOT / "tests/e2e/verifiers_environments")


def interpreter() -> str:
    command = ["bash", str(ROOT / "launch/setup_env.sh"), "verifiers"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"verifiers cannot be installed: {done.stderr[-300:]}")
    return str(ROOT / ".venv-verifiers/bin/python")
