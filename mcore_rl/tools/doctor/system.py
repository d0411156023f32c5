"""What the operating system gives a job on this node: limits, memory, disks, ports, names."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.sandbox.sandbox import probe_tiers
from mcore_rl.sandbox.tiers import Tier
from mcore_rl.tools.doctor import devices
from mcore_rl.tools.doctor.findings import DoctorRequest, Fact, NodeReport, Status

MIN_OPEN_FILES = 8192  # Ray warns below; a trainer of many ranks has a socket for each
MIN_INODES = 10_000
MIN_PORTS = 1000  # free ones that no outgoing connection takes
_SHM = "/dev/shm"
_PROBE_BYTES = 1 << 20
_GB = 1e9


def look_at_limits(report: NodeReport) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = MIN_OPEN_FILES, resource.RLIM_INFINITY
    status: Status = "ok" if soft >= enough[0] or soft == enough[1] else "fail"
    remedy = "raise it in /etc/security/limits.conf, and where SLURM or the container starts"
    if status == "fail" and (hard >= enough[0] or hard == enough[1]):
        status, remedy = "warn", f"ulimit -n {MIN_OPEN_FILES} before the job"
    report.add("open files", status, _limit(soft), f"at least {MIN_OPEN_FILES}", remedy)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_infiniband = any(devices.infiniband())
    is_enough = locked == resource.RLIM_INFINITY or not has_infiniband
    report.add(
        "locked memory",
        "ok" if is_enough else "fail",
        _limit(locked),
        "unlimited, for InfiniBand" if has_infiniband else "",
        "ulimit -l unlimited; in SLURM PropagateResourceLimitsExcept=MEMLOCK",
    )


def look_at_niceness(report: NodeReport) -> None:
    """Ray adds its own to the niceness of a node for every worker, 15 unless it is told another."""
    niceness = os.nice(0)
    remedy = "RAY_worker_niceness=0 where `ray start` runs, and no `nice` around it"
    report.add("niceness", "warn" if niceness > 0 else "ok", str(niceness), "at most 0", remedy)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def look_at_shared_memory(report: NodeReport, request: DoctorRequest) -> None:
    try:
        found = os.statvfs(_SHM)
    except OSError as error:
        report.add(
            "shared memory", "fail", f"{_SHM}: {error.strerror}", "a file system", "mount it"
        )
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    wanted = f"{request.min_shm_gb:g} GB free (--min-shm)"
    is_small = size < request.min_shm_gb * _GB
    remedy = (
        f"mount -o remount,size=SIZE {_SHM}, or --shm-size of the container"
        if is_small
        else f"something is left there: ls -l {_SHM}"
    )
    status: Status = "ok" if free >= request.min_shm_gb * _GB else "fail"
    report.add(
        "shared memory", status, f"{_gb(free)} of {_gb(size)} free in {_SHM}", wanted, remedy
    )


def look_at_folder(report: NodeReport, check: str, path: Path, min_gb: float, setting: str) -> None:
    """Room, inodes, and whether one can write there, by writing a megabyte."""
    wanted = f"{min_gb:g} GB and {MIN_INODES} inodes free, and writable"
    remedy = f"free some, or choose another place ({setting})"
    try:
        folder = existing(path)
        found = os.statvfs(folder)
        reason = _write_probe(folder)
    except OSError as error:
        report.add(check, "fail", f"{path}: {error.strerror}", wanted, remedy)
        return
    free = found.f_bavail * found.f_frsize
    value = f"{folder}: {_gb(free)} free"
    few = found.f_files > 0 and found.f_favail < MIN_INODES  # 0: there is no limit
    if few:
        value += f", {found.f_favail} inodes free"
    if reason:
        value += f", writing fails: {reason}"
    is_bad = reason or few or free < min_gb * _GB
    report.add(check, "fail" if is_bad else "ok", value, wanted, remedy)


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(one for one in (path, *path.parents) if one.is_dir())


def _write_probe(folder: Path) -> str:
    """Why a file cannot be written; empty when it can."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".mcore-rl-doctor") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a quota tells only now
        return error.strerror or str(error)
    return ""


def look_at_model(report: NodeReport, request: DoctorRequest) -> int:
    """Bytes of its files; the same files should be on all nodes."""
    folder = Path(request.model_path)
    config = folder / "config.json"
    try:
        digest = hashlib.sha256(config.read_bytes()).hexdigest()[:8]
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    except OSError as error:
        remedy = "a path that every node sees (--model-path)"
        missing = [path for path in (folder, config) if not path.exists()]
        value = f"{missing[0]} does not exist" if missing else f"{config}: {error.strerror}"
        report.add("model", "fail", value, "readable", remedy)
        return 0
    report.facts["model"] = Fact(
        f"{folder}: config.json {digest}, {len(sizes)} files of weights, {_gb(sum(sizes))}"
    )
    return sum(sizes)


def look_at_ports(report: NodeReport, request: DoctorRequest) -> None:
    """Those that were named can be bound to; else there is a range outside of the ephemeral one."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if not request.ports:
        room = low - 1024
        status: Status = "ok" if room >= MIN_PORTS else "warn"
        remedy = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
        value = f"{max(room, 0)} below the ephemeral range {low}-{high}"
        report.add("ports", status, value, f"at least {MIN_PORTS}", remedy)
        return
    busy = {port: reason for port in request.ports if (reason := _busy(port))}
    for port, reason in busy.items():
        remedy = f"`ss -ltnp 'sport = :{port}'` shows who has it; end that, or choose another port"
        report.add("ports", "fail", f"{port}: {reason}", "free", remedy)
    ephemeral = [port for port in request.ports if low <= port <= high and port not in busy]
    if ephemeral:
        value = f"{_spans(ephemeral)} in the ephemeral range {low}-{high}"
        remedy = (
            "an outgoing connection can take them: choose others (--ports; MCORE_RL_FIRST_PORT of "
            "launch scripts), or sysctl net.ipv4.ip_local_reserved_ports"
        )
        report.add("ports", "warn", value, f"below {low}", remedy)
    elif not busy:
        report.add("ports", "ok", f"{len(request.ports)} free")


def _spans(ports: Sequence[int]) -> str:
    """
    >>> _spans([7, 20, 21, 22])
    '7, 20-22'
    """
    firsts = [port for port in ports if port - 1 not in ports]
    lasts = [port for port in ports if port + 1 not in ports]
    pairs = zip(firsts, lasts, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _busy(port: int) -> str:
    """Why a port cannot be bound to on all addresses; empty when it can."""
    with contextlib.closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do not count
        try:
            sock.bind(("", port))
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""


def look_at_sandbox(report: NodeReport) -> None:
    """Which kind of sandbox works: each is tried, for some tenths of a second."""
    found = probe_tiers("auto")
    if isinstance(found, Tier):
        report.add("sandbox", "ok", str(found))
        return
    remedy = "install bubblewrap, or allow namespaces or Landlock (Linux 6.2); see docs/sandbox.md"
    report.add("sandbox", "warn", "; ".join(found), "bubblewrap or Landlock", remedy)


def look_at_host_name(report: NodeReport) -> None:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        remedy = f"put {name} into /etc/hosts or DNS"
        report.add("host name", "warn", f"{name}: {error.strerror}", "an address", remedy)
        return
    report.add("host name", "ok", "has an address")


def _gb(size: int) -> str:
    return f"{size / _GB:.1f} GB" if size >= 0.1 * _GB else f"{size / 1e6:.1f} MB"
