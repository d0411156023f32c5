"""GPUs and the networks between them, as the driver and the kernel tell."""

from __future__ import annotations

import csv
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.tools.doctor.findings import Fact, NodeReport

# In the order of Gpu's fields.
_QUERY = (
    "name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,driver_version,"
    "compute_mode"
)
_TIMEOUT_S = 20.0  # a driver in trouble answers late or never
_MOST_USED_MIB = 2048  # of a GPU that nothing runs on: what the driver takes, and displays
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_mib: int
    used_mib: int
    ecc_errors: int  # uncorrected, since the driver was loaded
    driver: str
    compute_mode: str  # "Default": any number of processes


def look(report: NodeReport) -> None:
    """Findings on GPUs and NVLink; what should be the same on all nodes becomes facts."""
    ports = list(infiniband())
    report.facts["InfiniBand"] = Fact(_counted(ports) or "none", "warn")
    try:
        found = gpus()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = " ".join(str(getattr(error, "stdout", "") or error).split())
        remedy = "see `dmesg | grep -i -e nvrm -e xid`; exclude the node"
        report.add("GPUs", "fail", f"nvidia-smi: {reason}", "an answer", remedy)
        return
    kinds = _counted([f"{gpu.name}, {gpu.total_mib} MiB" for gpu in found])
    report.facts["GPUs"] = Fact(kinds or "none", "warn")
    if not found:
        return
    report.facts["NVIDIA driver"] = Fact(found[0].driver, "warn")
    _look_at_gpus(report, found)
    if len(found) > 1:
        _look_at_nvlink(report)


def _look_at_gpus(report: NodeReport, found: list[Gpu]) -> None:
    bad = [f"GPU {n}: {gpu.ecc_errors}" for n, gpu in enumerate(found) if gpu.ecc_errors]
    remedy = "reset the GPU (nvidia-smi -r) or exclude the node"
    report.add("ECC errors", "fail" if bad else "ok", ", ".join(bad) or "none", "none", remedy)
    report.add(
        "compute mode",
        "ok" if all(gpu.compute_mode == "Default" for gpu in found) else "fail",
        _counted([gpu.compute_mode for gpu in found]),
        "Default: trainer and server are two processes of one GPU",
        "nvidia-smi -c DEFAULT, as root",
    )
    used = [
        f"GPU {n}: {gpu.used_mib} MiB"
        for n, gpu in enumerate(found)
        if gpu.used_mib > _MOST_USED_MIB
    ]
    remedy = "another program runs there: nvidia-smi names it"
    wanted = f"at most {_MOST_USED_MIB} MiB"
    report.add("GPU memory in use", "warn" if used else "ok", ", ".join(used) or "none", wanted,
               remedy)  # fmt: skip


def _look_at_nvlink(report: NodeReport) -> None:
    links = nvlinks()
    most = max((active for active, _ in links), default=0)
    if not most:
        report.add("NVLink", "warn", "none", "links between GPUs", "collectives go over PCIe")
        return
    down = [f"GPU {n}: {active} links" for n, (active, _) in enumerate(links) if active < most]
    remedy = "see `nvidia-smi nvlink -s`; exclude the node"
    value = ", ".join(down) or f"{most} links a GPU"
    report.add("NVLink", "warn" if down else "ok", value, f"{most} links a GPU", remedy)


def gpus() -> list[Gpu]:
    """By nvidia-smi; none where there is none.

    Raises:
        subprocess.SubprocessError: it fails, or does not answer.
        ValueError: its answer is not understood.
    """
    try:
        told = _nvidia_smi(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    except FileNotFoundError:
        return []
    rows = csv.reader(told.splitlines(), skipinitialspace=True)
    return [
        Gpu(name, int(total), int(used), int(ecc) if ecc.isdigit() else 0, driver, mode)
        for name, total, used, ecc, driver, mode in rows
    ]


def nvlinks() -> list[tuple[int, int]]:
    """Links that are active and links in all, of each GPU."""
    try:
        told = _nvidia_smi("nvlink", "-s")
    except (OSError, subprocess.SubprocessError):
        return []
    found: list[tuple[int, int]] = []
    for line in map(str.strip, told.splitlines()):
        if line.startswith("GPU "):
            found.append((0, 0))
        elif line.startswith("Link ") and found:
            active, total = found[-1]
            found[-1] = active + ("GB/s" in line), total + 1
    return found


def _nvidia_smi(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    ).stdout


def infiniband(folder: Path = _INFINIBAND) -> Iterator[str]:
    """The rate of each active port of InfiniBand or RoCE, such as "400 Gb/sec (4X NDR)"."""
    for port in sorted(folder.glob("*/ports/*")):
        if re.search("ACTIVE", (port / "state").read_text()):
            yield (port / "rate").read_text().strip()


def _counted(names: list[str]) -> str:
    return "; ".join(f"{number} x {name}" for name, number in Counter(names).items())
