"""The Ray of one node of a job, which launch/*.sh start on each node and which leaves nothing.

    python -m mcore_rl.controller.node address --interface eth0
    python -m mcore_rl.controller.node hold --head 10.0.0.1:20000 --logs FOLDER <pipe
    python -m mcore_rl.controller.node wait --head 10.0.0.1:20000 --names n1,n2 ...
    python -m mcore_rl.controller.node sweep

`hold` runs `ray start --block` until its standard input ends, which it does however the launch
script ends; over ssh, too. SIGTERM and the signals by which a batch system asks for the end of a
job are not for it: the driver saves meanwhile, and needs Ray for that. Ray authenticates by the
token that RAY_AUTH_TOKEN_PATH names. Which node this is, MCORE_RL_NODE and MCORE_RL_NODE_NUMBER
tell, or SLURM.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller.node_limits import num_cores
from mcore_rl.controller.object_store import object_store_bytes
from mcore_rl.controller.reaper import RAY_DIR, sweep_abandoned
from mcore_rl.controller.run_scope import MARKER, run_scope, short_temp_dir
from mcore_rl.parallel.network import find_address

NODE = "MCORE_RL_NODE"  # in the environment of a node's processes: how messages call it
NUMBER = "MCORE_RL_NODE_NUMBER"  # 0 has the head
RAY_CONFIG: dict[str, bool | int] = {
    # Workers kept ready would never be used: each rank has an environment of its own.
    "prestart_worker_first_driver": False,
    # Ray would kill Python's resource trackers too, before they unlink shared memory that the
    # reaper may not have seen yet. What else workers have started is the reaper's to kill.
    "kill_child_processes_on_worker_exit": False,
    # A record of each call, for `ray list tasks` and the dashboard, which nothing here has: without
    # it a call takes the driver a fifth less CPU time.
    "task_events_report_interval_ms": 0,
    # Added to the niceness of the node; Ray's own default is 15 (ray_config_def.h, applied by
    # core_worker_process.cc), at which ranks starve beside any other program of the machine.
    "worker_niceness": 0,
}
# A node that is gone is known to be so after 5 looks, a second apart; Ray's own pace takes 15 s.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 5,
}
_OPTIONS = (
    "node-manager-port", "object-manager-port", "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port", "runtime-env-agent-port", "metrics-export-port",
    # Unused; Ray refuses 10001 and 8265, which they would take, to the others.
    "ray-client-server-port", "dashboard-port",
)  # fmt: skip
NUM_PORTS = 64  # of a node: the head's, those of _OPTIONS, of workers
NODES_APART = 4
_FIRST_WORKER_PORT = 9
_MOST_FILES = 65536
_LOOK_S = 0.5


def main(arguments: list[str]) -> int:
    """Runs a command; the exit status is 2 for what a user can change."""
    if arguments[:1] == ["ray"]:  # `ray start`, as `hold` needs it
        return _run_ray(arguments)
    options = _parser().parse_args(arguments)
    try:
        if options.command == "address":
            print(own_address(options.interface))
        elif options.command == "sweep":
            for scratch in sweep_abandoned(short_temp_dir()):
                print(f"{_here()}: removed what an earlier job has left, {scratch}")
        elif options.command == "wait":
            wait_for_nodes(options.head, options.names.split(","), options.seconds, options.logs)
        else:
            hold(options)
    except ConfigError as error:
        print(f"mcore-rl node: {error}", file=sys.stderr)
        return 2
    return 0


def own_address(interface: str) -> str:
    """By which other nodes reach this one."""
    try:
        return find_address(interface)
    except ConfigError as error:
        raise ConfigError(f"{_here()}: {error} (MCORE_RL_INTERFACE={interface!r})") from error


def hold(options: argparse.Namespace) -> None:
    """Runs Ray until stdin ends.

    Raises:
        ConfigError: a port is taken, /dev/shm is small, or Ray ended by itself; LOGS/NAME.failed
            has the reason, too.
    """
    logs, name = Path(options.logs), _here()
    os.environ[NODE] = name
    try:
        _check_logs(logs)
        print_to(logs / f"node-{name}.log")
        options.object_store_bytes = object_store_bytes(
            options.object_store_bytes, setting="--object-store-bytes"
        )
        number = int(os.environ.get(NUMBER) or os.environ.get("SLURM_NODEID") or 0)
        address, first = own_address(options.interface), first_port(options.head, number)
        check_ports(address, first, is_head=number == 0)
        _raise_file_limit()
        with run_scope(logs=logs / f"ray-{name}") as scratch:
            _ignore_signals()
            is_head = number == 0
            command = ray_command(options, name, address, first, scratch, is_head=is_head)
            with _ray(command) as ray:
                _wait_for_end(ray, logs)
    except ConfigError as error:
        with contextlib.suppress(OSError):
            (logs / f"{name}.failed").write_text(f"{error}\n")
        raise


def first_port(head: str, number: int) -> int:
    """Of a node; nodes of one machine, which only tests have, differ by their numbers."""
    return int(head.rpartition(":")[2]) + NUM_PORTS * (number % NODES_APART)


def check_ports(address: str, first: int, *, is_head: bool) -> None:
    """Raises ConfigError for one that something listens on.

    At any address of this machine, as 127.0.0.1: Ray listens at all of them.
    """
    is_dual = socket.has_dualstack_ipv6()
    for port in range(first if is_head else first + 1, first + NUM_PORTS):
        with socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_dual:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                sock.bind(("", port))
            except OSError as error:
                raise ConfigError(
                    f"{_here()}: port {address}:{port} cannot be had ({error.strerror}); Ray takes "
                    f"{first} to {first + NUM_PORTS - 1} there. Set MCORE_RL_FIRST_PORT to the "
                    f"first of {NUM_PORTS * NODES_APART} ports that are free on every node"
                ) from error


def wait_for_nodes(head: str, names: list[str], seconds: float, logs: str) -> None:
    """Returns when all of them are alive in the cluster.

    Raises:
        ConfigError: some are not after that time, or one has failed; it says which, and why.
    """
    deadline = time.monotonic() + seconds
    alive: set[str] = set()
    while missing := [name for name in names if name not in alive]:
        if failed := sorted(Path(logs).glob("*.failed")):
            raise ConfigError("; ".join(file.read_text().strip() for file in failed))
        if time.monotonic() > deadline:
            told = (
                f"{', '.join(missing)} did not join the Ray of {head} in {seconds:g} s; alive: "
                f"{', '.join(sorted(alive)) or 'none'}. Look into {logs}/node-NAME.log, and "
                "whether nodes reach that address (MCORE_RL_INTERFACE, a firewall)"
            )
            # Where most are missing it is the first one that cannot be reached.
            for name in missing if len(missing) <= len(alive) else names[:1]:
                (Path(logs) / f"{name}.failed").write_text(f"{told}\n")
            raise ConfigError(told)
        time.sleep(_LOOK_S)
        alive = _alive(head)


def _alive(head: str) -> set[str]:
    """Names of nodes; empty while the head does not answer."""
    from ray._raylet import GcsClient

    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return set()
    try:
        found = GcsClient(address=head).get_all_node_info(timeout=10)
    except Exception as error:
        if "nauthenticated" in str(error) or "token" in str(error):
            raise ConfigError(
                f"the Ray at {head} has another token than "
                f"{os.environ.get('RAY_AUTH_TOKEN_PATH')}: it is another job's, or the file was "
                "changed. Set MCORE_RL_FIRST_PORT, or start the job again"
            ) from error
        return set()
    return {info.node_name for info in found.values() if info.state == 0}  # GcsNodeState.ALIVE


@contextlib.contextmanager
def _ray(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own, so that what a batch system tells a task reaches us alone."""
    print(" ".join(command), flush=True)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()  # whatever is left then is the reaper's
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def ray_command(
    options: argparse.Namespace,
    name: str,
    address: str,
    first: int,
    scratch: Path,
    *,
    is_head: bool,
) -> list[str]:
    """`ray start` on fixed ports of one address, without a dashboard."""
    last = first + NUM_PORTS - 1
    command = [sys.executable, "-m", "mcore_rl.controller.node", "ray", "start", "--block"]
    command += [f"--node-ip-address={address}", f"--node-name={name}"]
    command += [f"--temp-dir={scratch / RAY_DIR}", f"--num-cpus={options.cpus}"]
    command += [f"--object-store-memory={options.object_store_bytes}"]
    command += [f"--{name}={first + 1 + index}" for index, name in enumerate(_OPTIONS)]
    command += [f"--min-worker-port={first + _FIRST_WORKER_PORT}", f"--max-worker-port={last}"]
    command += ["--disable-usage-stats", "--include-log-monitor=false"]
    ranks = options.ranks if options.ranks >= 0 else _cpu_ranks()
    if ranks:
        command.append(f"--resources={json.dumps({'rank': ranks})}")
    if not is_head:
        return [*command, f"--address={options.head}"]
    config = json.dumps(RAY_CONFIG | HEALTH)
    command += ["--head", f"--port={first}"]
    return [*command, "--include-dashboard=false", "--no-monitor", f"--system-config={config}"]


def _run_ray(arguments: list[str]) -> int:
    from ray.scripts.scripts import main as ray

    from mcore_rl.controller.pool import lean_node

    sys.argv = arguments
    with lean_node():
        _read_agent()
        ray()
    return 0


def _read_agent() -> None:
    """Imports what Ray's agent of a node does, so that its files are in this node's memory.

    The agent is given 15 s for it, no setting changes that, and a shared file system may need more.
    """
    from ray.dashboard.utils import DashboardAgentModule, get_all_modules

    importlib.import_module("ray.dashboard.agent")
    logging.disable()  # it says of most of them what they lack
    get_all_modules(DashboardAgentModule)
    logging.disable(logging.NOTSET)


def _wait_for_end(ray: subprocess.Popen[bytes], logs: Path) -> None:
    while ray.poll() is None:
        if select.select([sys.stdin], [], [], _LOOK_S)[0] and not os.read(sys.stdin.fileno(), 4096):
            return
    raise ConfigError(
        f"{_here()}: Ray has ended with status {ray.returncode}; {logs}/node-{_here()}.log and "
        f"{logs}/ray-{_here()} say why"
    )


def _check_logs(logs: Path) -> None:
    if not logs.is_dir():
        raise ConfigError(
            f"{_here()} does not see {logs}, which the launch script has made: output_dir must be "
            "on a file system that all nodes share"
        )


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def print_to(log: Path) -> None:
    """Both streams of this process, and of those that it starts, go to the end of a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # and not SIG_IGN, which Ray would inherit
    # SLURM sends it to every process of a step, so all that Ray starts has to inherit this.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _cpu_ranks() -> int:
    """One for each core that the job has on a node without GPUs."""
    return 0 if any(Path("/dev").glob("nvidia[0-9]*")) else num_cores()


def _here() -> str:
    return os.environ.get(NODE) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mcore_rl.controller.node")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("sweep", help="remove what jobs of this user have left that are gone")
    address = commands.add_parser("address", help="print this node's address")
    address.add_argument("--interface", default="")
    waiting = commands.add_parser("wait", help="wait until all nodes are in the cluster")
    waiting.add_argument("--names", required=True)
    waiting.add_argument("--seconds", type=float, required=True)
    holding = commands.add_parser("hold", help="run this node's Ray until stdin ends")
    holding.add_argument("--interface", default="")
    holding.add_argument("--ranks", type=int, default=-1, help="CPU lane: devices of this node")
    holding.add_argument("--cpus", type=int, default=1)
    holding.add_argument("--object-store-bytes", type=int, default=0)
    for command in (waiting, holding):
        command.add_argument("--head", required=True, help="ADDRESS:PORT")
        command.add_argument("--logs", required=True, help="a folder that all nodes share")
    return parser


if __name__ == "__main__":
    os.environ.pop(MARKER, None)
    sys.exit(main(sys.argv[1:]))
