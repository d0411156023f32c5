"""Time of the driver for one call of a group of thousands of ranks.

    python benchmarks/gather_replies.py [--ranks 1024 4096]

`split_s` is for a batch of a sample a rank. One Ray actor stands for all ranks, and its own time is
in `gather_s`; `gather_stored_s` is for replies that are in the object store already.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial

import numpy as np
import ray

from mcore_rl.config.schema import Layout
from mcore_rl.controller.dispatch import Dispatch
from mcore_rl.controller.pending_call import PendingCall, Timeout
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.worker_group import send_parts
from mcore_rl.controller.worker_process import MethodCall, Reply, WorkerInfo
from mcore_rl.data.batch import Batch
from mcore_rl.parallel.mesh import Mesh


class AllRanks:
    """Answers as `WorkerProcess.call` does."""

    def call(self, call: MethodCall, *_: object) -> Reply:
        return Reply(1.0 if call[1] else None)


class Group:
    """A worker group as pending calls use it."""

    name = "all"
    end_reason = ""

    def __init__(self) -> None:
        self.worker_infos: dict[int, WorkerInfo] = {}

    def close(self, reason: str = "") -> None:
        self.end_reason = reason


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096])
    options = parser.parse_args()
    with ray_session(num_cpus=1, object_store_bytes=200 << 20, log_to_driver=False):
        actor = ray.remote(AllRanks).options(num_cpus=0).remote()
        ray.get(actor.call.remote(("", True, [], {}, ())))
        for num_ranks in options.ranks:
            print(json.dumps(measure(actor, num_ranks)), flush=True)


def measure(actor: ray.actor.ActorHandle, num_ranks: int) -> dict[str, float]:
    mesh = Mesh(Layout(tp=8, dp=num_ranks // 8))
    batch = Batch({"row": np.arange(num_ranks)})
    mode = Dispatch.MEGATRON_COMPUTE
    start = time.perf_counter()
    parts = mode.scatter(mesh, (batch,), {})
    split = time.perf_counter()
    calls = send_parts([actor] * num_ranks, "update", parts)
    sent = time.perf_counter()
    limit, finish = Timeout(600, "this benchmark"), partial(mode.gather, parts)
    assert PendingCall(Group(), "update", calls, finish, limit).result() == [1.0] * mesh.sizes["dp"]
    gathered = time.perf_counter()
    there = {ray.put(Reply(1.0)): rank for rank in range(num_ranks)}
    stored = time.perf_counter()
    assert len(PendingCall(Group(), "update", there, dict, limit).result()) == num_ranks
    end = time.perf_counter()
    return {
        "ranks": num_ranks,
        "split_s": round(split - start, 3),
        "send_s": round(sent - split, 3),
        "gather_s": round(gathered - sent, 3),
        "gather_stored_s": round(end - stored, 3),
    }


if __name__ == "__main__":
    main()
