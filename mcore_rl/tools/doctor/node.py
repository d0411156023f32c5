"""What each node does: it looks at itself and at the others, and tells who asked.

Nodes and the one that asks meet at a rendezvous. Each node has one of its own, too, to which the
others connect, with a token: so a firewall between two nodes is seen.

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
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer, address_of
from mcore_rl.parallel.rendezvous_client import LateError, LostError, RendezvousClient
from mcore_rl.tools.doctor import devices, software, system
from mcore_rl.tools.doctor.findings import DoctorRequest, NodeReport

_CONNECT_S = 5.0  # for one connection between two nodes
_NUM_CLOCK_READINGS = 10  # the one with the shortest round trip counts


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # files are removed
    name = os.environ.get("SLURMD_NODENAME", "")
    examine(RendezvousEndpoint.from_environment(), int(os.environ["SLURM_NODEID"]), name)


def examine(endpoint: RendezvousEndpoint, number: int, name: str = "") -> None:
    """Tell the rendezvous all about this node, the `number`-th, as it is asked there.

    Raises:
        LostError, LateError: the one that asks is gone.
    """
    client = RendezvousClient(endpoint, number, number + 1, _CONNECT_S * 2)
    with contextlib.closing(client):
        told = json.loads(client.get(["request"], _CONNECT_S * 2)[0])
        request = DoctorRequest(**told["request"])
        node = _Node(client, request, number, told["nodes"], name or told["nodes"][number])
        report = node.look()
        client.set(f"report/{number}", json.dumps(asdict(report)).encode())


class _Node:
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
        self._others = [other for other in range(len(nodes)) if other != number]
        self._report = NodeReport(name)
        self._wait_s = request.timeout_s / 2  # the one that asks waits for longer than this

    def look(self) -> NodeReport:
        if not self._others:
            self._look_at_itself()
        else:
            self._doing("starting")
            with self._published():
                self._look_at_itself()
                self._look_at_others()
        if self._request.bandwidth and len(self._others) == len(self._nodes) - 1:
            self._doing("measuring bandwidth")
            from mcore_rl.tools.doctor import ranks

            ranks.measure(self._report, self._client, self._number, self._nodes, self._wait_s)
        return self._report

    def _doing(self, what: str) -> None:
        """Told when this node does not come back from it, as from a file server that is gone."""
        self._client.set(f"at/{self._number}", what.encode())

    def _look_at_itself(self) -> None:
        report, request = self._report, self._request
        self._doing("asking for versions")
        report.facts.update(software.facts())
        software.look_at_model_runner(report)
        software.look_at_compilers(report)
        self._doing("asking nvidia-smi")
        devices.look(report)
        system.look_at_limits(report)
        system.look_at_niceness(report)
        system.look_at_shared_memory(report, request)
        system.look_at_host_name(report)
        system.look_at_ports(report, request)
        self._doing("trying sandboxes")
        system.look_at_sandbox(report)
        model_bytes = 0
        if request.model_path:
            self._doing(f"reading {request.model_path}")
            model_bytes = system.look_at_model(report, request)
        output, temp = Path(request.output_dir), Path(tempfile.gettempdir())
        wanted_gb = max(request.min_disk_gb, model_bytes / 1e9)
        for check, path, min_gb, setting in (
            ("output folder", output, wanted_gb, "--output-dir"),
            ("temporary files", temp, request.min_disk_gb, "TMPDIR"),
        ):
            self._doing(f"writing in {path}")
            system.look_at_folder(report, check, path, min_gb, setting)

    @contextlib.contextmanager
    def _published(self) -> Iterator[None]:
        """A rendezvous of this node and a file in the output folder, for the others."""
        with contextlib.ExitStack() as stack:
            mine: dict[str, Any] = {"name": self._report.name, "endpoint": None, "file": ""}
            try:
                address = self._own_address()
                server = stack.enter_context(RendezvousServer(address))
                mine["endpoint"] = asdict(server.endpoint)
            except ConfigError as error:
                self._report.add("network", "fail", str(error), "an address", "--interface")
            self._doing(f"writing in {self._request.output_dir}")
            # A folder where this cannot be has a finding of its own.
            with contextlib.suppress(OSError):
                folder = system.existing(Path(self._request.output_dir))
                file = folder / f".mcore-rl-doctor-{self._request.run}-{self._number}"
                stack.callback(file.unlink, missing_ok=True)
                file.write_text(self._report.name)
                mine["file"] = str(file)
            self._client.set(f"node/{self._number}", json.dumps(mine).encode())
            yield
            self._doing("waiting for the other nodes")
            self._client.set(f"seen/{self._number}", b"")
            self._those_that_come("seen")  # until then they look at what is published here

    def _own_address(self) -> str:
        """Without an interface, by which it reached the one that asks."""
        interface = self._request.interface
        return address_of(interface) if interface else self._client.own_address

    def _look_at_others(self) -> None:
        self._doing("waiting for the other nodes")
        others = {k: json.loads(v) for k, v in self._those_that_come("node").items()}
        for late in set(self._others) - set(others):
            value = f"{self._nodes[late]} did not come in {self._wait_s:.0f} s"
            self._report.add("network", "fail", value, "all nodes", "see the findings of that node")
        self._others = list(others)
        self._doing("connecting to the other nodes")
        self._look_at_network(others)
        self._doing(f"reading in {self._request.output_dir}")
        self._look_at_shared_path(others)
        readings = [self._client.clock() for _ in range(_NUM_CLOCK_READINGS)]
        self._report.clock_s, self._report.clock_bound_s = min(readings, key=lambda one: one[1])

    def _those_that_come(self, kind: str) -> dict[int, bytes]:
        """By number of the node: what it has set."""
        keys = {f"{kind}/{other}": other for other in self._others}
        try:
            values = self._client.get(list(keys), self._wait_s)
        except LateError as error:
            keys = {key: other for key, other in keys.items() if key not in error.keys}
            values = self._client.get(list(keys), _CONNECT_S)
        return dict(zip(keys.values(), values, strict=True))

    def _look_at_network(self, others: Mapping[int, Mapping[str, Any]]) -> None:
        reachable = [one for one in others.values() if one["endpoint"]]
        with ThreadPoolExecutor(16) as threads:
            reasons = list(threads.map(self._connect, reachable))
        for one, reason in zip(reachable, reasons, strict=True):
            if reason:
                host = one["endpoint"]["host"]
                remedy = "open the firewall between them, or choose another network (--interface)"
                value = f"cannot reach {one['name']} at {host}: {reason}"
                self._report.add("network", "fail", value, "a connection", remedy)
        if len(others) == len(self._nodes) - 1 and not any(reasons):
            self._report.add("network", "ok", f"reaches all others ({len(reachable)})")

    def _connect(self, other: Mapping[str, Any]) -> str:
        """Why that does not work; empty when it does."""
        endpoint = RendezvousEndpoint(**other["endpoint"])
        try:
            RendezvousClient(endpoint, self._number, 0, _CONNECT_S).close()
        except LostError as error:
            return str(error.__cause__ or error)
        return ""

    def _look_at_shared_path(self, others: Mapping[int, Mapping[str, Any]]) -> None:
        """The first node reads what all others wrote, and they what the first did."""
        watched = others.values() if self._number == 0 else [others[0]] if 0 in others else []
        unseen = [one for one in watched if one["file"] and not _reads(one)]
        folder = self._request.output_dir
        for one in unseen:
            value = f"{folder}: {one['file']}, written on {one['name']}, is not here"
            remedy = "choose a folder that all nodes share (--output-dir), or mount it here"
            self._report.add("shared path", "fail", value, "one folder on all nodes", remedy)
        if watched and not unseen:
            self._report.add("shared path", "ok", folder)


def _reads(other: Mapping[str, Any]) -> bool:
    try:
        return Path(other["file"]).read_text() == str(other["name"])
    except OSError:
        return False


if __name__ == "__main__":
    main()
