"""A report for people: a table, then a line for each fault with what to do."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcore_rl.observability.console import get_stdout_console
from mcore_rl.tools.doctor.compare import describe_bandwidth
from mcore_rl.tools.doctor.findings import Finding, Report

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_MOST_VALUES = 2  # of nodes that are all well


def show(report: Report, *, quiet: bool, console: Console | None = None) -> None:
    """With `quiet` faults only, so nothing when all is well."""
    console = console or get_stdout_console()
    if not quiet:
        console.print(_table(report))
        for line in describe_bandwidth(report.bandwidth) if report.bandwidth else ():
            console.print(line, highlight=False)
    faults = [finding for finding in report.findings if finding.status != "ok"]
    for finding in faults:
        mark = (finding.status.upper(), _STYLES[finding.status])
        console.print(Text.assemble(mark, f" {_told(finding)}"), soft_wrap=True)
    if faults or not quiet:
        count = {status: sum(f.status == status for f in faults) for status in ("fail", "warn")}
        console.print(
            f"{len(report.nodes)} {'nodes' if len(report.nodes) > 1 else 'node'}: "
            f"{count['fail']} failed, {count['warn']} warnings, {report.seconds:.1f} s",
            highlight=False,
        )


def _told(finding: Finding) -> str:
    wanted = f"; wanted: {finding.wanted}" if finding.wanted else ""
    remedy = f". To do: {finding.remedy}" if finding.remedy else ""
    return f"{finding.node}: {finding.check}: {finding.value}{wanted}{remedy}"


def _table(report: Report) -> Table:
    table = Table()
    for column in ("", "check", "nodes", "found"):
        table.add_column(column)
    for check in dict.fromkeys(finding.check for finding in report.findings):
        found = [finding for finding in report.findings if finding.check == check]
        good = [finding for finding in found if finding.status == "ok"]
        if good:
            values = list(dict.fromkeys(finding.value for finding in good))
            more = f" and {len(values) - _MOST_VALUES} more" if len(values) > _MOST_VALUES else ""
            value = "; ".join(values[:_MOST_VALUES]) + more
            table.add_row(_mark("ok"), check, _nodes(good, report.nodes), Text(value))
        for finding in found:
            if finding.status != "ok":
                table.add_row(_mark(finding.status), check, finding.node, Text(finding.value))
    return table


def _mark(status: str) -> Text:
    return Text(status, style=_STYLES[status])


def _nodes(findings: Sequence[Finding], nodes: Sequence[str]) -> str:
    named = list(dict.fromkeys(finding.node for finding in findings))
    if len(named) == len(nodes):
        return "all" if len(nodes) > 1 else nodes[0]
    return ", ".join(named) if len(named) <= 3 else f"{len(named)} nodes"
