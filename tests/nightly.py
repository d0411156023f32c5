"""Cases of a test that run each time, and cases under the mark `nightly`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def all_but(daily: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Mark cases as nightly, except the daily ones. Raises ValueError for a daily one it lacks."""
    cases = list(cases)
    if unknown := [case for case in daily if case not in cases]:
        raise ValueError(f"daily, but no case: {unknown}")
    return [case if case in daily else nightly(case) for case in cases]


def nightly(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)
