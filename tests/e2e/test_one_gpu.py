"""Groups of a job that share a GPU, on a Ray that was told of one."""

from __future__ import annotations

import contextlib
import os
import sys

import ray

from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.controller.dispatch import register
from mcore_rl.controller.pool import ray_session
from mcore_rl.jobs import rl

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers import little


class Worker:
    @register()
    def environment(self) -> tuple[str, str]:
        variables = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS")
        return tuple(os.environ.get(name, "") for name in variables)


def test_actor_reference_and_server_get_the_same_gpu_and_their_variables(monkeypatch, tmp_path):
    config = RLConfig(output_dir=str(tmp_path))
    monkeypatch.setattr(rl, "device_name", lambda: "cuda")
    shared, one = rl._SHARE_OF_ONE_DEVICE, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            ray_session(num_cpus=1, num_gpus=1, object_store_bytes=100 << 20, log_to_driver=False)
        )
        groups = [
            stack.enter_context(rl._group(config, Worker, (), Layout(), name, 1, shared, env))
            for name, env in (("actor", one), ("reference", one), ("rollout", None))
        ]
        found = [group.environment() for group in groups]
    assert found == [[("0", "1")], [("0", "1")], [("0", "")]]
