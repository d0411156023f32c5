"""The order in which roles that share devices take turns in a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.roles import ReferenceModel
from tests.fakes import LocalGroup

OFF = "reference to host"


class Group(LocalGroup):
    """Workers of a role that record their calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def to(self, place: str, *, model: bool = True):
        self.calls.append(f"{self.name} to {place}" + " but for the model" * (not model))

    has_joining, version, num_up = False, 3, 1

    def follow_desired(self) -> None: ...

    def start_asleep(self) -> None:
        self.calls.append("start asleep")
        self.num_up = 1

    def sleep(self, keep: bool) -> None:
        self.calls.append("sleep")

    def wake(self, tag: str) -> None:
        self.calls.append(f"wake {tag}")

    def push(self, version: int) -> None:
        self.calls.append(f"push {version}")

    def _score(self, batch: Batch, *, temperature: float) -> Batch:
        self.calls.append(f"{self.name} scores at {temperature}")
        return batch.with_columns(log_probs=batch.jagged("response_ids"))

    compute_log_probs = compute_reference_log_probs = _score


def share_devices(placement: dict[str, str], calls: list[str], *roles: str) -> DeviceSharing:
    """Models of these roles and servers, which share one pool unless `placement` has them apart."""
    servers: Any = Group("servers", calls)
    models: Any = {role: Group(role, calls) for role in roles}
    pools = {role: placement.get(role, "shared") for role in (*roles, "rollout")}
    pools = {role: role if pool == "own" else pool for role, pool in pools.items()}
    return DeviceSharing(pools, models, servers, servers)


def run_step(has_reference: bool, **placement: str) -> list[str]:
    """Return the calls of a step."""
    calls: list[str] = []
    roles = ("actor", "reference") if has_reference else ("actor",)
    devices = share_devices(placement, calls, *roles)
    ids = Jagged.pack([[1, 2]], np.int64)
    devices.offload_rollout()
    reference = ReferenceModel(devices, roles[-1], ModelWorker.compute_log_probs, 0.5)
    batch, _ = reference.score(Batch({"prompt_ids": ids, "response_ids": ids}))
    assert batch.jagged("reference_log_probs").values.tolist() == [1, 2]
    devices.use("actor")
    calls.append("update")
    devices.update_weights(4)
    return calls


SCORES = "reference scores at 0.5"


@pytest.mark.parametrize(
    ("placement", "order"),
    [
        (
            {},
            [
                "sleep", SCORES, OFF, "update",
                "actor to host but for the model", "wake weights", "push 4", "actor to host",
                "wake kv_cache",
            ],
        ),
        ({"actor": "own", "reference": "own", "rollout": "own"}, [SCORES, "update", "push 4"]),
        (
            {"rollout": "own"},
            [
                SCORES, OFF, "update", "push 4",
            ],
        ),
        (
            {"actor": "own"},
            [
                "sleep", SCORES, "update", OFF, "wake weights", "push 4", "wake kv_cache",
            ],
        ),
        (
            {"actor": "a", "reference": "own", "rollout": "a"},
            [
                "sleep", SCORES, "update", "actor to host but for the model",
                "wake weights", "push 4", "actor to host", "wake kv_cache",
            ],
        ),
    ],
    ids=["one pool", "pools of their own", "servers apart", "actor apart", "reference apart"],
)  # fmt: skip
def test_each_role_is_on_its_devices_in_its_turn_alone(placement, order):
    assert run_step(has_reference=True, **placement) == order


def test_an_actor_that_is_its_own_reference_scores_when_it_is_there():
    assert run_step(has_reference=False)[:3] == [
        "sleep", "actor scores at 0.5", "update",
    ]  # fmt: skip
    placement = {"actor": "own", "rollout": "own"}
    assert run_step(has_reference=False, **placement) == ["actor scores at 0.5", "update", "push 4"]


@pytest.mark.parametrize(
    ("placement", "order"),
    [
        (
            {},
            [
                "sleep", "actor to host", "learn",
                "critic to host", "actor to host but for the model",
                "wake weights", "push 4", "actor to host", "wake kv_cache",
            ],
        ),
        ({"actor": "own", "critic": "own", "rollout": "own"}, ["learn", "push 4"]),
        (
            {"critic": "own"},
            [
                "sleep", "learn", "actor to host but for the model",
                "wake weights", "push 4", "actor to host", "wake kv_cache",
            ],
        ),
        (
            {"actor": "own"},
            [
                "sleep", "learn", "critic to host", "wake weights", "push 4",
                "wake kv_cache",
            ],
        ),
    ],
    ids=["one pool", "pools of their own", "critic apart", "actor apart"],
)  # fmt: skip
def test_a_critic_has_the_devices_between_the_log_probs_and_the_update(placement, order):
    calls: list[str] = []
    devices = share_devices(placement, calls, "actor", "critic")
    devices.offload_rollout()
    devices.use("actor")
    devices.use("critic")
    calls.append("learn")
    devices.update_weights(4)
    assert calls == order


@pytest.mark.parametrize(
    ("placement", "order"),
    [
        (
            {},
            [
                "actor to host", "start asleep", "actor to host but for the model",
                "wake weights", "push 4", "actor to host",
                "wake kv_cache",
            ],
        ),
        ({"actor": "own"}, ["start asleep", "wake weights", "push 4", "wake kv_cache"]),
        ({"actor": "own", "reference": "own", "rollout": "own"}, ["push 4"]),
    ],
    ids=["one pool", "actor apart", "pools of their own"],
)  # fmt: skip
def test_servers_that_join_start_while_no_other_role_is_on_their_devices(placement, order):
    calls: list[str] = []
    devices = share_devices(placement, calls, "actor", "reference")
    devices.servers.has_joining = True
    devices.offload_rollout()
    devices.update_weights(4)
    assert [call for call in calls if call != "sleep"] == order


def test_servers_that_have_all_died_asleep_start_before_the_push():
    calls: list[str] = []
    devices = share_devices({}, calls, "actor")
    devices.servers.num_up = 0
    devices.offload_rollout()
    devices.update_weights(4)
    assert calls == [
        "sleep", "actor to host but for the model", "wake weights", "actor to host",
        "start asleep", "wake weights", "push 4", "actor to host", "wake kv_cache",
    ]  # fmt: skip


def test_weights_are_sent_again_until_the_actor_is_about_to_change():
    calls: list[str] = []
    devices = share_devices({}, calls, "actor")
    devices.resend_weights()
    assert "push 3" in calls
    assert devices.servers.resend == devices.resend_weights
    devices.disable_resend()
    assert devices.servers.resend is None


@pytest.mark.parametrize(
    ("placement", "role"),
    [
        ({}, "reference"),
        ({"actor": "own"}, "reference"),
        ({"actor": "own"}, "critic"),
        ({"actor": "own", "critic": "own"}, "reward_model"),
        ({"actor": "a", "reference": "own", "rollout": "a"}, "actor"),
    ],
    ids=["one pool", "actor apart", "critic", "reward model", "reference apart"],
)
def test_servers_sleep_once_for_the_next_role_after_all_have_died_and_joined(placement, role):
    """They die while they generate, so that they have their devices when weights are sent again."""
    calls: list[str] = []
    devices = share_devices(placement, calls, "actor", "reference", "critic", "reward_model")
    devices.servers.has_joining, devices.servers.num_up = True, 0
    devices.resend_weights()
    devices.servers.has_joining = False
    calls.clear()
    devices.use(role)
    devices.use("actor")
    assert calls.count("sleep") == 1
    devices.update_weights(4)
    assert calls.count("sleep") == 1 and calls.count("wake kv_cache") == 1


def test_servers_sleep_once_and_only_where_they_share_devices():
    for placement, order in (({}, ["sleep"]), ({"rollout": "own"}, [])):
        calls: list[str] = []
        devices = share_devices(placement, calls, "actor")
        devices.offload_rollout()
        devices.offload_rollout()
        assert calls == order
