"""Asks all nodes at once, waits for them with a limit, and compares what they tell."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict

from mcore_rl.parallel.rendezvous import RendezvousClient, RendezvousServer, RendezvousTimeoutError
from mcore_rl.tools.doctor import compare, software
from mcore_rl.tools.doctor.findings import DoctorRequest, Finding, NodeReport, Report
from mcore_rl.tools.doctor.launchers import Launcher

_LOOK_S = 0.5  # between two looks at whether the nodes still run
_ANSWER_S = 10.0  # of our own rendezvous
_END_S = 10.0  # what nodes may take that have told all


def examine(request: DoctorRequest, launcher: Launcher) -> Report:
    """A node that does not answer is a finding, with what it was doing.

    Raises ConfigError when this machine cannot listen on the launcher's address.
    """
    start = time.monotonic()
    nodes = list(launcher.nodes)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RendezvousServer(launcher.address))
        ranks = stack.enter_context(RendezvousServer(launcher.address))
        client = RendezvousClient(server.endpoint, len(nodes), len(nodes), _ANSWER_S)
        stack.callback(client.close)
        client.set("endpoint of ranks", json.dumps(asdict(ranks.endpoint)).encode())
        told = {"request": asdict(request), "nodes": nodes}
        client.set("request", json.dumps(told).encode())
        stack.callback(launcher.stop)
        launcher.start(server.endpoint)
        reports = _gather(client, launcher, start + request.timeout_s)
        _let_end(launcher, _END_S if len(reports) == len(nodes) else 0.0)
        silent = {
            number: _doing(client, number) for number in set(range(len(nodes))) - set(reports)
        }
    waited_s = time.monotonic() - start
    findings = [
        _silence(nodes[number], doing, waited_s, launcher) for number, doing in silent.items()
    ]
    found = [reports[number] for number in sorted(reports)]
    findings += compare.compare_facts(found, software.pins())
    findings += [finding for report in found for finding in report.findings]
    findings += compare.compare_clocks(found, request.max_skew_s)
    bandwidth = next((report.bandwidth for report in found if report.bandwidth), None)
    if bandwidth:
        findings += compare.slow_pairs(bandwidth)
    return Report(nodes, findings, bandwidth, round(time.monotonic() - start, 3))


def _gather(client: RendezvousClient, launcher: Launcher, deadline: float) -> dict[int, NodeReport]:
    """By number of the node: those that answer until `deadline`, or until all have ended."""
    keys = [f"report/{number}" for number in range(len(launcher.nodes))]
    while True:
        is_last = launcher.ended() or time.monotonic() >= deadline
        try:
            values = client.get(keys, 0.0 if is_last else _LOOK_S)
        except RendezvousTimeoutError as error:
            if not is_last:
                continue
            keys = [key for key in keys if key not in error.keys]
            values = client.get(keys, _ANSWER_S)
        numbers = [int(key.partition("/")[2]) for key in keys]
        reports = [NodeReport.from_json(json.loads(value)) for value in values]
        return dict(zip(numbers, reports, strict=True))


def _let_end(launcher: Launcher, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not launcher.ended() and time.monotonic() < deadline:
        time.sleep(0.05)


def _doing(client: RendezvousClient, number: int) -> str:
    """What a node last said that it does; empty when it has never come."""
    try:
        return client.get([f"at/{number}"], 0.0)[0].decode()
    except RendezvousTimeoutError:
        return ""


def _silence(name: str, doing: str, waited_s: float, launcher: Launcher) -> Finding:
    value = f"did not come in {waited_s:.0f} s"
    if doing:
        value = f"no answer in {waited_s:.0f} s, while {doing}"
    if why := launcher.why(name):
        value += f": {why}"
    remedy = "see whether the node is up and has this Python at the same path; exclude it"
    return Finding("node", name, "fail", value, "an answer", remedy)
