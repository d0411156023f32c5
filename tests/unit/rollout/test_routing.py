"""Routing of groups to servers, worked out by hand."""

import numpy as np
import pytest

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.rollout.routing import (
    GroupRouter,
    OutstandingTokens,
    PendingGroup,
    gather_prompts,
    route_groups,
    split_prompts,
)
from tests.operations import growth

SAMPLING = SamplingParams(n=2, max_tokens=6)


def make_group(group_id: int, num_prompt: int = 4, server: int | None = None) -> PendingGroup:
    """Make a group of 2 trajectories with up to 6 tokens each: 2 * (4 + 6) = 20 tokens."""
    (group,) = split_prompts(make_prompts({group_id: [1] * num_prompt}), SAMPLING, "train")
    group.server = server
    return group


def route(groups, tokens, last_servers):
    return route_groups(groups, OutstandingTokens(tokens), last_servers)


def make_prompts(ids: dict[int, list[int]]) -> Batch:
    column = Jagged.pack(list(ids.values()), np.int64)
    return Batch({"group_ids": np.array([*ids]), "prompt_ids": column})


def test_tokens_of_a_group_are_prompt_and_longest_response_of_each_trajectory():
    assert make_group(0).max_tokens == 20
    assert make_group(0, num_prompt=44).max_tokens == 100


def test_groups_go_where_the_fewest_tokens_are_outstanding():
    groups = [make_group(0, 44), make_group(1), make_group(2), make_group(3), make_group(4)]
    # Server 3 has 100; server 5 has 20, 40, 60, 80, still fewer than 100.
    assert route(groups, {3: 0, 5: 0}, {}) == [3, 5, 5, 5, 5]
    assert route(groups[1:], {3: 30, 5: 0}, {}) == [5, 5, 3, 5]


def test_an_idle_pool_is_filled_by_server_number():
    groups = [make_group(group) for group in range(5)]
    assert route(groups, {2: 0, 0: 0, 1: 0}, {}) == [0, 1, 2, 0, 1]


def test_a_prompt_returns_to_its_server_unless_another_has_fewer_tokens_by_more_than_a_group():
    last_servers = {7: 1}
    assert route([make_group(7)], {0: 0, 1: 20}, last_servers) == [1]
    assert route([make_group(7)], {0: 0, 1: 21}, last_servers) == [0]
    assert route([make_group(7)], {0: 0, 2: 0}, last_servers) == [0]  # its server has left


def test_each_group_goes_where_the_fewest_tokens_are_outstanding_at_its_turn():
    rng = np.random.default_rng(0)
    groups = [make_group(group, int(rng.integers(1, 60))) for group in range(200)]
    last_servers = {group: int(rng.integers(0, 9)) for group in range(0, 200, 3)}
    tokens = {server: int(rng.integers(0, 400)) for server in range(8)}
    servers, largest = route(groups, tokens, last_servers), max(g.max_tokens for g in groups)
    for group, server in zip(groups, servers, strict=True):
        least = min(tokens, key=lambda number: (tokens[number], number))
        last = last_servers.get(group.group_id, least)
        may_return = last in tokens and tokens[last] <= tokens[least] + largest
        assert server == (last if may_return else least)
        tokens[server] += group.max_tokens


def test_tokens_of_groups_that_end_make_room_on_their_server():
    rng = np.random.default_rng(0)
    tokens = {server: int(rng.integers(0, 400)) for server in range(8)}
    outstanding = OutstandingTokens(tokens)
    for _ in range(500):
        server, num = int(rng.integers(0, 9)), int(rng.integers(-30, 30))
        outstanding.add(server, num)  # there is no server 8
        if server in tokens:
            tokens[server] += num
        least = min(tokens, key=lambda number: (tokens[number], number))
        assert outstanding.find_least() == least


def test_operations_of_a_group_grow_less_than_the_number_of_servers():
    def route_one_at_a_time(num: int) -> None:
        outstanding = OutstandingTokens(dict.fromkeys(range(num), 0))
        groups = [make_group(group, int(lengths[group])) for group in range(4)]
        for index in range(num):
            group = groups[index % 4]
            [server] = route_groups([group], outstanding, {group.group_id: index % 8})
            outstanding.add(server, -group.max_tokens)

    lengths = np.random.default_rng(0).integers(1, 60, 4)
    assert growth(route_one_at_a_time, 32, 512) < 1.3


def test_gathered_prompts_are_those_of_the_groups():
    first = split_prompts(make_prompts({3: [1], 4: [2, 2], 5: [3, 3, 3]}), SAMPLING, "train")
    second = split_prompts(make_prompts({8: [4] * 4, 9: [5] * 5}), SAMPLING, "train")
    prompts = gather_prompts([first[0], first[2], second[1]])
    assert prompts.array("group_ids").tolist() == [3, 5, 9]
    assert [ids.tolist() for ids in prompts.jagged("prompt_ids")] == [[1], [3] * 3, [5] * 5]
    assert [group.max_tokens for group in (first[2], second[1])] == [2 * (3 + 6), 2 * (5 + 6)]


def begin(router: GroupRouter, *groups: int, stream: str = "train") -> None:
    router.begin(make_prompts({group: [1] * 4 for group in groups}), SAMPLING, stream)


def list_routes(router: GroupRouter) -> list[tuple[int, str, list[int]]]:
    """Route; return server, stream and ids of the groups that begin together."""
    routes = router.route()
    return [(num, groups[0].stream, [g.group_id for g in groups]) for num, groups in routes]


def test_groups_wait_until_there_are_servers_and_begin_with_those_of_their_stream():
    router = GroupRouter()
    begin(router, 0, 1, 2)
    begin(router, 0, stream="evaluation")
    assert router.route() == [] and router.count("train") == 3
    router.set_servers([4, 6])
    assert list_routes(router) == [(4, "train", [0, 2]), (6, "train", [1]), (6, "evaluation", [0])]
    assert router.route() == []
    assert [*router.get_groups(4, "train")] == [0, 2]
    assert router.list_streams(6) == ["train", "evaluation"]


def test_a_group_that_is_pending_in_its_stream_is_refused():
    router = GroupRouter()
    begin(router, 5)
    begin(router, 5, stream="evaluation")
    for ids in ([3, 5], [3, 3]):
        with pytest.raises(ValueError, match="would be generated twice at once"):
            router.begin(Batch.concat([make_prompts({i: [1]}) for i in ids]), SAMPLING, "train")
    router.remove("train", 5)
    begin(router, 3, 5)
    assert router.count("train") == 2


def test_groups_of_a_server_that_has_ended_go_to_others_in_their_order_and_are_listed_once():
    router = GroupRouter()
    router.set_servers([0, 1])
    begin(router, 9, 8, 7, 6)
    assert list_routes(router) == [(0, "train", [9, 7]), (1, "train", [8, 6])]
    router.release(1)
    router.set_servers([0])
    begin(router, 5)
    assert router.pop_rerouted("train") == []  # they wait
    assert list_routes(router) == [(0, "train", [8, 6, 5])]
    router.remove("train", 6)  # collected before somebody reads the list
    assert router.pop_rerouted("evaluation") == []
    assert router.pop_rerouted("train") == [8] and router.pop_rerouted("train") == []


def test_tokens_of_removed_groups_make_room_and_those_of_pending_ones_count_for_new_servers():
    router = GroupRouter()
    router.set_servers([0, 1])
    begin(router, 0, 1, 2, 3)
    router.route()
    router.remove("train", 1)
    router.remove("train", 3)
    begin(router, 4, 5)
    assert list_routes(router) == [(1, "train", [4, 5])]
    router.remove("train", 4)
    router.set_servers([0, 1, 2])  # with 2, 1 and 0 groups
    begin(router, 6, 7, 8)
    assert list_routes(router) == [(2, "train", [6, 8]), (1, "train", [7])]


def test_a_group_that_waits_may_be_removed():
    router = GroupRouter()
    begin(router, 0, 1)
    assert router.remove("train", 0).server is None
    router.set_servers([0])
    assert list_routes(router) == [(0, "train", [1])]


def test_a_prompt_returns_to_its_server_until_caches_are_of_other_weights():
    router = GroupRouter()
    router.set_servers([0, 1])
    begin(router, 0, 1)
    router.route()
    for is_cached in (True, False):
        router.remove("train", 0)
        router.remove("train", 1)
        if not is_cached:
            router.clear_last_servers()
        begin(router, 1, 0)
        assert list_routes(router)[0] == (int(is_cached), "train", [1])
