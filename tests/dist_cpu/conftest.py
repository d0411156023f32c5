"""Ranks are started once and serve every file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import ranks


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks with their lane. The threads of their groups poll, which slows others down.

    (A fixture of the package would end with the session: the folder is no package to pytest.)
    """
    if nextitem is None or not nextitem.get_closest_marker("ranks"):
        ranks.dismiss()
    if nextitem is None or nextitem.path != item.path:
        ranks.forget_results()
