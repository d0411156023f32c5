"""A tree of turns as samples, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.agents.session import Turn, VersionSpan, count_routed_tokens
from mcore_rl.agents.trajectory import assign_turn_rewards, build_samples
from mcore_rl.data.batch import Batch
from mcore_rl.data.sample import RoutedExperts, Sample, TurnSpan

# 1 begins a message, 2 ends it; 5x the system and user, 6x the tool, 7x sampled.
CALL = Turn(
    "s", "call", "", (1, 50, 2, 1), (70, 71, 2), (-0.1, -0.2, -0.3), (VersionSpan(3, 0, 3),), "stop"
)
# After the tool's answer; the weights change within, and it is cut off: there is no 2.
CUT = Turn(
    "s", "cut", "call", (*CALL.prompt_ids, *CALL.token_ids, 1, 60, 2, 1),
    (72, 73), (-0.4, -0.5), (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)), "length",
    token_rewards=(0.0, 0.25),
)  # fmt: skip
# A user goes on: the 2 that was not sampled is in the prompt.
LAST = Turn(
    "s", "last", "cut", (*CUT.prompt_ids, *CUT.token_ids, 2, 1, 51, 2, 1),
    (74, 2), (-0.6, -0.7), (VersionSpan(4, 0, 2),), "stop",
)  # fmt: skip
# Another answer of the tool to the same call.
BRANCH = Turn(
    "s", "branch", "call", (*CALL.prompt_ids, *CALL.token_ids, 1, 61, 2, 1),
    (75, 2), (-0.8, -0.9), (VersionSpan(3, 0, 2),), "stop",
)  # fmt: skip
# A prompt that was rendered anew, without the call.
ANEW = Turn("s", "anew", "last", (1, 52, 2, 1), (76,), (-1.0,), (VersionSpan(5, 0, 1),), "length")


def samples(*turns: Turn) -> list[Sample]:
    return build_samples(turns, trajectory=3, group_id=8, reward=1.5, status="finished")


def test_three_turns_with_a_tool_a_branch_and_a_cut():
    long, branch, anew = samples(CALL, CUT, LAST, BRANCH, ANEW)
    assert long == Sample(
        prompt_ids=[1, 50, 2, 1],
        #             call       tool          cut     close and user    last
        response_ids=[70, 71, 2, 1, 60, 2, 1, 72, 73, 2, 1, 51, 2, 1, 74, 2],
        response_mask=[1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1],
        rollout_log_probs=[-0.1, -0.2, -0.3, 0, 0, 0, 0, -0.4, -0.5, 0, 0, 0, 0, 0, -0.6, -0.7],
        weight_versions=[3, 3, 3, -1, -1, -1, -1, 3, 4, -1, -1, -1, -1, -1, 4, 4],
        process_rewards=[0, 0, 0, 0, 0, 0, 0, 0, 0.25, 0, 0, 0, 0, 0, 0, 0],
        turn_spans=(
            TurnSpan("call", 0, 3),
            TurnSpan("cut", 7, 9),
            TurnSpan("last", 14, 16),
        ),
        finish_reason="stop",
        group_id=8,
        reward=1.5,
        trajectory=3,
        segment=0,
    )
    assert branch.response_ids == [70, 71, 2, 1, 61, 2, 1, 75, 2]
    assert branch.response_mask == [0, 0, 0, 0, 0, 0, 0, 1, 1]  # the call is trained above
    assert branch.rollout_log_probs == [0, 0, 0, 0, 0, 0, 0, -0.8, -0.9]
    assert branch.weight_versions == [-1, -1, -1, -1, -1, -1, -1, 3, 3]
    assert branch.turn_spans == (TurnSpan("call", 0, 3), TurnSpan("branch", 7, 9))
    assert (anew.prompt_ids, anew.response_ids, anew.response_mask) == ([1, 52, 2, 1], [76], [1])
    assert [s.segment for s in (long, branch, anew)] == [0, 1, 2]
    assert {(s.trajectory, s.group_id, s.reward) for s in (long, branch, anew)} == {(3, 8, 1.5)}


def routed(turn: Turn, start: int) -> Turn:
    """Add experts from a token on, as a server records them: none of the last token."""
    num_tokens = len(turn.prompt_ids) + len(turn.token_ids) - 1 - start
    ids = np.full((num_tokens, 1, 1), len(turn.prompt_ids), np.uint8)
    return replace(turn, routed_experts=RoutedExperts(start, ids))


def test_each_token_has_the_experts_of_the_turn_that_ran_it_first():
    """Though a turn runs all of its prompt, and with other weights when an update came between."""
    call, cut, last = routed(CALL, 0), routed(CUT, 6), routed(LAST, 12)
    branch, anew = routed(BRANCH, 6), routed(ANEW, 0)
    long, side, new = samples(call, cut, last, branch, anew)
    assert long.routed_experts == tuple(t.routed_experts for t in (call, cut, last))
    assert side.routed_experts == tuple(t.routed_experts for t in (call, branch))
    assert new.routed_experts == (anew.routed_experts,)
    for sample in (long, side, new):
        starts = [part.start for part in sample.routed_experts]
        ends = np.cumsum([len(part.ids) for part in sample.routed_experts]).tolist()
        assert [0, *ends[:-1]] == starts
        assert ends[-1] == len(sample.prompt_ids) + len(sample.response_ids) - 1


def test_a_turn_asks_for_the_experts_that_earlier_turns_do_not_have():
    call, cut = routed(CALL, 0), routed(CUT, 6)
    empty = replace(CUT, token_ids=(), log_probs=(), weight_versions=(), token_rewards=())
    assert count_routed_tokens(CALL.prompt_ids, []) == 0
    assert count_routed_tokens(CUT.prompt_ids, [call]) == 4 + 3 - 1
    assert count_routed_tokens(LAST.prompt_ids, [call, cut]) == 11 + 2 - 1
    assert count_routed_tokens(ANEW.prompt_ids, [call, cut]) == 0  # it was rendered anew
    # A turn that was ended before its first token has none; those of the call stay.
    assert count_routed_tokens((*CUT.prompt_ids, 9), [call, empty]) == 6


def test_a_turn_is_paid_once_at_its_last_token_in_the_sample_that_trains_it():
    empty = replace(ANEW, turn_id="empty", token_ids=(), log_probs=(), weight_versions=())
    turns = [CALL, CUT, LAST, BRANCH, ANEW, empty]
    made = samples(*turns)
    assign_turn_rewards(made, turns, [1.0, 0.5, 0.0, 2.0, 3.0, 9.0])
    assert [sample.process_rewards for sample in made] == [
        [0, 0, 1, 0, 0, 0, 0, 0, 0.75, 0, 0, 0, 0, 0, 0, 0],  # with the 0.25 of a token
        [0, 0, 0, 0, 0, 0, 0, 0, 2],
        [3],
        [],
    ]


def test_each_sampled_token_is_trained_once():
    turns = [CALL, CUT, LAST, BRANCH, ANEW, replace(BRANCH, turn_id="again")]
    masks = sum(sum(sample.response_mask) for sample in samples(*turns))
    assert masks == sum(len(turn.token_ids) for turn in turns)


@given(st.integers(0, 2**32))
def test_each_token_of_any_tree_is_trained_once_with_its_own_numbers(seed: int):
    """Token i has the log-prob -i and the version i: every turn has tokens of its own."""
    chance, turns, token = Random(seed), [], 100
    for number in range(chance.randrange(1, 9)):
        parent = chance.choice([None, *turns])
        before = (1,) if parent is None else (*parent.prompt_ids, *parent.token_ids, 2)
        if chance.random() < 0.3:
            before = before[chance.randrange(len(before)) :]  # cannot be extended
        made = tuple(range(token, token + chance.randrange(4)))
        token += len(made)
        spans = tuple(VersionSpan(i, n, n + 1) for n, i in enumerate(made))
        name = "" if parent is None else parent.turn_id
        log_probs = tuple(-float(i) for i in made)
        turns.append(Turn("s", str(number), name, before, made, log_probs, spans, "stop"))
    trained = [
        (token_id, log_prob, version)
        for sample in samples(*turns)
        for token_id, mask, log_prob, version in zip(
            sample.response_ids,
            sample.response_mask,
            sample.rollout_log_probs,
            sample.weight_versions,
            strict=True,
        )
        if mask
    ]
    assert sorted(trained) == [(i, -i, i) for i in range(100, token)]


def test_samples_are_rows_of_a_batch():
    batch = Batch.collate(samples(CALL, CUT, LAST, BRANCH))
    assert batch.jagged("response_mask").lengths.tolist() == [16, 9]


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ((CUT,), "turn 'cut' comes before its parent 'call'"),
        ((CALL, CALL), "turn_id 'call' is empty or comes twice"),
    ],
)
def test_a_tree_that_is_none_is_refused(turns: tuple[Turn, ...], words: str):
    with pytest.raises(ValueError, match=words):
        samples(*turns)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"log_probs": (-0.1,)}, "has 1 log_probs for 3 tokens"),
        ({"token_rewards": (1.0,)}, "has 1 token_rewards for 3 tokens"),
        ({"weight_versions": (VersionSpan(3, 0, 2),)}, "cover each token once"),
        (
            {"weight_versions": (VersionSpan(3, 0, 2), VersionSpan(4, 1, 3))},
            "cover each token once",
        ),
    ],
)
def test_a_turn_with_parts_of_other_lengths_is_refused(change: dict[str, object], words: str):
    with pytest.raises(ValueError, match=words):
        replace(CALL, **change)
