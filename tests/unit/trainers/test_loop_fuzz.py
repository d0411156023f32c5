"""Loops over modelled servers that die, join and leave; the runs stop and are resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop_fuzz import draw_scenario, run_scenario
from tests.nightly import nightly


@pytest.mark.parametrize("seed", [*range(20), *map(nightly, range(20, 500))])
def test_a_run_of_any_loop_ends_well_or_by_one_error_that_is_allowed(tmp_path: Path, seed: int):
    """No token is too old, and no group is lost or trained twice."""
    result = run_scenario(draw_scenario(seed, tmp_path), tmp_path)
    assert result.trained or result.end
