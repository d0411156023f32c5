"""mcore-rl doctor: whether nodes have what a run needs, before one is started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.cli.options import Parser
from mcore_rl.config.checks import check_at_least, check_choice, check_positive
from mcore_rl.config.errors import ConfigError

if TYPE_CHECKING:
    from mcore_rl.tools.doctor.run import Launcher

_ABOUT = """\
Looks at this node, at all nodes of the SLURM allocation that it is started in, or, with RAY_ADDRESS
set, at all nodes of that Ray cluster: versions, GPUs and networks, limits, memory, disks, ports,
clocks, and whether nodes reach each other and share the output folder. The exit status is 1 when a
check failed."""
_TARGETS = ("auto", "this", "slurm", "ray")
_MAX_PORTS = 10_000
_CHECK_S, _BENCHMARK_S = 60.0, 300.0


def main(arguments: list[str]) -> int:
    """Examine the nodes and print a report; return 1 if a check failed, else 0."""
    options = build_parser().parse_args(arguments)
    check_choice("--on", options.on, _TARGETS)
    for name in ("min_shm", "min_disk", "max_skew"):
        check_at_least(f"--{name.replace('_', '-')}", getattr(options, name), 0)
    timeout_s = options.timeout
    if timeout_s is None:
        timeout_s = _BENCHMARK_S if options.bandwidth else _CHECK_S
    check_positive("--timeout", timeout_s)
    from mcore_rl.tools.doctor.report import DoctorRequest, print_report
    from mcore_rl.tools.doctor.run import examine_nodes

    request = DoctorRequest(
        output_dir=str(options.output_dir.absolute()),
        run=secrets.token_hex(4),
        model_path=str(options.model_path.absolute()) if options.model_path else "",
        min_shm_gb=options.min_shm,
        min_disk_gb=options.min_disk,
        max_skew_s=options.max_skew,
        ports=parse_ports(options.ports),
        interface=options.interface,
        bandwidth=options.bandwidth,
        timeout_s=timeout_s,
    )
    with _open_launcher(options.on, options.interface) as launcher:
        report = examine_nodes(request, launcher)
    if options.mark:
        for name, reason in report.list_unfit_nodes().items():
            (options.mark / f"{name}.failed").write_text(f"{reason}\n")
    if options.json:
        json.dump(report.to_json(), sys.stdout, indent=1)
        print()
    else:
        print_report(report, quiet=options.quiet)
    return 1 if report.status == "fail" else 0


@contextlib.contextmanager
def _open_launcher(on: str, interface: str) -> Iterator[Launcher]:
    """Open what runs the checks on the nodes that --on names."""
    from mcore_rl.tools.doctor import node, run

    if on == "auto":
        in_slurm = "SLURM_JOB_NODELIST" in os.environ
        on = "ray" if os.environ.get("RAY_ADDRESS") else "slurm" if in_slurm else "this"
    if on == "this":
        yield run.ThisNode()
    elif on == "slurm":
        yield run.SlurmNodes(interface)
    elif not os.environ.get("RAY_ADDRESS"):
        raise ConfigError("--on=ray: RAY_ADDRESS is not set; allowed: the address of a cluster")
    else:
        from mcore_rl.controller.ray_nodes import RayNodes
        from mcore_rl.controller.ray_session import ray_session
        from mcore_rl.parallel.network import find_address

        with ray_session(log_to_driver=False):
            yield RayNodes(node.examine, find_address(interface) if interface else "")


def parse_ports(text: str) -> tuple[int, ...]:
    """Parse ports and ranges of ports.

    >>> parse_ports("6379,20000-20003")
    (6379, 20000, 20001, 20002, 20003)

    Raises:
        ConfigError: A port is not of that form, or out of range.
    """
    ports: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 0 < first <= last <= 65535:
            raise ConfigError(f"--ports={text}: {part!r}; allowed: numbers and ranges, 1 to 65535")
        ports += range(first, last + 1)
    if len(ports) > _MAX_PORTS:
        raise ConfigError(f"--ports={text}: {len(ports)} ports; allowed: up to {_MAX_PORTS}")
    return tuple(ports)


def build_parser() -> Parser:
    parser = Parser(prog="mcore-rl doctor", description=_ABOUT)
    add = parser.add_argument
    add("--output-dir", type=Path, default=Path("outputs"), help="of the run; default: outputs")
    add("--model-path", type=Path, help="Hugging Face folder: readable, and the same on all nodes")
    add("--ports", default="", metavar="6379,20000-20099", help="that must be free on each node")
    add("--min-shm", type=float, default=1.0, help="GB free in /dev/shm; default: 1")
    add("--min-disk", type=float, default=1.0, help="GB free for output and for TMPDIR; default: 1")
    add("--max-skew", type=float, default=1.0, help="seconds between clocks; default: 1")
    add("--interface", default="", metavar="eth0", help="by which nodes meet; default: the outward")
    add("--bandwidth", action="store_true", help="measure an all-reduce, and pairs of ranks")
    add("--mark", type=Path, metavar="DIR", help="write DIR/NODE.failed for each node at fault")
    add("--on", default="auto", metavar="|".join(_TARGETS), help="which nodes; default: auto")
    add("--timeout", type=float, help="seconds; default: 60, and 300 with --bandwidth")
    add("--quiet", action="store_true", help="print faults only")
    add("--json", action="store_true", help="print one JSON object")
    return parser
