"""Set-up takes packages from where pip is configured to look."""

import doctest
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "launch/uv.py"


def test_the_examples_of_the_script_give_what_they_show():
    spec = importlib.util.spec_from_file_location("uv_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    failed, attempted = doctest.testmod(script)
    assert attempted > 0 and failed == 0


@pytest.fixture
def wheels(tmp_path):
    """A folder with one wheel, which no index has."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "mcore_rl_toy-1.0.dist-info"
    with zipfile.ZipFile(folder / "mcore_rl_toy-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mcore_rl_toy.py", "")
        names = "Metadata-Version: 2.1\nName: mcore-rl-toy\nVersion: 1.0\n"
        wheel.writestr(f"{info}/METADATA", names)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def installs(**variables) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    command = [sys.executable, SCRIPT, "pip", "install", "--dry-run", "--no-deps", "mcore-rl-toy"]
    return subprocess.run(command, env=kept | variables, capture_output=True, text=True)


def test_a_folder_of_pips_environment_is_searched(wheels):
    done = installs(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    assert done.returncode == 0, done.stderr
    assert "mcore-rl-toy==1.0" in done.stderr


def test_a_folder_of_pips_file_is_searched_and_the_environment_goes_first(wheels, tmp_path):
    config = tmp_path / "pip.conf"
    config.write_text(f"[install]\nno-index = true\nfind-links =\n    {wheels}\n")
    assert installs(PIP_CONFIG_FILE=str(config)).returncode == 0
    elsewhere = installs(PIP_CONFIG_FILE=str(config), PIP_FIND_LINKS=str(tmp_path))
    assert elsewhere.returncode != 0 and "mcore-rl-toy was not found" in elsewhere.stderr
