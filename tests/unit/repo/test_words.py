"""The words gate finds names that fit any value, and docstrings without a verb."""

import runpy
from pathlib import Path

import pytest

GATE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "check_words.py"))


def list_complaints(folder: Path, source: str) -> list[str]:
    path = folder / "sample.py"
    path.write_text(source)
    return [text.partition(": ")[2] for text in GATE["list_complaints"](path)]


GOOD = '''"""Batches of samples."""

class Batch:
    """Rows of samples as named columns."""

    @property
    def size(self):
        """The number of rows."""

    def drop_columns(self, names):
        """Drop columns. Raises KeyError for one that is not there."""
        for name in names:
            del self.columns[name]
'''


def test_plain_code_passes(tmp_path):
    assert list_complaints(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ('def test_sums(told):\n    """The sum of a batch."""\n', "the name 'told'"),
        ('def test_sums():\n    """Of two batches."""\n', "the docstring 'Of two batches.'"),
        ('def test_sums():\n    """As the engine does."""\n', "the docstring 'As the engine do"),
    ],
)
def test_docstring_of_a_test_may_be_a_statement_but_no_fragment(tmp_path, source, named):
    folder = tmp_path / "tests"
    folder.mkdir()
    [complaint] = list_complaints(folder, source)
    assert complaint.startswith(named)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("found = 1\n", "the name 'found'"),
        ("def compute(its): ...\n", "the name 'its'"),
        ("class A:\n    def __init__(self):\n        self._told = 1\n", "the name '_told'"),
        ("for is_asked in (): ...\n", "the name 'is_asked'"),
        ("def of_samples(): ...\n", "the function 'of_samples'"),
        ('"""What a driver does."""\n', "the docstring 'What a driver does.'"),
        ('def f():\n    """The rows of a batch."""\n', "the docstring 'The rows of a batch.'"),
        ('def f():\n    """Adds a column."""\n', "the docstring 'Adds a column.'"),
    ],
)
def test_a_riddle_is_named(tmp_path, source, named):
    [complaint] = list_complaints(tmp_path, source)
    assert complaint.startswith(named) and "; allowed: " in complaint
