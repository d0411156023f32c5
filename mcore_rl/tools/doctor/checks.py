"""Checks of one node: versions, GPUs and networks, limits, memory, disks, ports, names.

Versions are read without importing packages. Each check adds findings to the report of the node,
or facts, which should be the same on all nodes.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from mcore_rl.controller.compilers import TOOLS, build_compiler_environment, is_gpu_node
from mcore_rl.observability.process import detect_installed_extra, list_versions
from mcore_rl.sandbox.sandbox import probe_tiers
from mcore_rl.sandbox.tiers import Tier
from mcore_rl.tools.doctor.report import DoctorRequest, Fact, NodeReport, Status

MIN_OPEN_FILES = 8192  # Ray warns below; a trainer of many ranks has a socket for each
MIN_INODES = 10_000
MIN_PORTS = 1000  # free ones that no outgoing connection takes
_SHM = "/dev/shm"
_PROBE_BYTES = 1 << 20
_GB = 1e9
_RUNNER, _RUNNER_CHECK = "VLLM_USE_V2_MODEL_RUNNER", "vLLM's model runner"
_CUDA = re.compile(r"^cuda\b.*= *'([\d.]+)'", re.MULTILINE)
# In the order of Gpu's fields.
_QUERY = (
    "name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,driver_version,"
    "compute_mode"
)
_NVIDIA_SMI_S = 20.0  # a driver in trouble answers late or never
_MOST_USED_MIB = 2048  # of a GPU that nothing runs on: what the driver takes, and displays
_INFINIBAND = Path("/sys/class/infiniband")


def collect_versions() -> dict[str, Fact]:
    """Return the versions of Python, of packages and of torch's CUDA."""
    versions = {"python": platform.python_version(), **list_versions()}
    if cuda := read_torch_cuda_version():
        versions["CUDA of torch"] = cuda
    return {name: Fact(value) for name, value in versions.items()}


def check_model_runner(report: NodeReport) -> None:
    """Add which of its two model runners vLLM would take for servers (config/vllm.py:703).

    V2 where Triton runs, V1 elsewhere, unless the environment variable is set.
    """
    setting, kind = os.environ.get(_RUNNER), detect_installed_extra()
    if kind not in ("cpu", "gpu"):  # without vLLM
        return
    has_triton = _has_triton(kind)
    is_number = setting is None or re.fullmatch(r"\s*[+-]?\d+\s*", setting)
    is_v2 = has_triton if setting is None or not is_number else bool(int(setting))
    if not is_number or (is_v2 and not has_triton):
        wanted = "0 or 1" if has_triton else "0, because Triton is missing"
        remedy = f"unset {_RUNNER}: a server would end at its start"
        report.add(_RUNNER_CHECK, "fail", f"{_RUNNER}={setting!r}", wanted, remedy)
        return
    report.facts[_RUNNER_CHECK] = Fact("V2" if is_v2 else "V1", "warn")


def check_compilers(report: NodeReport) -> None:
    """Check that servers have the compilers of FlashInfer, if the node has GPUs.

    Without them vLLM does not use FlashInfer's kernels, and prints that at one of its quieter
    levels (utils/flashinfer.py:95 of vLLM).
    """
    if not is_gpu_node() or importlib.util.find_spec("flashinfer") is None:
        return
    if importlib.util.find_spec("flashinfer_cubin") is not None:
        report.add("FlashInfer", "ok", "compiled kernels of flashinfer-cubin")
        return
    environment = build_compiler_environment(os.environ, Path("/"))
    path = environment.get("PATH", os.environ.get("PATH", ""))
    programs = {tool: shutil.which(tool, path=path) for tool in TOOLS}
    if toolkit := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        # FlashInfer looks for nvcc in this folder alone.
        programs["nvcc"] = shutil.which(os.path.join(toolkit, "bin", "nvcc"))
    missing = [tool for tool, program in programs.items() if program is None]
    value = f"no {' and no '.join(missing)}" if missing else ", ".join(map(str, programs.values()))
    remedy = "bash launch/setup_env.sh has ninja; CUDA_HOME names a CUDA 13 toolkit with nvcc"
    wanted = f"{' and '.join(TOOLS)}, or servers do without FlashInfer's kernels"
    report.add("FlashInfer", "warn" if missing else "ok", value, wanted, remedy)


def _has_triton(kind: str) -> bool:
    """Return whether Triton has a backend for the device (vllm/triton_utils/importing.py:14)."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return False
    return kind == "gpu" or (Path(spec.origin).parent / "backends" / "cpu").is_dir()


def read_torch_cuda_version() -> str:
    """Return the CUDA that torch was built with; empty for none."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    match = _CUDA.search(file.read_text()) if file and file.exists() else None
    return match[1] if match else ""


def list_requirements() -> dict[str, Requirement]:
    """Return the requirements of the installed extra by package."""
    requirements = map(Requirement, metadata.requires("mcore-rl") or ())
    extra = {"extra": detect_installed_extra()}
    return {r.name: r for r in requirements if r.marker is None or r.marker.evaluate(extra)}


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_mib: int
    used_mib: int
    ecc_errors: int  # uncorrected, since the driver was loaded
    driver: str
    compute_mode: str  # "Default": any number of processes


def check_devices(report: NodeReport) -> None:
    """Check GPUs, NVLink and InfiniBand."""
    ports = list(list_infiniband_rates())
    report.facts["InfiniBand"] = Fact(_format_counts(ports) or "none", "warn")
    try:
        gpus = list_gpus()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = " ".join(str(getattr(error, "stdout", "") or error).split())
        remedy = "see `dmesg | grep -i -e nvrm -e xid`; exclude the node"
        report.add("GPUs", "fail", f"nvidia-smi: {reason}", "an answer", remedy)
        return
    kinds = _format_counts([f"{gpu.name}, {gpu.total_mib} MiB" for gpu in gpus])
    report.facts["GPUs"] = Fact(kinds or "none", "warn")
    if not gpus:
        return
    report.facts["NVIDIA driver"] = Fact(gpus[0].driver, "warn")
    _check_gpus(report, gpus)
    if len(gpus) > 1:
        _check_nvlink(report)


def _check_gpus(report: NodeReport, gpus: list[Gpu]) -> None:
    bad = [f"GPU {n}: {gpu.ecc_errors}" for n, gpu in enumerate(gpus) if gpu.ecc_errors]
    remedy = "reset the GPU (nvidia-smi -r) or exclude the node"
    report.add("ECC errors", "fail" if bad else "ok", ", ".join(bad) or "none", "none", remedy)
    report.add(
        "compute mode",
        "ok" if all(gpu.compute_mode == "Default" for gpu in gpus) else "fail",
        _format_counts([gpu.compute_mode for gpu in gpus]),
        "Default: trainer and server are two processes of one GPU",
        "nvidia-smi -c DEFAULT, as root",
    )
    used = [
        f"GPU {n}: {gpu.used_mib} MiB"
        for n, gpu in enumerate(gpus)
        if gpu.used_mib > _MOST_USED_MIB
    ]
    remedy = "another program runs there: nvidia-smi names it"
    wanted = f"at most {_MOST_USED_MIB} MiB"
    report.add("GPU memory in use", "warn" if used else "ok", ", ".join(used) or "none", wanted,
               remedy)  # fmt: skip


def _check_nvlink(report: NodeReport) -> None:
    links = list_nvlinks()
    most = max((active for active, _ in links), default=0)
    if not most:
        report.add("NVLink", "warn", "none", "links between GPUs", "collectives go over PCIe")
        return
    down = [f"GPU {n}: {active} links" for n, (active, _) in enumerate(links) if active < most]
    remedy = "see `nvidia-smi nvlink -s`; exclude the node"
    value = ", ".join(down) or f"{most} links a GPU"
    report.add("NVLink", "warn" if down else "ok", value, f"{most} links a GPU", remedy)


def list_gpus() -> list[Gpu]:
    """Return the GPUs by nvidia-smi; none if it is not installed.

    Raises:
        subprocess.SubprocessError: It fails, or does not answer.
        ValueError: Its answer has another form.
    """
    try:
        output = _run_nvidia_smi(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    except FileNotFoundError:
        return []
    rows = csv.reader(output.splitlines(), skipinitialspace=True)
    return [
        Gpu(name, int(total), int(used), int(ecc) if ecc.isdigit() else 0, driver, mode)
        for name, total, used, ecc, driver, mode in rows
    ]


def list_nvlinks() -> list[tuple[int, int]]:
    """Return the active links and all links of each GPU."""
    try:
        output = _run_nvidia_smi("nvlink", "-s")
    except (OSError, subprocess.SubprocessError):
        return []
    links: list[tuple[int, int]] = []
    for line in map(str.strip, output.splitlines()):
        if line.startswith("GPU "):
            links.append((0, 0))
        elif line.startswith("Link ") and links:
            active, total = links[-1]
            links[-1] = active + ("GB/s" in line), total + 1
    return links


def _run_nvidia_smi(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_NVIDIA_SMI_S
    ).stdout


def list_infiniband_rates(folder: Path = _INFINIBAND) -> Iterator[str]:
    """Yield the rate of each active port of InfiniBand or RoCE, such as "400 Gb/sec (4X NDR)"."""
    for port in sorted(folder.glob("*/ports/*")):
        if re.search("ACTIVE", (port / "state").read_text()):
            yield (port / "rate").read_text().strip()


def _format_counts(names: list[str]) -> str:
    return "; ".join(f"{number} x {name}" for name, number in Counter(names).items())


def check_limits(report: NodeReport) -> None:
    """Check the limits of open files and locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    status: Status = "ok" if _has_enough_files(soft) else "fail"
    remedy = "raise it in /etc/security/limits.conf, and where SLURM or the container starts"
    if status == "fail" and _has_enough_files(hard):
        status, remedy = "warn", f"ulimit -n {MIN_OPEN_FILES} before the job"
    report.add("open files", status, _format_limit(soft), f"at least {MIN_OPEN_FILES}", remedy)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_infiniband = any(list_infiniband_rates())
    is_enough = locked == resource.RLIM_INFINITY or not has_infiniband
    report.add(
        "locked memory",
        "ok" if is_enough else "fail",
        _format_limit(locked),
        "unlimited, for InfiniBand" if has_infiniband else "",
        "ulimit -l unlimited; in SLURM PropagateResourceLimitsExcept=MEMLOCK",
    )


def check_niceness(report: NodeReport) -> None:
    """Check the niceness, to which Ray adds its own for every worker, 15 by default."""
    niceness = os.nice(0)
    remedy = "RAY_worker_niceness=0 where `ray start` runs, and no `nice` around it"
    report.add("niceness", "warn" if niceness > 0 else "ok", str(niceness), "at most 0", remedy)


def _has_enough_files(limit: int) -> bool:
    return limit >= MIN_OPEN_FILES or limit == resource.RLIM_INFINITY


def _format_limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_shared_memory(report: NodeReport, request: DoctorRequest) -> None:
    try:
        stats = os.statvfs(_SHM)
    except OSError as error:
        report.add(
            "shared memory", "fail", f"{_SHM}: {error.strerror}", "a file system", "mount it"
        )
        return
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    wanted = f"{request.min_shm_gb:g} GB free (--min-shm)"
    is_small = size < request.min_shm_gb * _GB
    remedy = (
        f"mount -o remount,size=SIZE {_SHM}, or --shm-size of the container"
        if is_small
        else f"something is left there: ls -l {_SHM}"
    )
    status: Status = "ok" if free >= request.min_shm_gb * _GB else "fail"
    report.add(
        "shared memory",
        status,
        f"{_format_size(free)} of {_format_size(size)} free in {_SHM}",
        wanted,
        remedy,
    )


def check_folder(report: NodeReport, check: str, path: Path, min_gb: float, setting: str) -> None:
    """Check free space, inodes, and by a megabyte whether the folder is writable."""
    wanted = f"{min_gb:g} GB and {MIN_INODES} inodes free, and writable"
    remedy = f"free some, or choose another place ({setting})"
    try:
        folder = find_existing(path)
        stats = os.statvfs(folder)
        reason = _write_probe(folder)
    except OSError as error:
        report.add(check, "fail", f"{path}: {error.strerror}", wanted, remedy)
        return
    free = stats.f_bavail * stats.f_frsize
    value = f"{folder}: {_format_size(free)} free"
    is_short_of_inodes = stats.f_files > 0 and stats.f_favail < MIN_INODES  # 0: there is no limit
    if is_short_of_inodes:
        value += f", {stats.f_favail} inodes free"
    if reason:
        value += f", writing fails: {reason}"
    is_bad = reason or is_short_of_inodes or free < min_gb * _GB
    report.add(check, "fail" if is_bad else "ok", value, wanted, remedy)


def find_existing(path: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _write_probe(folder: Path) -> str:
    """Return why a file cannot be written; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".mcore-rl-doctor") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a quota refuses only here
        return error.strerror or str(error)
    return ""


def check_model(report: NodeReport, request: DoctorRequest) -> int:
    """Add the files of the model as a fact; return their bytes."""
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
        f"{folder}: config.json {digest}, {len(sizes)} files of weights, {_format_size(sum(sizes))}"
    )
    return sum(sizes)


def check_ports(report: NodeReport, request: DoctorRequest) -> None:
    """Check that the named ports are free, or else that enough lie below the ephemeral range."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if not request.ports:
        num_ports = low - 1024
        status: Status = "ok" if num_ports >= MIN_PORTS else "warn"
        remedy = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
        value = f"{max(num_ports, 0)} below the ephemeral range {low}-{high}"
        report.add("ports", status, value, f"at least {MIN_PORTS}", remedy)
        return
    busy = {port: reason for port in request.ports if (reason := _try_port(port))}
    for port, reason in busy.items():
        remedy = f"`ss -ltnp 'sport = :{port}'` shows who has it; end that, or choose another port"
        report.add("ports", "fail", f"{port}: {reason}", "free", remedy)
    ephemeral = [port for port in request.ports if low <= port <= high and port not in busy]
    if ephemeral:
        value = f"{_format_ranges(ephemeral)} in the ephemeral range {low}-{high}"
        remedy = (
            "an outgoing connection can take them: choose others (--ports; MCORE_RL_FIRST_PORT of "
            "launch scripts), or sysctl net.ipv4.ip_local_reserved_ports"
        )
        report.add("ports", "warn", value, f"below {low}", remedy)
    elif not busy:
        report.add("ports", "ok", f"{len(request.ports)} free")


def _format_ranges(ports: Sequence[int]) -> str:
    """Return ports as text, with ranges.

    >>> _format_ranges([7, 20, 21, 22])
    '7, 20-22'
    """
    firsts = [port for port in ports if port - 1 not in ports]
    lasts = [port for port in ports if port + 1 not in ports]
    pairs = zip(firsts, lasts, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _try_port(port: int) -> str:
    """Return why a port cannot be bound to on all addresses; empty if it can."""
    with contextlib.closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do not count
        try:
            sock.bind(("", port))
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""


def check_sandbox(report: NodeReport) -> None:
    """Try each kind of sandbox, which takes some tenths of a second."""
    result = probe_tiers("auto")
    if isinstance(result, Tier):
        report.add("sandbox", "ok", str(result))
        return
    remedy = "install bubblewrap, or allow namespaces or Landlock (Linux 6.2); see docs/sandbox.md"
    report.add("sandbox", "warn", "; ".join(result), "bubblewrap or Landlock", remedy)


def check_host_name(report: NodeReport) -> None:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        remedy = f"put {name} into /etc/hosts or DNS"
        report.add("host name", "warn", f"{name}: {error.strerror}", "an address", remedy)
        return
    report.add("host name", "ok", "has an address")


def _format_size(size: int) -> str:
    return f"{size / _GB:.1f} GB" if size >= 0.1 * _GB else f"{size / 1e6:.1f} MB"
