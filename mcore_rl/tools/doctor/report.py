"""Request to the doctor, findings of nodes, their comparison, and the report that is printed.

Requests and findings are plain data, which crosses processes as JSON.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcore_rl.observability.console import get_stdout_console

Status = Literal["ok", "warn", "fail"]
PAIR_CHECKS = ("network", "shared path")  # of two nodes, reported by each of them
_MISSING = "none"
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_MOST_VALUES = 2  # shown of nodes without a fault


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """The same for every node; a size is in gigabytes (10^9 bytes), a time in seconds."""

    output_dir: str  # absolute
    run: str  # a random name for the files of this check
    model_path: str = ""  # absolute; empty: no model is checked
    min_shm_gb: float = 1.0
    min_disk_gb: float = 1.0
    max_skew_s: float = 1.0
    ports: tuple[int, ...] = ()
    interface: str = ""  # empty: that by which a node reaches the coordinator
    bandwidth: bool = False
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check on one node. Without `wanted` the value is only shown."""

    check: str
    node: str
    status: Status
    value: str
    wanted: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """A value that should be the same on all nodes, and the status where it is not."""

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
    """Findings and facts of one node."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Fact] = field(default_factory=dict)
    clock_s: float = 0.0  # behind the clock of the coordinator
    clock_bound_s: float = 0.0  # largest error of it
    bandwidth: Bandwidth | None = None  # of all nodes, from the first one

    def add(
        self, check: str, status: Status, value: str, wanted: str = "", remedy: str = ""
    ) -> None:
        advice = "" if status == "ok" else remedy
        self.findings.append(Finding(check, self.name, status, value, wanted, advice))

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> NodeReport:
        """Build a report from what dataclasses.asdict has made of it."""
        return cls(
            fields["name"],
            [Finding(**finding) for finding in fields["findings"]],
            {name: Fact(**fact) for name, fact in fields["facts"].items()},
            fields["clock_s"],
            fields["clock_bound_s"],
            Bandwidth(**fields["bandwidth"]) if fields["bandwidth"] else None,
        )


@dataclass(frozen=True, slots=True)
class Report:
    nodes: list[str]
    findings: list[Finding]
    bandwidth: Bandwidth | None
    seconds: float

    @property
    def status(self) -> Status:
        """The worst status of all findings."""
        statuses: set[Status] = {finding.status for finding in self.findings}
        return "fail" if "fail" in statuses else "warn" if "warn" in statuses else "ok"

    def list_unfit_nodes(self) -> dict[str, str]:
        """Return the nodes at fault with the reasons; none if all of several nodes are.

        A check of two nodes counts against a node that fails it with most of the others.
        """
        reasons: dict[str, list[str]] = {}
        pair_faults = Counter[str]()
        for finding in self.findings:
            if finding.status != "fail":
                continue
            if finding.check in PAIR_CHECKS:
                pair_faults[finding.node] += 1
                if pair_faults[finding.node] <= len(self.nodes) / 2:
                    continue
            text = f"{finding.node}: {finding.check}: {finding.value}"
            reasons.setdefault(finding.node, []).append(text)
        if 1 < len(self.nodes) == len(reasons):
            return {}
        return {node: "; ".join(texts) for node, texts in reasons.items()}

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status, **asdict(self)}


def compare_facts(
    reports: Sequence[NodeReport], pins: Mapping[str, Requirement]
) -> Iterator[Finding]:
    """Yield a finding for each fact of each node, by the majority of nodes or else the first."""
    for name in dict.fromkeys(name for report in reports for name in report.facts):
        with_answer = [report for report in reports if not _has_no_answer(report, name)]
        facts = {report.name: report.facts.get(name) for report in with_answer}
        values = {node: fact.value if fact else _MISSING for node, fact in facts.items()}
        majority = Counter(values.values()).most_common(1)[0][0]
        nodes = [node for node, value in values.items() if value == majority]
        level = next(fact.if_differs for fact in facts.values() if fact)
        for node, value in values.items():
            if value != majority:
                wanted = f"{majority}, as on {_join_nodes(nodes)}"
                yield Finding(name, node, level, value, wanted, "make the nodes alike")
            else:
                yield _compare_with_pin(name, node, Fact(value), pins.get(name))


def _has_no_answer(report: NodeReport, name: str) -> bool:
    """Return whether a node could not get a fact, for which it has a finding."""
    return name not in report.facts and any(f.check == name for f in report.findings)


def _compare_with_pin(name: str, node: str, fact: Fact, pin: Requirement | None) -> Finding:
    """Warn about a version that this project is not tested with; it may work."""
    if pin is None or pin.specifier.contains(fact.value, prereleases=True):
        return Finding(name, node, "ok", fact.value)
    remedy = "bash launch/setup_env.sh"
    return Finding(name, node, "warn", fact.value, str(pin.specifier), remedy)


def compare_clocks(reports: Sequence[NodeReport], max_skew_s: float) -> Iterator[Finding]:
    """Compare each clock with the median of all nodes and this machine.

    A difference within the error of the measurement is no fault.
    """
    if len(reports) < 2:
        return
    clocks = [("the node that asks", 0.0, 0.0)]
    clocks += [(report.name, report.clock_s, report.clock_bound_s) for report in reports]
    middle = sorted(clocks, key=lambda clock: clock[1])[(len(clocks) - 1) // 2]
    for name, clock_s, bound_s in clocks[1:]:
        behind_s = clock_s - middle[1]
        bound_s = bound_s + middle[2] if name != middle[0] else 0.0
        if abs(behind_s) - bound_s <= max_skew_s:
            at_most_ms = math.ceil((abs(behind_s) + bound_s) * 1e3)
            value = f"within {at_most_ms / 1e3:.3f} s of {middle[0]}"
            yield Finding("clock", name, "ok", value, f"within {max_skew_s:g} s")
            continue
        word = "behind" if behind_s > 0 else "ahead of"
        value = f"{abs(behind_s):.3f} s {word} {middle[0]} (give or take {bound_s:.3f} s)"
        remedy = "synchronise the clocks: chronyc tracking, timedatectl"
        yield Finding("clock", name, "fail", value, f"within {max_skew_s:g} s", remedy)


def find_slow_pairs(bandwidth: Bandwidth) -> Iterator[Finding]:
    """Yield pairs below half of the median of their kind, inside a node or between two."""
    for kind, pairs in (("inside a node", bandwidth.inside), ("between nodes", bandwidth.between)):
        if not pairs:
            continue
        median = statistics.median(speed for *_, speed in pairs)
        for first, second, speed in pairs:
            if speed < median / 2:
                node = ", ".join(dict.fromkeys(n.rpartition(":")[0] for n in (first, second)))
                value = f"{first} and {second}: {_format_speed(speed)}"
                wanted = f"at least half of the median {kind}, {_format_speed(median)}"
                remedy = "see cables, NICs, NCCL_IB_HCA and NCCL_SOCKET_IFNAME of these nodes"
                yield Finding("bandwidth", node, "warn", value, wanted, remedy)


def describe_bandwidth(bandwidth: Bandwidth) -> Iterator[str]:
    yield (
        f"all-reduce of {bandwidth.num_ranks} ranks over {bandwidth.backend}: "
        f"{_format_speed(bandwidth.all_reduce)} (of the bus)"
    )
    for kind, pairs in (("inside a node", bandwidth.inside), ("between nodes", bandwidth.between)):
        if pairs:
            speeds = [speed for *_, speed in pairs]
            yield (
                f"{len(pairs)} pairs {kind}: median {_format_speed(statistics.median(speeds))}, "
                f"slowest {_format_speed(min(speeds))} in each direction"
            )


def _format_speed(speed: float) -> str:
    return f"{speed / 1e9:.3g} GB/s"


def _join_nodes(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")


def print_report(report: Report, *, quiet: bool, console: Console | None = None) -> None:
    """Print a table, then a line for each fault with what to do; with `quiet` faults only."""
    console = console or get_stdout_console()
    if not quiet:
        console.print(_build_table(report))
        for line in describe_bandwidth(report.bandwidth) if report.bandwidth else ():
            console.print(line, highlight=False)
    faults = [finding for finding in report.findings if finding.status != "ok"]
    for finding in faults:
        mark = (finding.status.upper(), _STYLES[finding.status])
        console.print(Text.assemble(mark, f" {_format_fault(finding)}"), soft_wrap=True)
    if faults or not quiet:
        count = {status: sum(f.status == status for f in faults) for status in ("fail", "warn")}
        console.print(
            f"{len(report.nodes)} {'nodes' if len(report.nodes) > 1 else 'node'}: "
            f"{count['fail']} failed, {count['warn']} warnings, {report.seconds:.1f} s",
            highlight=False,
        )


def _format_fault(finding: Finding) -> str:
    wanted = f"; wanted: {finding.wanted}" if finding.wanted else ""
    remedy = f". To do: {finding.remedy}" if finding.remedy else ""
    return f"{finding.node}: {finding.check}: {finding.value}{wanted}{remedy}"


def _build_table(report: Report) -> Table:
    table = Table()
    for column in ("", "check", "nodes", "found"):
        table.add_column(column)
    for check in dict.fromkeys(finding.check for finding in report.findings):
        findings = [finding for finding in report.findings if finding.check == check]
        good = [finding for finding in findings if finding.status == "ok"]
        if good:
            values = list(dict.fromkeys(finding.value for finding in good))
            more = f" and {len(values) - _MOST_VALUES} more" if len(values) > _MOST_VALUES else ""
            value = "; ".join(values[:_MOST_VALUES]) + more
            table.add_row(
                _style_status("ok"), check, _summarize_nodes(good, report.nodes), Text(value)
            )
        for finding in findings:
            if finding.status != "ok":
                table.add_row(
                    _style_status(finding.status), check, finding.node, Text(finding.value)
                )
    return table


def _style_status(status: str) -> Text:
    return Text(status, style=_STYLES[status])


def _summarize_nodes(findings: Sequence[Finding], nodes: Sequence[str]) -> str:
    names = list(dict.fromkeys(finding.node for finding in findings))
    if len(names) == len(nodes):
        return "all" if len(nodes) > 1 else nodes[0]
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} nodes"
