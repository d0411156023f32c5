"""Walks through the package: files from an entry function to a goal, which a reader enters."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

COUNT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "count_walks.py"))
WALKS = COUNT["WALKS"]


@pytest.fixture(scope="module")
def package() -> Any:
    return COUNT["Package"]()


@pytest.mark.job
@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.name)
def test_a_walk_leads_to_its_goals(package, walk):
    """Else a call on it cannot be followed, by an editor neither."""
    files = COUNT["list_files"](package, walk.legs, walk.declares)
    assert len(files) > 1
    assert all((COUNT["ROOT"] / COUNT["PACKAGE"] / file).is_file() for file in files)


def test_a_chain_goes_on_through_protocols_workers_and_registries(package):
    loss = COUNT["list_functions"](package, "cli.main:main", "algorithms.losses:ppo_clip")
    assert loss["trainers.sync:SyncTrainer.train"] < loss["engine.worker:ModelWorker.update"]
    turn = "agents.runner:AgentRunner._run", "inference.vllm.server:VLLMServer._generate"
    assert "agents.session:ChatSession.sample" in COUNT["list_functions"](package, *turn)
    files = COUNT["list_files"](package, [turn])
    assert "inference/protocol.py" in files  # declares Generator


def test_functions_beside_the_chain_are_no_part_of_it(package):
    loss = COUNT["list_functions"](package, "cli.main:main", "algorithms.losses:ppo_clip")
    assert "trainers.device_sharing:DeviceSharing.update_weights" not in loss


@pytest.mark.parametrize(
    ("entry", "goal", "message"),
    [
        ("cli.main:main", "cli.main:gone", "cli.main:gone is no function of the package"),
        ("cli.gone:main", "cli.main:main", "cli.gone:main is no function of the package"),
        ("algorithms.losses:ppo_clip", "cli.main:main", "no chain of calls leads from algorithms"),
    ],
)
def test_a_walk_that_breaks_is_an_error(package, entry, goal, message):
    with pytest.raises(SystemExit, match=message):
        COUNT["list_functions"](package, entry, goal)
