"""Bandwidth between ranks: an all-reduce over all, then each pair of nodes and of GPUs.

Each node starts its ranks, one on each GPU or one on the CPU, by `measure_bandwidth`. A rank is

    python -m mcore_rl.tools.doctor.bandwidth BACKEND TIMEOUT_S COUNT...

with the number of ranks on each node, and the environment that join_world of parallel/store.py
reads. Rank 0 prints one JSON object. Pairs that do not share a rank are measured at the same time.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from mcore_rl.parallel.rendezvous import (
    RendezvousClient,
    RendezvousEndpoint,
    RendezvousTimeoutError,
)
from mcore_rl.tools.doctor.checks import list_gpus
from mcore_rl.tools.doctor.report import Bandwidth, NodeReport

Pair = tuple[int, int]  # of ranks, or of nodes

_CHECK = "bandwidth"
_MODULE = "mcore_rl.tools.doctor.bandwidth"  # __name__ is another in a rank
_POLL_S = 0.1
_RANK = re.compile(r"\brank (\d+)")
_REPETITIONS = 5
# Bytes of an all-reduce, and of a message between two: enough that latency does not count.
_SIZES = {"gloo": (16 << 20, 4 << 20), "nccl": (256 << 20, 64 << 20)}


def measure_bandwidth(
    report: NodeReport, client: RendezvousClient, number: int, nodes: Sequence[str], limit_s: float
) -> None:
    """Run this node's ranks; add a finding and, on the first node, the measurement."""
    num_gpus = _count_gpus()
    client.set(f"ranks/{number}", str(num_gpus).encode())
    try:
        counts_by_node = client.get([f"ranks/{other}" for other in range(len(nodes))], limit_s)
    except RendezvousTimeoutError as error:
        late = ", ".join(nodes[int(key.partition("/")[2])] for key in error.keys)
        value = f"not measured: {late} did not come in {limit_s:.0f} s"
        report.add(_CHECK, "fail", value, "all nodes", "see their own findings")
        return
    gpus = [int(count) for count in counts_by_node]
    backend, counts = ("nccl", gpus) if all(gpus) else ("gloo", [1] * len(nodes))
    if sum(counts) == 1:
        report.add(_CHECK, "ok", "one rank: nothing to measure")
        return
    endpoint = RendezvousEndpoint(**json.loads(client.get(["endpoint of ranks"], limit_s)[0]))
    output = _run_ranks(report, endpoint, number, backend, counts, nodes, limit_s)
    if output and number == 0:
        names = [
            f"{node}:{k}" for node, count in zip(nodes, counts, strict=True) for k in range(count)
        ]
        speeds = json.loads(output)
        inside, between = (
            [(names[a], names[b], speed) for a, b, speed in speeds[kind]]
            for kind in ("inside", "between")
        )
        report.bandwidth = Bandwidth(sum(counts), backend, speeds["all_reduce"], inside, between)


def _count_gpus() -> int:
    """Return the GPUs that ranks can use, without torch, whose import takes seconds."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len(list(filter(None, visible.split(","))))
    try:
        return len(list_gpus())
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0  # the check of devices has a finding on it


def _run_ranks(
    report: NodeReport,
    endpoint: RendezvousEndpoint,
    number: int,
    backend: str,
    counts: Sequence[int],
    nodes: Sequence[str],
    limit_s: float,
) -> str:
    """Return the output of the first rank; if a rank fails, add a finding and return ""."""
    first = sum(counts[:number])
    common = os.environ | endpoint.to_environment() | {"WORLD_SIZE": str(sum(counts))}
    common.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", _MODULE, backend, str(limit_s), *map(str, counts)]
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            for local in range(counts[number]):
                environment = common | {"RANK": str(first + local), "LOCAL_RANK": str(local)}
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr)
                )
            reason = _wait_for_ranks(processes, first, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if not reason:
            report.add(_CHECK, "ok", "measured")
            return _read_text(stdout)
        errors = [line for line in _read_text(stderr).splitlines() if "Error" in line]
        last_error = errors[-1] if errors else ""
        owners = [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
        value = _RANK.sub(
            lambda m: f"{m[0]} ({owners[int(m[1])]})", f"{reason} {last_error}".strip()
        )
        remedy = "NCCL_DEBUG=INFO tells more; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose"
        report.add(_CHECK, "fail", value, "an all-reduce over all ranks", f"{remedy} the network")
        return ""


def _wait_for_ranks(
    processes: Sequence[subprocess.Popen[bytes]], first: int, limit_s: float
) -> str:
    """Return why a rank has failed; empty if all have ended well."""
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return f"no result in {limit_s:.0f} s"
        if any(process.returncode for process in processes):
            break
        time.sleep(_POLL_S)
    failed = [first + k for k, process in enumerate(processes) if process.poll()]
    return (
        f"rank {failed[0]} ended with {processes[failed[0] - first].returncode}:" if failed else ""
    )


def _read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def schedule_pairs(count: int) -> list[list[Pair]]:
    """Return rounds with every pair of `count` once, without a common member in a round.

    The circle method of tournaments: one stays, the others move on by one seat a round.

    >>> schedule_pairs(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    seats: list[int] = list(range(count + count % 2))  # an odd one out rests
    rounds = []
    for _ in range(len(seats) - 1):
        both = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        pairs = sorted((min(pair), max(pair)) for pair in both)
        rounds.append([pair for pair in pairs if pair[1] < count])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def schedule_rank_pairs(counts: Sequence[int]) -> tuple[list[list[Pair]], list[list[Pair]]]:
    """Return the rounds inside nodes and between nodes, of `counts` ranks each.

    Between two nodes each rank meets the one with its own number there, which on most clusters is
    on the same rail of the network.
    """
    first = [0, *itertools.accumulate(counts)]
    inside: list[list[Pair]] = []
    for node, count in enumerate(counts):
        for number, pairs in enumerate(schedule_pairs(count)):
            if number == len(inside):
                inside.append([])
            inside[number] += [(first[node] + a, first[node] + b) for a, b in pairs]
    between = [
        [(first[a] + k, first[b] + k) for a, b in pairs for k in range(min(counts[a], counts[b]))]
        for pairs in schedule_pairs(len(counts))
    ]
    return inside, between


def main(backend: str, timeout_s: float, counts: Sequence[int]) -> None:
    """Run as one rank."""
    import torch
    import torch.distributed as dist

    from mcore_rl.parallel.store import join_world

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    join_world(backend, timeout_s)
    inside, between = schedule_rank_pairs(counts)
    speeds = {
        "all_reduce": _measure_all_reduce(device, _SIZES[backend][0]),
        "inside": _measure_pairs(inside, device, _SIZES[backend][1]),
        "between": _measure_pairs(between, device, _SIZES[backend][1]),
    }
    if dist.get_rank() == 0:
        print(json.dumps(speeds), flush=True)
    dist.destroy_process_group()


def _measure_all_reduce(device: Any, num_bytes: int) -> float:
    """Return bytes a second of the bus."""
    import torch
    import torch.distributed as dist

    data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    seconds = _time_median(lambda: dist.all_reduce(data), device)
    world_size = dist.get_world_size()
    return 2 * (world_size - 1) / world_size * num_bytes / seconds


def _measure_pairs(
    rounds: Sequence[Sequence[Pair]], device: Any, num_bytes: int
) -> list[tuple[int, int, float]]:
    """Return bytes a second in each direction, with both in use, of each pair, on every rank."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    pairs = list(itertools.chain(*rounds))
    speeds = torch.zeros(len(pairs), dtype=torch.float64, device=device)
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    for round_pairs in rounds:
        dist.all_reduce(torch.zeros(1, device=device))  # all have ended the round before
        for pair in round_pairs:
            if rank in pair:
                peer = pair[0] if rank == pair[1] else pair[1]

                def exchange(peer: int = peer) -> None:
                    operations = [
                        dist.P2POp(dist.isend, sent, peer),
                        dist.P2POp(dist.irecv, received, peer),
                    ]
                    for work in dist.batch_isend_irecv(operations):
                        work.wait()

                seconds = _time_median(exchange, device)
                if rank == pair[0]:
                    speeds[pairs.index(pair)] = num_bytes / seconds
    dist.all_reduce(speeds)
    return [(a, b, speed) for (a, b), speed in zip(pairs, speeds.tolist(), strict=True)]


def _time_median(run: Callable[[], object], device: Any) -> float:
    """Return the median seconds; the first run makes connections and does not count."""
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
