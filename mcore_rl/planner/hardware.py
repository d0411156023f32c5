"""Devices and links that plans are made for: one small file each, with the source of each number.

The files beside this module are datasheets and measured shares of them. A file of a user's own has
the same fields; `mcore-rl plan calibrate` writes one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config.checks import find_closest
from mcore_rl.config.errors import ConfigError

FOLDER = Path(__file__).parent / "hardware"
DEVICES = ("cuda", "cpu")
DTYPES = ("float32", "bfloat16", "float8")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device and its links. Rates are of one device, in one direction, at their peak.

    A share is the part of a peak that large transfers or matrix products reach.
    """

    name: str
    device: str  # one of DEVICES: what ranks run on
    memory_bytes: int  # that a process can allocate
    peak_flops: Mapping[str, float]  # dense matrix products a second, by dtype
    matmul_share: float
    memory_bandwidth: float  # bytes a second of the device's own memory, reads and writes together
    memory_share: float
    nvlink_bandwidth: float  # bytes a second between devices of an NVLink domain
    nvlink_share: float
    nvlink_latency_s: float
    nvlink_domain: int  # devices that NVLink connects
    network_bandwidth: float  # bytes a second to devices outside the domain
    network_share: float
    network_latency_s: float
    host_bandwidth: float  # bytes a second between device and host memory
    host_share: float
    kernel_latency_s: float  # shortest time of a kernel in a stream of kernels
    devices_per_node: int
    sources: Mapping[str, str] = field(default_factory=dict)  # of each number, by field

    def get_flops(self, dtype: str) -> float:
        """Return the reachable flops a second; raises as get_peak_flops."""
        return self.get_peak_flops(dtype) * self.matmul_share

    def get_peak_flops(self, dtype: str) -> float:
        """Return the peak flops a second of a dtype, or of the next that has one.

        Raises:
            ConfigError: `dtype` is none of DTYPES.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r}; allowed: {', '.join(DTYPES)}")
        wider = DTYPES[DTYPES.index(dtype) :: -1]
        return next(self.peak_flops[name] for name in wider if name in self.peak_flops)

    @property
    def reserved_bytes(self) -> float:
        """Memory of a process on a GPU beside tensors: an estimate.

        CUDA context, NCCL buffers, workspaces of libraries and fragmentation.
        """
        return 6e9 if self.device == "cuda" else 0.0

    @property
    def memory_rate(self) -> float:
        """Reachable bytes a second of the device's memory."""
        return self.memory_bandwidth * self.memory_share

    def get_link(self, num_devices: int, stride: int = 1) -> Link:
        """Return the link of a group of devices: NVLink if one domain has all of them.

        Args:
            stride: Distance of neighbours in the group.
        """
        if num_devices * stride <= self.nvlink_domain or num_devices == 1:
            return Link(self.nvlink_bandwidth * self.nvlink_share, self.nvlink_latency_s)
        return Link(self.network_bandwidth * self.network_share, self.network_latency_s)

    def predict_all_reduce(self, num_bytes: float, num_devices: int) -> float:
        """Return the seconds of an all-reduce: a ring inside a domain, a tree over domains.

        A tree goes up and down log2(domains) times (NCCL 2.4, double binary trees); each domain
        sends over the network ports of all its members.
        """
        if num_devices == 1:
            return 0.0
        inside = Link(self.nvlink_bandwidth * self.nvlink_share, self.nvlink_latency_s)
        seconds = inside.predict_s(2 * num_bytes * (num_devices - 1) / num_devices)
        domains = math.ceil(num_devices / self.nvlink_domain)
        if domains > 1:
            rate = (
                self.network_bandwidth * self.network_share * min(num_devices, self.nvlink_domain)
            )
            hops = 2 * math.ceil(math.log2(domains))
            seconds += Link(rate, self.network_latency_s).predict_s(2 * num_bytes, hops)
        return seconds

    def to_yaml(self) -> str:
        """Return the text of a file that `load_hardware` reads."""
        fields_of_file = asdict(self)
        fields_of_file["peak_flops"] = dict(self.peak_flops)
        fields_of_file["sources"] = dict(self.sources)
        return str(yaml.safe_dump(fields_of_file, sort_keys=False, width=100))


@dataclass(frozen=True, slots=True)
class Link:
    """A link between devices: reachable bytes a second in one direction, and its latency."""

    rate: float
    latency_s: float

    def predict_s(self, num_bytes: float, num_messages: float = 1) -> float:
        """Return the seconds of messages one after another: latencies plus bytes over the rate."""
        return num_messages * self.latency_s + num_bytes / self.rate


def list_hardware() -> list[str]:
    """Return the names of the files of this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_hardware(name: str, setting: str = "--hardware") -> Hardware:
    """Load hardware by its name, or from a file of a user's own.

    Args:
        name: One of list_hardware(), or the path of a file that ends in .yaml.

    Raises:
        ConfigError: The name is unknown, or the file has no, unknown or impossible fields.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name.lower()}.yaml"
    if name.lower() not in list_hardware() and not name.endswith((".yaml", ".yml")):
        close = find_closest(name.lower(), list_hardware())
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise ConfigError(
            f"{setting}={name!r} is unknown{hint}; allowed: {', '.join(list_hardware())}, or the "
            "path of a .yaml file, as `mcore-rl plan calibrate` writes"
        )
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{setting}={name!r} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}={name!r} is not valid YAML: {error}") from error
    return _build_hardware(entries, f"{setting}={name!r}")


def _build_hardware(entries: Any, where: str) -> Hardware:
    names = [f.name for f in fields(Hardware)]
    if not isinstance(entries, dict):
        raise ConfigError(f"{where} is no mapping of fields; allowed: {', '.join(names)}")
    missing = [name for name in names if name not in entries]
    unknown = [str(name) for name in entries if name not in names]
    if missing or unknown:
        problems = [f"has no {', '.join(missing)}"] * bool(missing)
        problems += [f"has unknown {', '.join(unknown)}"] * bool(unknown)
        raise ConfigError(f"{where} {' and '.join(problems)}; allowed: {', '.join(names)}")
    values = dict(entries)
    if values["device"] not in DEVICES:
        raise ConfigError(
            f"{where}: device={values['device']!r}; allowed: {', '.join(map(repr, DEVICES))}"
        )
    peaks = values["peak_flops"]
    if not isinstance(peaks, dict) or "float32" not in peaks or set(peaks) - set(DTYPES):
        raise ConfigError(
            f"{where}: peak_flops={peaks!r}; allowed: float32, and bfloat16 or float8, in flops a "
            "second"
        )
    sources = values["sources"]
    if not isinstance(sources, dict):
        raise ConfigError(f"{where}: sources={sources!r}; allowed: the source of each field")
    values["peak_flops"] = {
        dtype: _read_number(f"peak_flops.{dtype}", peak, where) for dtype, peak in peaks.items()
    }
    for name in names[2:-1]:
        if name != "peak_flops":
            values[name] = _read_number(name, values[name], where)
        if not sources.get(name):
            raise ConfigError(f"{where}: sources has no {name}; allowed: a source of each number")
    for name in ("memory_bytes", "nvlink_domain", "devices_per_node"):
        if values[name] != int(values[name]):
            raise ConfigError(f"{where}: {name}={values[name]}; allowed: a whole number")
        values[name] = int(values[name])
    return Hardware(**values)


def _read_number(name: str, value: Any, where: str) -> float:
    """Return a number above 0, at most 1 if it is a share."""
    try:  # YAML 1.1 reads 3.35e12 as text
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= (1 if name.endswith("_share") else math.inf) or math.isinf(number):
        most = "above 0, up to 1" if name.endswith("_share") else "a number above 0"
        raise ConfigError(f"{where}: {name}={value!r}; allowed: {most}")
    return number
