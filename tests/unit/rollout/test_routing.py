"""Where groups go: worked by hand."""

import numpy as np

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.rollout.routing import (
    Asked,
    asked_together,
    prompts_of,
    route,
    tokens_by_server,
)

SAMPLING = SamplingParams(n=2, max_tokens=6)


def asked(group: int, num_prompt: int = 4, server: int | None = None) -> Asked:
    """Of 2 trajectories with up to 6 tokens each: 2 * (4 + 6) = 20 tokens."""
    (one,) = asked_together(prompts({group: [1] * num_prompt}), SAMPLING, "train")
    one.server = server
    return one


def prompts(ids: dict[int, list[int]]) -> Batch:
    """By group id."""
    column = Jagged.pack(list(ids.values()), np.int64)
    return Batch({"group_ids": np.array([*ids]), "prompt_ids": column})


def test_a_group_counts_its_prompt_once_a_trajectory_and_all_that_it_may_answer():
    assert asked(0).tokens == 20
    assert asked(0, num_prompt=44).tokens == 100


def test_groups_go_where_the_fewest_tokens_are_outstanding():
    groups = [asked(0, 44), asked(1), asked(2), asked(3), asked(4)]
    # 100 | 20, 40, 60, 80: the fifth still has less beside it than the first.
    assert route(groups, {3: 0, 5: 0}, {}) == [3, 5, 5, 5, 5]
    assert route(groups[1:], {3: 30, 5: 0}, {}) == [5, 5, 3, 5]


def test_an_idle_pool_shares_out_by_numbers_alone():
    groups = [asked(group) for group in range(5)]
    assert route(groups, {2: 0, 0: 0, 1: 0}, {}) == [0, 1, 2, 0, 1]


def test_a_prompt_goes_where_it_was_unless_others_are_freer_by_more_than_a_group():
    homes = {7: 1}
    assert route([asked(7)], {0: 0, 1: 20}, homes) == [1]
    assert route([asked(7)], {0: 0, 1: 21}, homes) == [0]
    assert route([asked(7)], {0: 0, 2: 0}, homes) == [0]  # it has left


def test_outstanding_tokens_are_those_of_the_servers_that_are_asked_about():
    groups = [asked(0, server=0), asked(1, server=2), asked(2, server=0), asked(3)]
    assert tokens_by_server(groups, [0, 1]) == {0: 40, 1: 0}


def test_prompts_of_groups_that_go_to_a_server_are_those_that_were_asked_for():
    first = asked_together(prompts({3: [1], 4: [2, 2], 5: [3, 3, 3]}), SAMPLING, "train")
    second = asked_together(prompts({8: [4] * 4, 9: [5] * 5}), SAMPLING, "train")
    found = prompts_of([first[0], first[2], second[1]])
    assert found.array("group_ids").tolist() == [3, 5, 9]
    assert [ids.tolist() for ids in found.jagged("prompt_ids")] == [[1], [3] * 3, [5] * 5]
    assert [one.tokens for one in (first[2], second[1])] == [2 * (3 + 6), 2 * (5 + 6)]
