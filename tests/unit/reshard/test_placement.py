"""Which generation rank goes to which training rank when not all pairs are allowed."""

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.placement import most_overlap

OVERLAP = np.array([[0, 9, 5], [0, 8, 1]])  # [generation ranks, training ranks]


def test_all_pairs_are_allowed_unless_told():
    assert most_overlap(OVERLAP) == (2, 1)  # 5 + 8 is more than 9 + 1


def test_ranks_stay_where_they_may_even_if_nothing_overlaps():
    """The second generation rank runs where only training rank 0 does."""
    allowed = np.array([[False, True, True], [True, False, False]])
    assert most_overlap(OVERLAP, allowed=allowed) == (1, 0)


def test_a_place_with_too_few_training_ranks_is_an_error_that_names_the_rank():
    allowed = np.array([[True, False, False], [True, False, False]])
    with pytest.raises(ConfigError, match=r"generation rank [01] runs where there are fewer"):
        most_overlap(OVERLAP, allowed=allowed)


def test_no_overlap_is_worth_a_pair_that_is_not_allowed():
    overlap = np.array([[9, 0], [2, 1]])
    allowed = np.array([[True, True], [True, False]])
    assert most_overlap(overlap, allowed=allowed) == (1, 0)
