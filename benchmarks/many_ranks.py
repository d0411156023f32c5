"""CPU seconds of one process for the work of a job with thousands of ranks.

    python benchmarks/many_ranks.py [--ranks 256 1024 4096]

No rank runs: each is a connection, a future or a number. The model has about the size of
Qwen3-235B-A22B, is trained with tp=4, ep=8 and pp=8, and served with tp=8 by half as many workers.

rendezvous_s: of the rendezvous server, until all ranks have connected, passed a barrier and
    gathered a value of each
dispatch_s: to split a batch of eight samples a rank over as many data-parallel ranks, and to join
    the replies
wait_s: to wait for calls of as many groups, which answer one after the other
queue_s: of an asynchronous trainer, for a step of as many groups of samples that arrive one by one
plan_s: to plan the weight sync, and schedule the sends of one rank
export_s: to plan which rank sends what in an export to a Hugging Face checkpoint
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.controller.dispatch import Dispatch
from mcore_rl.controller.pending_call import PendingCall, Timeout, wait_for_survivors
from mcore_rl.controller.worker_process import Reply, WorkerInfo
from mcore_rl.data.batch import Batch, Column, Jagged
from mcore_rl.engine.megatron.weights import WeightPlacement, iter_export_buckets
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.rendezvous import RendezvousServer
from mcore_rl.parallel.store import RendezvousStore
from mcore_rl.reshard.buckets import schedule
from mcore_rl.reshard.layout import GenerationLayout, TrainingRanks
from mcore_rl.rollout.buffer import SampleQueue, StalenessController, StalenessSettings
from mcore_rl.weight_sync.spec import TransferSpec, build_training_side, plan_transfer

NUM_EXPERTS = 128
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 96, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": NUM_EXPERTS, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960, "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip


class Group:
    """A worker group as pending calls use it."""

    end_reason = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.worker_infos: dict[int, WorkerInfo] = {}

    def close(self, reason: str = "") -> None:
        self.end_reason = reason


class Sent:
    """A reference to a reply."""

    def __init__(self) -> None:
        self.answer: Future[Reply] = Future()

    def future(self) -> Future[Reply]:
        return self.answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096])
    options = parser.parse_args()
    threading.stack_size(256 << 10)
    for num_ranks in options.ranks:
        seconds = {f"{name}_s": round(measure(num_ranks), 3) for name, measure in MEASURES.items()}
        print(json.dumps({"ranks": num_ranks, **seconds}), flush=True)


def measure_rendezvous(num_ranks: int) -> float:
    with RendezvousServer("127.0.0.1") as server, ThreadPoolExecutor(num_ranks) as threads:
        [thread] = [thread for thread in threading.enumerate() if thread.name == "rendezvous"]
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)

        def meet(rank: int) -> RendezvousStore:
            store = RendezvousStore(server.endpoint, rank, num_ranks, 600.0)
            store.barrier("start")
            assert len(store.all_gather("address", "address of a rank" * 4)) == num_ranks
            return store

        stores = list(threads.map(meet, range(num_ranks)))
        seconds = time.clock_gettime(clock)
        for store in stores:
            store.close()
    return seconds


def measure_dispatch(num_ranks: int) -> float:
    mesh = Mesh(Layout(dp=num_ranks))
    tokens = np.random.default_rng(0).lognormal(5, 1, 8 * num_ranks).astype(np.int64)
    columns: dict[str, Column] = {
        "prompt_ids": Jagged.pack([np.zeros(1)] * len(tokens), np.int32),
        "response_ids": Jagged.pack(map(np.zeros, tokens), np.int32),
    }
    batch = Batch(columns)
    mode = Dispatch.MEGATRON_COMPUTE
    start = time.process_time()
    parts = mode.scatter(mesh, (batch,), {})
    replies = {part.output_rank: 1.0 for part in parts if part.output_rank is not None}
    assert len(mode.gather(parts, replies)) == len(parts)
    return time.process_time() - start


def measure_wait(num_ranks: int) -> float:
    sent, groups = [Sent() for _ in range(num_ranks)], [Group(str(n)) for n in range(num_ranks)]
    limit = Timeout(600.0, "this benchmark")

    def answer() -> None:
        for call in sent:
            time.sleep(0.0005)
            call.answer.set_result(Reply(1))

    calls = [
        PendingCall(group, "update", {call: 0}, dict, limit)
        for call, group in zip(sent, groups, strict=True)
    ]
    thread = threading.Thread(target=answer)
    thread.start()
    start = time.thread_time()
    assert not wait_for_survivors(calls, groups)
    seconds = time.thread_time() - start
    thread.join()
    return seconds


def measure_queue(num_ranks: int) -> float:
    queue: SampleQueue[None] = SampleQueue(8)
    settings = StalenessSettings(groups_per_step=num_ranks, group_size=8, num_steps=9, staleness=1)
    controller = StalenessController(queue, settings)
    start = time.process_time()
    queue.issue(range(controller.num_to_draw()), range(controller.num_to_draw()))
    running = [group.group_id for group in controller.begin()]
    while controller.select(1) is None:
        group_id = running.pop()
        queue.finish(group_id, 0, 8, {})
        queue.mark_rewarded([group_id])
        assert not controller.num_to_draw() and not controller.begin()
    return time.process_time() - start


def measure_plan(num_ranks: int) -> float:
    settings = WeightSyncConfig(method="disaggregated")
    servers = GenerationLayout(tp=8, dp=num_ranks // 16)
    spec = TransferSpec(build_layout(num_ranks), 0, servers, "bfloat16", settings)
    start = time.process_time()
    schedule(plan_transfer(spec, MODEL, 2), 0, settings.bucket_bytes // 2)
    return time.process_time() - start


def measure_export(num_ranks: int) -> float:
    start = time.process_time()
    ranks, weights = build_training_side(MODEL, build_layout(num_ranks), 0)
    assert isinstance(ranks, TrainingRanks)
    placement = WeightPlacement(ranks.mesh, ranks.chunks, NUM_EXPERTS)
    assert list(iter_export_buckets(weights, placement, torch.bfloat16))
    return time.process_time() - start


def build_layout(num_ranks: int) -> Layout:
    return Layout(tp=4, ep=8, pp=8, dp=num_ranks // 32)


MEASURES: dict[str, Callable[[int], float]] = {
    "rendezvous": measure_rendezvous,
    "dispatch": measure_dispatch,
    "wait": measure_wait,
    "queue": measure_queue,
    "plan": measure_plan,
    "export": measure_export,
}

if __name__ == "__main__":
    main()
