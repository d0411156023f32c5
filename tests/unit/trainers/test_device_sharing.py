"""The order in which roles that share devices take turns in a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mcore_rl.config.schema import PlacementConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.trainers.device_sharing import Turns

OFF = "reference to host"


class Group:
    """Says what it is asked to `told`."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def with_next(self, method: str, place: str) -> None:
        getattr(self, method)(place)

    def to(self, place: str, *, model: bool = True, optimizer: bool = True, grad: bool = True):
        parts = ", the model alone" * (model and not optimizer and not grad)
        self.told.append(f"{self.name} to {place}" + " but for the model" * (not model) + parts)

    has_joining, version, num_up = False, 3, 1

    def follow_wanted(self) -> None: ...

    def start_asleep(self) -> None:
        self.told.append("start asleep")
        self.num_up = 1

    def sleep(self, keep: bool) -> None:
        self.told.append("sleep")

    def wake(self, tag: str) -> None:
        self.told.append(f"wake {tag}")

    def push(self, version: int) -> None:
        self.told.append(f"push {version}")

    def _scored(self, batch: Batch, *, temperature: float) -> Batch:
        self.told.append(f"{self.name} scores at {temperature}")
        return batch.with_columns(log_probs=batch.jagged("response_ids"))

    compute_log_probs = compute_reference_log_probs = _scored


def a_step(has_reference: bool, **placement: str) -> list[str]:
    """What is asked of whom in a step."""
    told: list[str] = []
    actor, reference = Group("actor", told), Group("reference", told)
    servers: Any = Group("servers", told)
    chosen = PlacementConfig(**{"rollout": "shared"} | placement)
    models = {"actor": actor} | ({"reference": reference} if has_reference else {})
    turns = Turns(chosen, models, servers, servers)
    ids = Jagged.pack([[1, 2]], np.int64)
    turns.stop_serving()
    batch = turns.with_reference_log_probs(Batch({"prompt_ids": ids, "response_ids": ids}), 0.5)
    assert batch.jagged("reference_log_probs").values.tolist() == [1, 2]
    turns.begin_training()
    told.append("update")
    turns.serve(4)
    return told


SCORES = "reference scores at 0.5"


@pytest.mark.parametrize(
    ("placement", "order"),
    [
        (
            {},
            [
                "sleep", "reference to device", SCORES, OFF, "actor to device", "update",
                "actor to host but for the model", "wake weights", "push 4", "actor to host",
                "wake kv_cache",
            ],
        ),
        ({"actor": "own", "reference": "own", "rollout": "own"}, [SCORES, "update", "push 4"]),
        (
            {"rollout": "own"},
            [
                "reference to device", SCORES, OFF, "actor to device", "update",
                "actor to host but for the model", "push 4", "actor to host",
            ],
        ),
        (
            {"actor": "own"},
            [
                "sleep", "reference to device", SCORES, OFF, "update", "wake weights", "push 4",
                "wake kv_cache",
            ],
        ),
        (
            {"actor": "a", "reference": "own", "rollout": "a"},
            [
                "sleep", SCORES, "actor to device", "update", "actor to host but for the model",
                "wake weights", "push 4", "actor to host", "wake kv_cache",
            ],
        ),
    ],
    ids=["one pool", "pools of their own", "servers apart", "actor apart", "reference apart"],
)  # fmt: skip
def test_each_role_is_on_its_devices_in_its_turn_alone(placement, order):
    assert a_step(has_reference=True, **placement) == order


def test_an_actor_that_is_its_own_reference_scores_when_it_is_there():
    assert a_step(has_reference=False)[:5] == [
        "sleep", "actor to device", "actor scores at 0.5", "actor to device", "update",
    ]  # fmt: skip
    own = {"actor": "own", "rollout": "own"}
    assert a_step(has_reference=False, **own) == ["actor scores at 0.5", "update", "push 4"]


@pytest.mark.parametrize(
    ("placement", "order"),
    [
        (
            {},
            [
                "sleep", "actor to device", "actor to host", "critic to device", "learn",
                "critic to host", "actor to device", "actor to host but for the model",
                "wake weights", "push 4", "actor to host", "wake kv_cache",
            ],
        ),
        ({"actor": "own", "critic": "own", "rollout": "own"}, ["learn", "push 4"]),
        (
            {"critic": "own"},
            [
                "sleep", "actor to device", "learn", "actor to host but for the model",
                "wake weights", "push 4", "actor to host", "wake kv_cache",
            ],
        ),
        (
            {"actor": "own"},
            [
                "sleep", "critic to device", "learn", "critic to host", "wake weights", "push 4",
                "wake kv_cache",
            ],
        ),
    ],
    ids=["one pool", "pools of their own", "critic apart", "actor apart"],
)  # fmt: skip
def test_a_critic_has_the_devices_between_the_log_probs_and_the_update(placement, order):
    told: list[str] = []
    servers: Any = Group("servers", told)
    models: Any = {"actor": Group("actor", told), "critic": Group("critic", told)}
    turns = Turns(PlacementConfig(**{"rollout": "shared"} | placement), models, servers, servers)
    turns.stop_serving()
    turns.begin_training()
    with turns.critic_on_device() as critic:
        assert critic is models["critic"]
        told.append("learn")
    turns.serve(4)
    assert told == order


@pytest.mark.parametrize(
    ("placement", "order"),
    [
        (
            {},
            [
                "actor to host", "start asleep", "actor to device, the model alone",
                "actor to host but for the model", "wake weights", "push 4", "actor to host",
                "wake kv_cache",
            ],
        ),
        ({"actor": "own"}, ["start asleep", "wake weights", "push 4", "wake kv_cache"]),
        ({"actor": "own", "reference": "own", "rollout": "own"}, ["push 4"]),
    ],
    ids=["one pool", "actor apart", "pools of their own"],
)  # fmt: skip
def test_servers_that_join_start_while_no_other_role_is_on_their_devices(placement, order):
    told: list[str] = []
    servers: Any = Group("servers", told)
    servers.has_joining = True
    models: Any = {"actor": Group("actor", told), "reference": Group("reference", told)}
    turns = Turns(PlacementConfig(**{"rollout": "shared"} | placement), models, servers, servers)
    turns.serve(4)
    assert told == order


def test_servers_that_have_all_died_asleep_start_before_the_push():
    told: list[str] = []
    servers: Any = Group("servers", told)
    servers.num_up = 0
    models: Any = {"actor": Group("actor", told)}
    Turns(PlacementConfig(rollout="shared"), models, servers, servers).serve(4)
    assert told == [
        "actor to host but for the model", "wake weights",
        "actor to host", "start asleep", "actor to device, the model alone", "wake weights",
        "push 4", "actor to host", "wake kv_cache",
    ]  # fmt: skip


def test_the_version_that_was_served_is_sent_again_from_the_device():
    told: list[str] = []
    servers: Any = Group("servers", told)
    models: Any = {"actor": Group("actor", told)}
    turns = Turns(PlacementConfig(rollout="shared"), models, servers, servers)
    turns.serve_again()
    assert told[0] == "actor to device" and "push 3" in told
    assert servers.resend == turns.serve_again
    turns.keep_actor()
    assert servers.resend is None
