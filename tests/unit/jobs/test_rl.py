"""The RL job: specs of ranks and servers, frozen servers at the end, the Ray that a run joins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from mcore_rl.config.rules import resolve_placement
from mcore_rl.config.schema import RLConfig, TimeoutsConfig
from mcore_rl.controller.object_store import estimate_sample_bytes
from mcore_rl.controller.pending_call import WorkerError
from mcore_rl.jobs import rl
from mcore_rl.jobs.rl import build_frozen_servers
from mcore_rl.jobs.run_plan import plan_run
from tests.fakes import LocalGroup


@pytest.mark.parametrize(
    ("load_format", "method", "resumes", "expected"),
    [
        ("auto", "colocated", False, "auto"),
        ("auto", "colocated", True, "dummy"),
        ("auto", "disaggregated", True, "dummy"),
        ("auto", "full_export", True, "checkpoint"),
        ("checkpoint", "disaggregated", True, "checkpoint"),
        ("dummy", "disaggregated", False, "dummy"),
    ],
)
def test_servers_of_a_resumed_run_read_no_weights_if_a_push_brings_them(
    load_format, method, resumes, expected
):
    config = RLConfig()
    config.rollout.load_format, config.weight_sync.method = load_format, method
    assert rl.choose_load_format(config, resumes=resumes) == expected


class Group:
    def close(self):
        """Do nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Pools:
    """Keeps the specs that groups are made from."""

    def __init__(self):
        self.specs = []

    def get_gpu_ids(self, role):
        return ()

    def group(self, role, worker, args, layout, **options):
        self.specs.append(args[0])
        return Group()


def test_ranks_and_servers_wait_longer_inside_than_the_driver_does():
    """So the driver, which sees all of them, is the one that tells who is stuck."""
    config = RLConfig(timeouts=TimeoutsConfig(start_s=500, call_s=400))
    config.weight_sync.timeout_s, config.placement = 300, resolve_placement(config)
    pools, plan = Pools(), plan_run(config)
    with rl.build_server_pool(config, plan, pools):
        pass
    assert [spec.timeout_s for spec in (*pools.specs, plan["actor"].spec)] == [560, 560]


class MortalGroup(LocalGroup):
    """A group whose shut-down fails if it has died."""

    def __init__(self, name: str, is_dead: bool) -> None:
        self.name, self.is_dead, self.calls = name, is_dead, list[str]()

    def shut_down(self) -> None:
        self.calls.append("shut_down")
        if self.is_dead:
            raise WorkerError(f"{self.name}.shut_down: rank 0 died")


class MortalPools:
    def __init__(self) -> None:
        self.groups = list[MortalGroup]()

    @contextmanager
    def group(self, role: str, *_: Any, **__: Any) -> Iterator[MortalGroup]:
        self.groups.append(MortalGroup(role, is_dead=role == "models.user"))
        yield self.groups[-1]
        self.groups[-1].calls.append("closed")


def test_frozen_server_that_died_is_reported_and_no_error_at_the_end(capsys):
    config, pools = RLConfig(), MortalPools()
    config.model.path = "/models/one"
    config.models = {"user": {"num_servers": 2}, "judge": {}}
    with build_frozen_servers(config, plan_run(config), pools) as servers:  # type: ignore[arg-type]
        assert [*servers.groups] == ["user", "judge"]
    assert [group.calls[0] for group in pools.groups] == ["shut_down"] * 2
    assert capsys.readouterr().out == "models.user.shut_down: rank 0 died\n"


PrintSession = Callable[..., str]


@pytest.fixture
def config() -> RLConfig:
    """Eight servers of a device each: two nodes of four devices have half of the samples each."""
    config = RLConfig()
    config.rollout.num_servers = 8
    config.trainer.prompts_per_step = 4096
    return config


@pytest.fixture
def half(config: RLConfig) -> int:
    return (estimate_sample_bytes(config) + 1) // 2


@pytest.fixture
def print_session(
    config: RLConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> PrintSession:
    """print_session(nodes) is what a session of a Ray with these nodes prints."""

    def run_session(nodes: list[dict[str, Any]], address: str = "10.0.0.1:20000") -> str:
        monkeypatch.setattr(rl, "get_device_resource", lambda: "GPU")
        monkeypatch.setattr(rl, "ray_session", lambda **_: contextlib.nullcontext())
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setenv("RAY_ADDRESS", address)
        with rl.open_session(config, 8, Path("/tmp")):
            return capsys.readouterr().out

    return run_session


def node(name: str, store: int, devices: int = 4, *, alive: bool = True) -> dict[str, Any]:
    """Return an entry of ray.nodes()."""
    resources = {"CPU": 1.0, "object_store_memory": float(store)}
    if devices:
        resources["GPU"] = float(devices)
    return {"NodeName": name, "Alive": alive, "Resources": resources if alive else {}}


def test_small_object_stores_of_a_joined_ray_are_reported_once(print_session, half):
    nodes = [node("n1", 512 << 20), node("n2", half - 1), node("n3", half)]
    out = print_session(
        [*nodes, node("head", 1 << 20, devices=0), node("gone", 1 << 20, alive=False)]
    )
    assert out.count("\n") == 1
    assert out.startswith("Ray's object store has 512 MiB on n1, n2; a node with servers may hold")
    assert f"samples of {half / 2**20:,.0f} MiB" in out and "spilled to disk" in out
    assert f"MCORE_RL_OBJECT_STORE_BYTES={half} " in out


def test_report_names_a_few_of_many_nodes_with_small_stores(print_session):
    out = print_session([node(f"n{number}", 512 << 20) for number in range(1, 33)])
    assert "on n1, n2, n3, n4 and 28 more nodes; " in out


def test_large_and_private_object_stores_are_not_reported(print_session, half):
    assert print_session([node("n1", half), node("n2", half)]) == ""
    assert print_session([node("n1", 1 << 20), node("n2", 1 << 20)], address="") == ""
