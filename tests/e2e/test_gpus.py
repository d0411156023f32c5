"""Roles of a job that share GPUs, on a Ray that was told of four."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_placement
from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.controller.dispatch import register
from mcore_rl.controller.ray_patches import skip_node_services
from mcore_rl.controller.ray_session import has_gpus, ray_session
from mcore_rl.jobs import placement
from mcore_rl.jobs.placement import Pools
from mcore_rl.jobs.run_plan import plan_run

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers import little

QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"


class Worker:
    @register()
    def environment(self) -> tuple[str, str]:
        return tuple(os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", QUEUE))


def test_each_role_gets_the_gpus_of_its_ranks_and_a_server_those_of_all_its_workers(tmp_path):
    config = RLConfig(output_dir=str(tmp_path))
    config.placement = resolve_placement(config)
    config.actor.layout, config.algorithm.kl_coef = Layout(tp=2, dp=2), 0.1
    config.rollout.num_servers = config.rollout.tp = 2
    servers = Layout(dp=2)
    with (
        ray_session(num_cpus=1, num_gpus=4, object_store_bytes=100 << 20, log_to_driver=False),
        Pools(plan_run(config), "GPU", config.timeouts, tmp_path) as pools,
        contextlib.ExitStack() as stack,
    ):
        gpu_ids = pools.get_gpu_ids("rollout")
        groups = [
            stack.enter_context(pools.group(role, Worker, (), layout, name=role, env=env))
            for role, layout, env in (
                ("actor", config.actor.layout, {QUEUE: "1"}),
                ("reference", config.actor.layout, {QUEUE: "1"}),
                ("rollout", servers, None),
            )
        ]
        actor, reference, rollout = (group.call(Worker.environment) for group in groups)
    assert [gpu for gpu, _ in actor] == [gpu for gpu, _ in reference]
    gpus = [gpu for gpu, _ in actor]
    assert sorted(gpus) == ["0", "1", "2", "3"]
    assert {queue for _, queue in actor + reference} == {"1"}
    assert gpu_ids == (",".join(gpus[:2]), ",".join(gpus[2:]))
    assert rollout == [(gpus[0], ""), (gpus[2], "")]


@pytest.fixture
def cluster_without_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster whose head has no GPU, at RAY_ADDRESS."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    common = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 << 20}
    with skip_node_services():
        cluster = Cluster(True, head_node_args=common | {"include_dashboard": False})
        try:
            monkeypatch.setenv("RAY_ADDRESS", cluster.address)
            has_gpus.cache_clear()
            yield cluster
        finally:
            cluster.shutdown()
            has_gpus.cache_clear()


def test_nodes_with_gpus_decide_the_device_type_and_not_the_drivers(
    cluster_without_gpus, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # of the driver's node
    assert (placement.detect_device_type(), placement.get_device_resource()) == ("cpu", "rank")
    has_gpus.cache_clear()
    cluster_without_gpus.add_node(num_cpus=1, num_gpus=2, object_store_memory=100 << 20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (placement.detect_device_type(), placement.get_device_resource()) == ("cuda", "GPU")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("RANK", "0")
    assert placement.detect_device_type() == "cpu"  # torchrun's ranks are here
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("RAY_ADDRESS")
    assert placement.detect_device_type() == "cpu"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379"])
def test_a_cluster_that_does_not_answer_decides_no_device_type(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"^RAY_ADDRESS is '{address}', where no Ray cluster ans"):
        placement.detect_device_type()
