"""The ranks of a measurement of bandwidth on this node: one on each GPU, or one on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from mcore_rl.parallel.rendezvous import (
    RendezvousClient,
    RendezvousEndpoint,
    RendezvousTimeoutError,
)
from mcore_rl.tools.doctor import bandwidth, devices
from mcore_rl.tools.doctor.findings import Bandwidth, NodeReport

_CHECK = "bandwidth"
_LOOK_S = 0.1
_RANK = re.compile(r"\brank (\d+)")


def measure(
    report: NodeReport, client: RendezvousClient, number: int, nodes: Sequence[str], limit_s: float
) -> None:
    """Add a finding on this node's ranks and, on the first node, what was measured."""
    num_gpus = _num_gpus()
    client.set(f"ranks/{number}", str(num_gpus).encode())
    try:
        told = client.get([f"ranks/{other}" for other in range(len(nodes))], limit_s)
    except RendezvousTimeoutError as error:
        late = ", ".join(nodes[int(key.partition("/")[2])] for key in error.keys)
        value = f"not measured: {late} did not come in {limit_s:.0f} s"
        report.add(_CHECK, "fail", value, "all nodes", "see their own findings")
        return
    gpus = [int(one) for one in told]
    backend, counts = ("nccl", gpus) if all(gpus) else ("gloo", [1] * len(nodes))
    if sum(counts) == 1:
        report.add(_CHECK, "ok", "one rank: nothing to measure")
        return
    endpoint = RendezvousEndpoint(**json.loads(client.get(["endpoint of ranks"], limit_s)[0]))
    output = _run(report, endpoint, number, backend, counts, nodes, limit_s)
    if output and number == 0:
        names = [
            f"{node}:{k}" for node, count in zip(nodes, counts, strict=True) for k in range(count)
        ]
        found = json.loads(output)
        inside, between = (
            [(names[a], names[b], speed) for a, b, speed in found[kind]]
            for kind in ("inside", "between")
        )
        report.bandwidth = Bandwidth(sum(counts), backend, found["all_reduce"], inside, between)


def _num_gpus() -> int:
    """That a rank can use; torch would take seconds to tell."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len(list(filter(None, chosen.split(","))))
    try:
        return len(devices.gpus())
    except (OSError, subprocess.SubprocessError, ValueError):  # which is a finding of its own
        return 0


def _run(
    report: NodeReport,
    endpoint: RendezvousEndpoint,
    number: int,
    backend: str,
    counts: Sequence[int],
    nodes: Sequence[str],
    limit_s: float,
) -> str:
    """What the first rank printed; empty when one failed, which is a finding then."""
    first = sum(counts[:number])
    common = os.environ | endpoint.to_environment() | {"WORLD_SIZE": str(sum(counts))}
    common.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", bandwidth.__name__, backend, str(limit_s), *map(str, counts)]
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        try:
            for local in range(counts[number]):
                environment = common | {"RANK": str(first + local), "LOCAL_RANK": str(local)}
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=printed, stderr=errors)
                )
            reason = _wait(processes, first, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if not reason:
            report.add(_CHECK, "ok", "measured")
            return _text(printed)
        last = ([line for line in _text(errors).splitlines() if "Error" in line] or [""])[-1]
        owners = [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
        value = _RANK.sub(lambda m: f"{m[0]} ({owners[int(m[1])]})", f"{reason} {last}".strip())
        remedy = "NCCL_DEBUG=INFO tells more; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose"
        report.add(_CHECK, "fail", value, "an all-reduce over all ranks", f"{remedy} the network")
        return ""


def _wait(processes: Sequence[subprocess.Popen[bytes]], first: int, limit_s: float) -> str:
    """Why not all of them did their part; empty when they did."""
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return f"no result in {limit_s:.0f} s"
        if any(process.returncode for process in processes):
            break
        time.sleep(_LOOK_S)
    failed = [first + k for k, process in enumerate(processes) if process.poll()]
    return (
        f"rank {failed[0]} ended with {processes[failed[0] - first].returncode}:" if failed else ""
    )


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
