"""Which cases of a test run each time, and which under the mark `nightly`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def all_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """For `parametrize`: `cases`, nightly but for those in `kept`. Raises for one it lacks."""
    cases = list(cases)
    if unknown := [case for case in kept if case not in cases]:
        raise ValueError(f"kept, but no case: {unknown}")
    return [case if case in kept else nightly(case) for case in cases]


def nightly(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)
