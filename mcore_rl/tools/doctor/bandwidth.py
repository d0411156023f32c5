"""What one rank of the measurement does: an all-reduce over all, then each pair of nodes and GPUs.

    python -m mcore_rl.tools.doctor.bandwidth BACKEND TIMEOUT_S COUNT...

with the number of ranks on each node, and in the environment what join_world of parallel/store.py
reads. Rank 0 prints one JSON object. Pairs that do not share a rank are measured at the same time.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Pair = tuple[int, int]  # of ranks, or of nodes

_REPETITIONS = 5
# Bytes of an all-reduce, and of a message between two: enough that latency does not count.
_SIZES = {"gloo": (16 << 20, 4 << 20), "nccl": (256 << 20, 64 << 20)}


def rounds(count: int) -> list[list[Pair]]:
    """Every pair of `count` once; those of a round have nobody in common.

    The circle method of tournaments: one stays, the others move on by one seat a round.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    seats: list[int] = list(range(count + count % 2))  # an odd one out rests
    found = []
    for _ in range(len(seats) - 1):
        both = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        pairs = sorted((min(pair), max(pair)) for pair in both)
        found.append([pair for pair in pairs if pair[1] < count])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def rounds_of_ranks(counts: Sequence[int]) -> tuple[list[list[Pair]], list[list[Pair]]]:
    """Inside nodes and between nodes, of `counts` ranks each.

    Between two nodes each rank meets the one with its own number there, which on most clusters is
    on the same rail of the network.
    """
    first = [0, *itertools.accumulate(counts)]
    inside: list[list[Pair]] = []
    for node, count in enumerate(counts):
        for number, pairs in enumerate(rounds(count)):
            if number == len(inside):
                inside.append([])
            inside[number] += [(first[node] + a, first[node] + b) for a, b in pairs]
    between = [
        [(first[a] + k, first[b] + k) for a, b in pairs for k in range(min(counts[a], counts[b]))]
        for pairs in rounds(len(counts))
    ]
    return inside, between


def main(backend: str, timeout_s: float, counts: Sequence[int]) -> None:
    import torch
    import torch.distributed as dist

    from mcore_rl.parallel.store import join_world

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    join_world(backend, timeout_s)
    inside, between = rounds_of_ranks(counts)
    found = {
        "all_reduce": _all_reduce(device, _SIZES[backend][0]),
        "inside": _by_pair(inside, device, _SIZES[backend][1]),
        "between": _by_pair(between, device, _SIZES[backend][1]),
    }
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def _all_reduce(device: Any, num_bytes: int) -> float:
    """Bytes a second of the bus."""
    import torch
    import torch.distributed as dist

    data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    seconds = _timed(lambda: dist.all_reduce(data), device)
    world_size = dist.get_world_size()
    return 2 * (world_size - 1) / world_size * num_bytes / seconds


def _by_pair(
    rounds: Sequence[Sequence[Pair]], device: Any, num_bytes: int
) -> list[tuple[int, int, float]]:
    """Bytes a second in each direction while both directions are used, on every rank."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    pairs = [pair for one in rounds for pair in one]
    speeds = torch.zeros(len(pairs), dtype=torch.float64, device=device)
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    for one in rounds:
        dist.all_reduce(torch.zeros(1, device=device))  # nobody is still in the round before
        for pair in one:
            if rank in pair:
                peer = pair[0] if rank == pair[1] else pair[1]

                def exchange(peer: int = peer) -> None:
                    operations = [
                        dist.P2POp(dist.isend, sent, peer),
                        dist.P2POp(dist.irecv, received, peer),
                    ]
                    for work in dist.batch_isend_irecv(operations):
                        work.wait()

                seconds = _timed(exchange, device)
                if rank == pair[0]:
                    speeds[pairs.index(pair)] = num_bytes / seconds
    dist.all_reduce(speeds)
    return [(a, b, speed) for (a, b), speed in zip(pairs, speeds.tolist(), strict=True)]


def _timed(run: Callable[[], object], device: Any) -> float:
    """Median seconds; the first run makes connections and does not count."""
    import torch

    seconds = []
    for _ in range(_REPETITIONS + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), [int(count) for count in sys.argv[3:]])
