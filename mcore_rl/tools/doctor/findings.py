"""What the doctor is asked, and what it finds: plain data that crosses processes as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
BETWEEN_NODES = ("network", "shared path")  # checks of two nodes, told by each that has looked


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """The same for every node; a size is in gigabytes (10^9 bytes), a time in seconds."""

    output_dir: str  # absolute
    run: str  # a random name for the files of this examination
    model_path: str = ""  # absolute; empty: none is looked at
    min_shm_gb: float = 1.0
    min_disk_gb: float = 1.0
    max_skew_s: float = 1.0
    ports: tuple[int, ...] = ()
    interface: str = ""  # empty: that over which a node reaches the one that asks
    bandwidth: bool = False
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One check on one node. Without `wanted` the value is only told."""

    check: str
    node: str
    status: Status
    value: str
    wanted: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that should be the same on all nodes, and how bad it is when it is not."""

    value: str
    if_differs: Status = "fail"


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second. A pair is (name, name, in each direction); a name is node:GPU, as "n1:0"."""

    num_ranks: int
    backend: str
    all_reduce: float  # of the bus: 2 (n - 1) / n times the bytes of a rank, as nccl-tests has it
    inside: list[tuple[str, str, float]]  # of one node
    between: list[tuple[str, str, float]]


@dataclass(slots=True)
class NodeReport:
    """All that one node tells of itself."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Fact] = field(default_factory=dict)
    clock_s: float = 0.0  # behind the clock of who asks
    clock_bound_s: float = 0.0  # the most that this is off by
    bandwidth: Bandwidth | None = None  # of all nodes, from the first one

    def add(
        self, check: str, status: Status, value: str, wanted: str = "", remedy: str = ""
    ) -> None:
        advice = "" if status == "ok" else remedy
        self.findings.append(Finding(check, self.name, status, value, wanted, advice))

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> NodeReport:
        """The opposite of dataclasses.asdict."""
        return cls(
            told["name"],
            [Finding(**one) for one in told["findings"]],
            {name: Fact(**one) for name, one in told["facts"].items()},
            told["clock_s"],
            told["clock_bound_s"],
            Bandwidth(**told["bandwidth"]) if told["bandwidth"] else None,
        )


@dataclass(frozen=True, slots=True)
class Report:
    nodes: list[str]
    findings: list[Finding]
    bandwidth: Bandwidth | None
    seconds: float

    @property
    def status(self) -> Status:
        """The worst there is."""
        found: set[Status] = {finding.status for finding in self.findings}
        return "fail" if "fail" in found else "warn" if "warn" in found else "ok"

    def unfit(self) -> dict[str, str]:
        """Nodes at fault, and why; none where a check failed on all of several.

        What lies between two nodes is the fault of one that has it with most of the others.
        """
        why: dict[str, list[str]] = {}
        between = Counter[str]()
        for one in (finding for finding in self.findings if finding.status == "fail"):
            told = f"{one.node}: {one.check}: {one.value}"
            if one.check in BETWEEN_NODES:
                between[one.node] += 1
                if between[one.node] <= len(self.nodes) / 2:
                    continue
            why.setdefault(one.node, []).append(told)
        if 1 < len(self.nodes) == len(why):
            return {}
        return {node: "; ".join(parts) for node, parts in why.items()}

    def as_json(self) -> dict[str, Any]:
        return {"status": self.status, **asdict(self)}
