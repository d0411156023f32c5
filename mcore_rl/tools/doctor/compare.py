"""What nodes tell, compared with each other: versions, clocks, bandwidth. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from packaging.requirements import Requirement

from mcore_rl.tools.doctor.findings import Bandwidth, Fact, Finding, NodeReport

_MISSING = "none"


def compare_facts(
    reports: Sequence[NodeReport], pins: Mapping[str, Requirement]
) -> Iterator[Finding]:
    """Nodes that differ from most others; where there is no majority, from the first."""
    for name in dict.fromkeys(name for report in reports for name in report.facts):
        told = [report for report in reports if not _could_not_tell(report, name)]
        facts = {report.name: report.facts.get(name) for report in told}
        values = {node: fact.value if fact else _MISSING for node, fact in facts.items()}
        most = Counter(values.values()).most_common(1)[0][0]
        alike = [node for node, value in values.items() if value == most]
        level = next(fact.if_differs for fact in facts.values() if fact)
        for node, value in values.items():
            if value != most:
                wanted = f"{most}, as on {_named(alike)}"
                yield Finding(name, node, level, value, wanted, "make the nodes alike")
            else:
                yield _compare_with_pin(name, node, Fact(value), pins.get(name))


def _could_not_tell(report: NodeReport, name: str) -> bool:
    """That is a finding of its own."""
    return name not in report.facts and any(found.check == name for found in report.findings)


def _compare_with_pin(name: str, node: str, fact: Fact, pin: Requirement | None) -> Finding:
    """A version that is not what this project is tested with can work."""
    if pin is None or pin.specifier.contains(fact.value, prereleases=True):
        return Finding(name, node, "ok", fact.value)
    remedy = "bash launch/setup_env.sh"
    return Finding(name, node, "warn", fact.value, str(pin.specifier), remedy)


def compare_clocks(reports: Sequence[NodeReport], max_skew_s: float) -> Iterator[Finding]:
    """Each clock against the one in the middle, of all nodes and of this machine.

    What may be an error of the measurement is no fault.
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


def slow_pairs(bandwidth: Bandwidth) -> Iterator[Finding]:
    """Pairs below half of the median of their kind, inside a node or between two."""
    for kind, pairs in (("inside a node", bandwidth.inside), ("between nodes", bandwidth.between)):
        if not pairs:
            continue
        median = statistics.median(speed for *_, speed in pairs)
        for first, second, speed in pairs:
            if speed < median / 2:
                node = ", ".join(dict.fromkeys(n.rpartition(":")[0] for n in (first, second)))
                value = f"{first} and {second}: {_gb_s(speed)}"
                wanted = f"at least half of the median {kind}, {_gb_s(median)}"
                remedy = "see cables, NICs, NCCL_IB_HCA and NCCL_SOCKET_IFNAME of these nodes"
                yield Finding("bandwidth", node, "warn", value, wanted, remedy)


def describe_bandwidth(bandwidth: Bandwidth) -> Iterator[str]:
    yield (
        f"all-reduce of {bandwidth.num_ranks} ranks over {bandwidth.backend}: "
        f"{_gb_s(bandwidth.all_reduce)} (of the bus)"
    )
    for kind, pairs in (("inside a node", bandwidth.inside), ("between nodes", bandwidth.between)):
        if pairs:
            speeds = [speed for *_, speed in pairs]
            yield (
                f"{len(pairs)} pairs {kind}: median {_gb_s(statistics.median(speeds))}, "
                f"slowest {_gb_s(min(speeds))} in each direction"
            )


def _gb_s(speed: float) -> str:
    return f"{speed / 1e9:.3g} GB/s"


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
