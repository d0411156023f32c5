"""Roles of a job that share GPUs, on a Ray that was told of four."""

from __future__ import annotations

import contextlib
import os
import sys

import ray

from mcore_rl.config.resolve import placement_of
from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.controller.dispatch import register
from mcore_rl.controller.pool import ray_session
from mcore_rl.jobs.placement import Pools

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers import little

QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"


class Worker:
    @register()
    def environment(self) -> tuple[str, str]:
        return tuple(os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", QUEUE))


def test_each_role_gets_the_gpus_of_its_ranks_and_a_server_those_of_all_its_workers(tmp_path):
    config = RLConfig(output_dir=str(tmp_path))
    config.placement = placement_of(config)
    config.actor.layout, config.algorithm.kl_coef = Layout(tp=2, dp=2), 0.1
    config.rollout.num_servers = config.rollout.tp = 2
    servers = Layout(dp=2)
    with (
        ray_session(num_cpus=1, num_gpus=4, object_store_bytes=100 << 20, log_to_driver=False),
        Pools(config, "GPU", tmp_path) as pools,
        contextlib.ExitStack() as stack,
    ):
        gpu_ids = pools.gpu_ids("rollout")
        groups = [
            stack.enter_context(pools.group(role, Worker, (), layout, name=role, env=env))
            for role, layout, env in (
                ("actor", config.actor.layout, {QUEUE: "1"}),
                ("reference", config.actor.layout, {QUEUE: "1"}),
                ("rollout", servers, None),
            )
        ]
        actor, reference, rollout = (group.environment() for group in groups)
    assert [gpu for gpu, _ in actor] == [gpu for gpu, _ in reference]
    gpus = [gpu for gpu, _ in actor]
    assert sorted(gpus) == ["0", "1", "2", "3"]
    assert {queue for _, queue in actor + reference} == {"1"}
    assert gpu_ids == (",".join(gpus[:2]), ",".join(gpus[2:]))
    assert rollout == [(gpus[0], ""), (gpus[2], "")]
