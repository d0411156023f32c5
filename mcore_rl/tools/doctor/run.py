"""Run of the doctor: nodes are started, awaited with a time limit, and their reports compared.

Nodes are this one, or all of a SLURM allocation; for Ray see controller/ray_nodes.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Protocol

from mcore_rl.config.errors import ConfigError
from mcore_rl.parallel.network import find_address
from mcore_rl.parallel.rendezvous import (
    RendezvousClient,
    RendezvousEndpoint,
    RendezvousServer,
    RendezvousTimeoutError,
)
from mcore_rl.tools.doctor import node
from mcore_rl.tools.doctor.checks import list_requirements
from mcore_rl.tools.doctor.report import (
    DoctorRequest,
    Finding,
    NodeReport,
    Report,
    compare_clocks,
    compare_facts,
    find_slow_pairs,
)

_POLL_S = 0.5  # between checks whether the nodes still run
_ANSWER_S = 10.0  # of our own rendezvous
_NODE_END_S = 10.0  # for the end of nodes that have sent their reports
_SCONTROL_S = 20.0  # for an answer of SLURM's controller
_SRUN_END_S = 10.0


class Launcher(Protocol):
    """Starts `node.examine` on each node."""

    @property
    def nodes(self) -> Sequence[str]:
        """Names of the nodes, in the order of their numbers."""

    @property
    def address(self) -> str:
        """Address by which the nodes reach this machine."""

    def start(self, endpoint: RendezvousEndpoint) -> None:
        """Run `node.examine` on each node."""

    def has_ended(self) -> bool:
        """Return whether all nodes have ended, so that no report will follow."""

    def get_error(self, name: str) -> str:
        """Return the error of a node that did not answer; empty if it is not known."""

    def stop(self) -> None:
        """End all nodes; may be called at any time."""


class ThisNode:
    """This machine, in a thread."""

    def __init__(self) -> None:
        self.nodes = [os.environ.get("SLURMD_NODENAME") or socket.gethostname()]
        self.address = "127.0.0.1"
        self._thread: threading.Thread | None = None

    def start(self, endpoint: RendezvousEndpoint) -> None:
        self._thread = threading.Thread(target=node.examine, args=(endpoint, 0), daemon=True)
        self._thread.start()

    def has_ended(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def get_error(self, name: str) -> str:
        return ""

    def stop(self) -> None:
        pass


class SlurmNodes:
    """All nodes of the allocation that this process is in, by one task of srun on each."""

    def __init__(self, interface: str) -> None:
        """Raise ConfigError outside of an allocation, or in a task of srun on several nodes."""
        listed = os.environ.get("SLURM_JOB_NODELIST")
        if not listed or shutil.which("srun") is None:
            raise ConfigError(
                "--on=slurm: SLURM_JOB_NODELIST is not set, or there is no srun; allowed: inside "
                "an allocation of sbatch or salloc"
            )
        if int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) > 1:
            raise ConfigError(
                "this is a task of srun, and the doctor starts one on each node itself: run it "
                "once, without srun, or with --on=this"
            )
        self.nodes = _run_scontrol("scontrol", "show", "hostnames", listed).split()
        self.address = find_address(interface)
        self._srun: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as this)

    def start(self, endpoint: RendezvousEndpoint) -> None:
        count = str(len(self.nodes))
        command = [
            "srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap",
            "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--export=ALL", "--input=none",
            "--quit-on-interrupt",
        ]  # fmt: skip
        self._srun = subprocess.Popen(
            [*command, sys.executable, "-m", node.__name__],
            env=os.environ | endpoint.to_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )

    def has_ended(self) -> bool:
        return self._srun is not None and self._srun.poll() is not None

    def get_error(self, name: str) -> str:
        """Return the last error of srun that names the node, or else its last error."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        errors = [line for line in lines if re.search("error|Error", line)] or lines
        node_errors = [line for line in errors if re.search(rf"\b{re.escape(name)}\b", line)]
        return ((node_errors or errors)[-1:] or [""])[0].strip()

    def stop(self) -> None:
        if self._srun is None:
            return
        self._srun.terminate()
        try:
            self._srun.wait(_SRUN_END_S)
        except subprocess.TimeoutExpired:
            self._srun.kill()
            self._srun.wait()


def _run_scontrol(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_SCONTROL_S
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip()
        raise ConfigError(f"{' '.join(command)}: {reason}") from error


def examine_nodes(request: DoctorRequest, launcher: Launcher) -> Report:
    """Examine all nodes; one that does not answer is a finding, with its last activity.

    Raises:
        ConfigError: This machine cannot listen on the launcher's address.
    """
    start = time.monotonic()
    nodes = list(launcher.nodes)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RendezvousServer(launcher.address))
        ranks = stack.enter_context(RendezvousServer(launcher.address))
        client = RendezvousClient(server.endpoint, len(nodes), len(nodes), _ANSWER_S)
        stack.callback(client.close)
        client.set("endpoint of ranks", json.dumps(asdict(ranks.endpoint)).encode())
        message = {"request": asdict(request), "nodes": nodes}
        client.set("request", json.dumps(message).encode())
        stack.callback(launcher.stop)
        launcher.start(server.endpoint)
        reports = _gather_reports(client, launcher, start + request.timeout_s)
        _wait_for_end(launcher, _NODE_END_S if len(reports) == len(nodes) else 0.0)
        silent = {
            number: _read_activity(client, number)
            for number in set(range(len(nodes))) - set(reports)
        }
    waited_s = time.monotonic() - start
    findings = [
        _report_silence(nodes[number], activity, waited_s, launcher)
        for number, activity in silent.items()
    ]
    ordered = [reports[number] for number in sorted(reports)]
    findings += compare_facts(ordered, list_requirements())
    findings += [finding for report in ordered for finding in report.findings]
    findings += compare_clocks(ordered, request.max_skew_s)
    bandwidth = next((report.bandwidth for report in ordered if report.bandwidth), None)
    if bandwidth:
        findings += find_slow_pairs(bandwidth)
    return Report(nodes, findings, bandwidth, round(time.monotonic() - start, 3))


def _gather_reports(
    client: RendezvousClient, launcher: Launcher, deadline: float
) -> dict[int, NodeReport]:
    """Return the reports that come until `deadline` or the end of all nodes, by their numbers."""
    keys = [f"report/{number}" for number in range(len(launcher.nodes))]
    while True:
        is_last = launcher.has_ended() or time.monotonic() >= deadline
        try:
            values = client.get(keys, 0.0 if is_last else _POLL_S)
        except RendezvousTimeoutError as error:
            if not is_last:
                continue
            keys = [key for key in keys if key not in error.keys]
            values = client.get(keys, _ANSWER_S)
        numbers = [int(key.partition("/")[2]) for key in keys]
        reports = [NodeReport.parse(json.loads(value)) for value in values]
        return dict(zip(numbers, reports, strict=True))


def _wait_for_end(launcher: Launcher, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not launcher.has_ended() and time.monotonic() < deadline:
        time.sleep(0.05)


def _read_activity(client: RendezvousClient, number: int) -> str:
    """Return the last activity of a node; empty if it has never come."""
    try:
        return client.get([f"at/{number}"], 0.0)[0].decode()
    except RendezvousTimeoutError:
        return ""


def _report_silence(name: str, activity: str, waited_s: float, launcher: Launcher) -> Finding:
    value = f"did not come in {waited_s:.0f} s"
    if activity:
        value = f"no answer in {waited_s:.0f} s, while {activity}"
    if error := launcher.get_error(name):
        value += f": {error}"
    remedy = "see whether the node is up and has this Python at the same path; exclude it"
    return Finding("node", name, "fail", value, "an answer", remedy)
