"""The size gate finds what is too long and accepts a reason."""

import subprocess
import sys
from pathlib import Path

import pytest

GATE = Path(__file__).resolve().parents[2] / "check_sizes.py"
SHORT = "def f():\n    return 1\n"
LONG_FUNCTION = "def f():\n{doc}" + "    x = 1\n" * 81
LONG_FILE = "{doc}" + "x = 1\n" * 701


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "sample.py").write_text(source)
    return subprocess.run(
        [sys.executable, str(GATE), str(folder)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "source",
    [
        SHORT,
        LONG_FUNCTION.format(doc='    """Long because: one table."""\n'),
        LONG_FILE.format(doc='"""All of it.\n\nLong because: one table.\n"""\n'),
    ],
)
def test_short_or_explained_code_passes(tmp_path: Path, source: str) -> None:
    result = run(tmp_path, source)
    assert (result.returncode, result.stdout.strip()) == (0, "")


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (LONG_FUNCTION.format(doc=""), "sample.py:1: f has 82 lines"),
        (LONG_FILE.format(doc='"""Long because:"""\n'), "sample.py: 702 lines"),
    ],
)
def test_long_code_without_a_reason_is_named(tmp_path: Path, source: str, named: str) -> None:
    result = run(tmp_path, source)
    assert result.returncode == 1
    assert named in result.stdout
