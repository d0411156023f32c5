"""The doctor on one node: checks of itself and of its connections, sent to the coordinator.

Nodes and coordinator meet at a rendezvous. Each node has one of its own, too, to which the other
nodes connect with a token: this detects a firewall between two nodes.

    python -m mcore_rl.tools.doctor.node

is a task of srun, with RENDEZVOUS_* of parallel/rendezvous.py in its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.parallel.network import find_address
from mcore_rl.parallel.rendezvous import (
    RendezvousClient,
    RendezvousConnectionError,
    RendezvousEndpoint,
    RendezvousServer,
    RendezvousTimeoutError,
)
from mcore_rl.tools.doctor import checks
from mcore_rl.tools.doctor.report import DoctorRequest, NodeReport

_CONNECT_S = 5.0  # for one connection between two nodes
_NUM_CLOCK_READINGS = 10  # the one with the shortest round trip counts


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # files are removed
    name = os.environ.get("SLURMD_NODENAME", "")
    examine(RendezvousEndpoint.read_environment(), int(os.environ["SLURM_NODEID"]), name)


def examine(endpoint: RendezvousEndpoint, number: int, name: str = "") -> None:
    """Examine this node, the `number`-th, by the request at the rendezvous; send the report there.

    Raises:
        RendezvousConnectionError, RendezvousTimeoutError: The coordinator is gone.
    """
    client = RendezvousClient(endpoint, number, number + 1, _CONNECT_S * 2)
    with contextlib.closing(client):
        message = json.loads(client.get(["request"], _CONNECT_S * 2)[0])
        request = DoctorRequest(**message["request"])
        node = _Node(client, request, number, message["nodes"], name or message["nodes"][number])
        report = node.examine()
        client.set(f"report/{number}", json.dumps(asdict(report)).encode())


class _Node:
    """This node, its report and its view of the other nodes."""

    def __init__(
        self,
        client: RendezvousClient,
        request: DoctorRequest,
        number: int,
        nodes: Sequence[str],
        name: str,
    ) -> None:
        self._client, self._request = client, request
        self._number, self._nodes = number, nodes
        self._peers = [peer for peer in range(len(nodes)) if peer != number]
        self._report = NodeReport(name)
        self._wait_s = request.timeout_s / 2  # the coordinator waits longer

    def examine(self) -> NodeReport:
        if not self._peers:
            self._check_itself()
        else:
            self._set_activity("starting")
            with self._publish():
                self._check_itself()
                self._check_peers()
        if self._request.bandwidth and len(self._peers) == len(self._nodes) - 1:
            self._set_activity("measuring bandwidth")
            from mcore_rl.tools.doctor.bandwidth import measure_bandwidth

            measure_bandwidth(self._report, self._client, self._number, self._nodes, self._wait_s)
        return self._report

    def _set_activity(self, activity: str) -> None:
        """Announce an activity, to be named if this node hangs in it, as on a lost file server."""
        self._client.set(f"at/{self._number}", activity.encode())

    def _check_itself(self) -> None:
        report, request = self._report, self._request
        self._set_activity("asking for versions")
        report.facts.update(checks.collect_versions())
        checks.check_model_runner(report)
        checks.check_compilers(report)
        self._set_activity("asking nvidia-smi")
        checks.check_devices(report)
        checks.check_limits(report)
        checks.check_niceness(report)
        checks.check_shared_memory(report, request)
        checks.check_host_name(report)
        checks.check_ports(report, request)
        self._set_activity("trying sandboxes")
        checks.check_sandbox(report)
        model_bytes = 0
        if request.model_path:
            self._set_activity(f"reading {request.model_path}")
            model_bytes = checks.check_model(report, request)
        output, temp = Path(request.output_dir), Path(tempfile.gettempdir())
        wanted_gb = max(request.min_disk_gb, model_bytes / 1e9)
        for check, path, min_gb, setting in (
            ("output folder", output, wanted_gb, "--output-dir"),
            ("temporary files", temp, request.min_disk_gb, "TMPDIR"),
        ):
            self._set_activity(f"writing in {path}")
            checks.check_folder(report, check, path, min_gb, setting)

    @contextlib.contextmanager
    def _publish(self) -> Iterator[None]:
        """Open a rendezvous and write a file in the output folder, for the other nodes."""
        with contextlib.ExitStack() as stack:
            entry: dict[str, Any] = {"name": self._report.name, "endpoint": None, "file": ""}
            try:
                address = self._find_address()
                server = stack.enter_context(RendezvousServer(address))
                entry["endpoint"] = asdict(server.endpoint)
            except ConfigError as error:
                self._report.add("network", "fail", str(error), "an address", "--interface")
            self._set_activity(f"writing in {self._request.output_dir}")
            # A folder where this cannot be has a finding of its own.
            with contextlib.suppress(OSError):
                folder = checks.find_existing(Path(self._request.output_dir))
                file = folder / f".mcore-rl-doctor-{self._request.run}-{self._number}"
                stack.callback(file.unlink, missing_ok=True)
                file.write_text(self._report.name)
                entry["file"] = str(file)
            self._client.set(f"node/{self._number}", json.dumps(entry).encode())
            yield
            self._set_activity("waiting for the other nodes")
            self._client.set(f"seen/{self._number}", b"")
            self._wait_for_peers("seen")  # until then they read what is published here

    def _find_address(self) -> str:
        """Return the address of the interface, or else that by which it reached the coordinator."""
        interface = self._request.interface
        return find_address(interface) if interface else self._client.own_address

    def _check_peers(self) -> None:
        self._set_activity("waiting for the other nodes")
        entries = {k: json.loads(v) for k, v in self._wait_for_peers("node").items()}
        for late in set(self._peers) - set(entries):
            value = f"{self._nodes[late]} did not come in {self._wait_s:.0f} s"
            self._report.add("network", "fail", value, "all nodes", "see the findings of that node")
        self._peers = list(entries)
        self._set_activity("connecting to the other nodes")
        self._check_network(entries)
        self._set_activity(f"reading in {self._request.output_dir}")
        self._check_shared_path(entries)
        readings = [self._client.measure_clock_offset() for _ in range(_NUM_CLOCK_READINGS)]
        best = min(readings, key=lambda reading: reading[1])
        self._report.clock_s, self._report.clock_bound_s = best

    def _wait_for_peers(self, kind: str) -> dict[int, bytes]:
        """Return the values that peers have set in time, by their numbers."""
        keys = {f"{kind}/{peer}": peer for peer in self._peers}
        try:
            values = self._client.get(list(keys), self._wait_s)
        except RendezvousTimeoutError as error:
            keys = {key: peer for key, peer in keys.items() if key not in error.keys}
            values = self._client.get(list(keys), _CONNECT_S)
        return dict(zip(keys.values(), values, strict=True))

    def _check_network(self, entries: Mapping[int, Mapping[str, Any]]) -> None:
        reachable = [entry for entry in entries.values() if entry["endpoint"]]
        with ThreadPoolExecutor(16) as threads:
            reasons = list(threads.map(self._connect, reachable))
        for entry, reason in zip(reachable, reasons, strict=True):
            if reason:
                host = entry["endpoint"]["host"]
                remedy = "open the firewall between them, or choose another network (--interface)"
                value = f"cannot reach {entry['name']} at {host}: {reason}"
                self._report.add("network", "fail", value, "a connection", remedy)
        if len(entries) == len(self._nodes) - 1 and not any(reasons):
            self._report.add("network", "ok", f"reaches all others ({len(reachable)})")

    def _connect(self, entry: Mapping[str, Any]) -> str:
        """Return why the connection fails; empty if it does not."""
        endpoint = RendezvousEndpoint(**entry["endpoint"])
        try:
            RendezvousClient(endpoint, self._number, 0, _CONNECT_S).close()
        except RendezvousConnectionError as error:
            return str(error.__cause__ or error)
        return ""

    def _check_shared_path(self, entries: Mapping[int, Mapping[str, Any]]) -> None:
        """Read the files of all peers on the first node, and that of the first on the others."""
        first = [entries[0]] if 0 in entries else []
        writers = entries.values() if self._number == 0 else first
        unseen = [entry for entry in writers if entry["file"] and not _can_read(entry)]
        folder = self._request.output_dir
        for entry in unseen:
            value = f"{folder}: {entry['file']}, written on {entry['name']}, is not here"
            remedy = "choose a folder that all nodes share (--output-dir), or mount it here"
            self._report.add("shared path", "fail", value, "one folder on all nodes", remedy)
        if writers and not unseen:
            self._report.add("shared path", "ok", folder)


def _can_read(entry: Mapping[str, Any]) -> bool:
    try:
        return Path(entry["file"]).read_text() == str(entry["name"])
    except OSError:
        return False


if __name__ == "__main__":
    main()
