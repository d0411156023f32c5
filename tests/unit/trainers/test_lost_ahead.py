"""Training one step off where samples are lost with a node before they are trained on.

What a node had is named by group and version: samples that are generated again are of a later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mcore_rl.checkpoint.run_checkpoints import read_checkpoint
from mcore_rl.config.schema import FilterConfig, ReplayConfig
from mcore_rl.controller.stop_signals import RunStopped
from mcore_rl.data.batch import Batch
from mcore_rl.trainers import prefetch as samples_ahead
from mcore_rl.trainers import replay_buffer as replay
from mcore_rl.trainers import step_samples as samples
from tests.unit.trainers.test_one_step_off import Run, same

Made = tuple[int, int]  # a group, and the version that has generated it
DEATH = 2  # the step after whose push the node dies
# With replay a step has three new groups and three of earlier steps, but for the first one.
OLDER = [(group, 0) for group in range(9)]
NEXT = [(9, 1)]  # of 9 to 11, which wait then


class Node:
    """Its death loses nothing but `had`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost = set[Made]()
        for module in (replay, samples, samples_ahead):
            monkeypatch.setattr(module, "lost_groups", self.lost_groups)

    def lost_groups(self, batches: Sequence[Batch]) -> list[int]:
        return sorted({group for batch in batches for group, _ in self.lost & made(batch)})

    def dies(self, run: Run, had: Sequence[Made], signal: str = "") -> Run:
        def report(step, metrics):
            if step == DEATH:
                self.lost |= set(had)
                run.stop.requested = signal

        return run.train(report)


def replaying(folder: Path, save_every: int = 0) -> Run:
    policy = FilterConfig(replay=ReplayConfig(share=0.5, max_age=4, priority="uniform"))
    return Run(folder, filter=policy, save_every=save_every, prompts_per_step=6)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def made(batch: Batch) -> set[Made]:
    versions = [int(row[0]) for row in batch.jagged("weight_versions")]
    return set(zip(batch.array("group_ids").tolist(), versions, strict=True))


def trained(run: Run) -> list[list[tuple[int, int]]]:
    """Of each step: the group of each sample, and whether it is replayed."""
    pairs = [
        (u.array("group_ids").tolist(), u.array("replayed").tolist()) for u in run.actor.updates
    ]
    return [sorted(zip(*pair, strict=True)) for pair in pairs]


def test_what_is_lost_when_it_is_to_be_saved_is_generated_by_the_weights_that_servers_have(
    node: Node, tmp_path: Path
):
    """A checkpoint is saved after the push."""
    run = node.dies(Run(tmp_path, save_every=1), [(5, 1)])
    events = run.servers.events
    assert events[events.index("push 2") + 1] == "generate 4-5 of 2"
    versions = [{version for _, version in made(update)} for update in run.actor.updates]
    assert versions == [{0}, {0}, {2}, {2}, {3}]


@pytest.mark.parametrize("save_every", [0, 1], ids=["when it is taken", "when it is saved"])
def test_a_step_that_is_generated_again_replays_what_it_would_have(node, tmp_path, save_every):
    """None of its own: those that were generated first are not in the buffer any more."""
    whole = replaying(tmp_path / "whole").train()
    run = node.dies(replaying(tmp_path / "lost", save_every), NEXT)
    assert "generate 9-11 of 2" in run.servers.events
    assert trained(run) == trained(whole)
    assert not {(9, 1), (10, 1), (11, 1)} & set().union(*map(made, run.actor.updates))


def test_groups_that_are_lost_with_it_are_not_replayed_for_it(node: Node, tmp_path: Path):
    """All that is older is lost, too: the step is new, and later ones replay what came again."""
    run = node.dies(replaying(tmp_path), [*OLDER, *NEXT])
    assert made(run.actor.updates[DEATH]) == {(group, 2) for group in range(9, 15)}
    for update in run.actor.updates[DEATH + 1 :]:
        assert len(made(update)) == 6 and min(made(update)) >= (9, 2)


def test_a_run_goes_on_from_prompts_and_buffer_after_what_was_generated_again(
    node: Node, tmp_path: Path
):
    """Six prompts are drawn for it, where it had three: what is older is lost, too."""
    had = [*OLDER, *NEXT]
    whole = node.dies(replaying(tmp_path / "whole", 1), had)
    node.lost.clear()
    begun = replaying(tmp_path / "begun", 1)
    with pytest.raises(RunStopped, match="step 2 is saved"):
        node.dies(begun, had, "SIGTERM")
    again = replaying(tmp_path / "again")
    again.checkpointer.restore(read_checkpoint(tmp_path / "begun/checkpoints/step_000002"))
    again.train()
    begun.rows += again.rows
    begun.actor.updates += again.actor.updates
    same(begun, whole)
