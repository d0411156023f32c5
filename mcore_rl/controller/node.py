"""Ray on one node of a job: launch/*.sh start it on each node, and it leaves nothing behind.

    python -m mcore_rl.controller.node address --interface eth0
    python -m mcore_rl.controller.node hold --head 10.0.0.1:20000 --logs FOLDER <pipe
    python -m mcore_rl.controller.node wait --head 10.0.0.1:20000 --names n1,n2 ...
    python -m mcore_rl.controller.node sweep

`hold` runs `ray start --block` until its standard input ends, which happens however the launch
script ends, over ssh, too. It ignores SIGTERM and the signals by which a batch system asks a job to
end: the driver saves meanwhile, and needs Ray for that. Ray authenticates by the token in
RAY_AUTH_TOKEN_PATH. Name and number of the node are MCORE_RL_NODE and MCORE_RL_NODE_NUMBER, or
those of SLURM.
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
from mcore_rl.controller.object_store import choose_object_store_bytes
from mcore_rl.controller.process_cleanup import MARKER, clean_up_on_exit, get_short_temp_dir
from mcore_rl.controller.ray_patches import HEALTH_CONFIG, RAY_CONFIG, skip_node_services
from mcore_rl.controller.reaper import RAY_DIR, remove_abandoned
from mcore_rl.parallel.host_limits import count_cores
from mcore_rl.parallel.network import find_address

NODE = "MCORE_RL_NODE"  # environment variable: the name of the node in messages
NUMBER = "MCORE_RL_NODE_NUMBER"  # environment variable; 0 has the head
_OPTIONS = (
    "node-manager-port", "object-manager-port", "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port", "runtime-env-agent-port", "metrics-export-port",
    # Unused; by default they take 10001 and 8265, which Ray then refuses to all others.
    "ray-client-server-port", "dashboard-port",
)  # fmt: skip
NUM_PORTS = 64  # of a node: the head, those of _OPTIONS, workers
NODES_APART = 4  # nodes of one machine, in tests, that have different ports
_FIRST_WORKER_PORT = 9
_MAX_FILES = 65536
_POLL_S = 0.5


def main(arguments: list[str]) -> int:
    """Run a command; return the exit status, which is 2 for input that a user can change."""
    if arguments[:1] == ["ray"]:  # `ray start`, as `hold` needs it
        return _run_ray(arguments)
    options = _build_parser().parse_args(arguments)
    try:
        if options.command == "address":
            print(get_node_address(options.interface))
        elif options.command == "sweep":
            for temp_dir in remove_abandoned(get_short_temp_dir()):
                print(f"{_get_node_name()}: removed what an earlier job has left, {temp_dir}")
        elif options.command == "wait":
            wait_for_nodes(options.head, options.names.split(","), options.seconds, options.logs)
        else:
            hold(options)
    except ConfigError as error:
        print(f"mcore-rl node: {error}", file=sys.stderr)
        return 2
    return 0


def get_node_address(interface: str) -> str:
    """Return the address by which other nodes reach this one."""
    try:
        return find_address(interface)
    except ConfigError as error:
        message = f"{_get_node_name()}: {error} (MCORE_RL_INTERFACE={interface!r})"
        raise ConfigError(message) from error


def hold(options: argparse.Namespace) -> None:
    """Run Ray until stdin ends.

    Raises:
        ConfigError: a port is taken, /dev/shm is small, or Ray has ended by itself. The reason is
            also written to LOGS/NAME.failed.
    """
    logs, name = Path(options.logs), _get_node_name()
    os.environ[NODE] = name
    try:
        _check_logs(logs)
        redirect_output(logs / f"node-{name}.log")
        options.object_store_bytes = choose_object_store_bytes(
            options.object_store_bytes, setting="--object-store-bytes"
        )
        number = int(os.environ.get(NUMBER) or os.environ.get("SLURM_NODEID") or 0)
        address, first = get_node_address(options.interface), get_first_port(options.head, number)
        check_ports(address, first, is_head=number == 0)
        _raise_file_limit()
        with clean_up_on_exit(logs=logs / f"ray-{name}") as temp_dir:
            _ignore_signals()
            is_head = number == 0
            command = build_ray_command(options, name, address, first, temp_dir, is_head=is_head)
            with _start_ray(command) as ray:
                _wait_for_end(ray, logs)
    except ConfigError as error:
        with contextlib.suppress(OSError):
            (logs / f"{name}.failed").write_text(f"{error}\n")
        raise


def get_first_port(head: str, number: int) -> int:
    """Return the first port of a node; nodes on one machine, in tests, get different ones."""
    return int(head.rpartition(":")[2]) + NUM_PORTS * (number % NODES_APART)


def check_ports(address: str, first: int, *, is_head: bool) -> None:
    """Raise ConfigError if something listens on a port, at any address of this machine.

    Ray listens at all addresses.
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
                    f"{_get_node_name()}: port {address}:{port} cannot be had ({error.strerror}); "
                    f"Ray takes {first} to {first + NUM_PORTS - 1} there. Set MCORE_RL_FIRST_PORT "
                    f"to the first of {NUM_PORTS * NODES_APART} ports that are free on every node"
                ) from error


def wait_for_nodes(head: str, names: list[str], seconds: float, logs: str) -> None:
    """Wait until all nodes of these names are alive in the cluster.

    Raises:
        ConfigError: some are not after that time, or one has failed.
    """
    deadline = time.monotonic() + seconds
    alive: set[str] = set()
    while missing := [name for name in names if name not in alive]:
        if failed := sorted(Path(logs).glob("*.failed")):
            raise ConfigError("; ".join(file.read_text().strip() for file in failed))
        if time.monotonic() > deadline:
            message = (
                f"{', '.join(missing)} did not join the Ray of {head} in {seconds:g} s; alive: "
                f"{', '.join(sorted(alive)) or 'none'}. Look into {logs}/node-NAME.log, and "
                "whether nodes reach that address (MCORE_RL_INTERFACE, a firewall)"
            )
            # If most are missing, the first one cannot be reached.
            for name in missing if len(missing) <= len(alive) else names[:1]:
                (Path(logs) / f"{name}.failed").write_text(f"{message}\n")
            raise ConfigError(message)
        time.sleep(_POLL_S)
        alive = _list_alive_nodes(head)


def _list_alive_nodes(head: str) -> set[str]:
    """Return names of nodes; none while the head does not answer."""
    from ray._raylet import GcsClient

    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return set()
    try:
        nodes = GcsClient(address=head).get_all_node_info(timeout=10)
    except Exception as error:
        if "nauthenticated" in str(error) or "token" in str(error):
            raise ConfigError(
                f"the Ray at {head} has another token than "
                f"{os.environ.get('RAY_AUTH_TOKEN_PATH')}: it is another job's, or the file was "
                "changed. Set MCORE_RL_FIRST_PORT, or start the job again"
            ) from error
        return set()
    return {info.node_name for info in nodes.values() if info.state == 0}  # GcsNodeState.ALIVE


@contextlib.contextmanager
def _start_ray(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run Ray in a new session: signals of a batch system to the task reach this process alone."""
    print(" ".join(command), flush=True)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()  # the reaper kills what is left then
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def build_ray_command(
    options: argparse.Namespace,
    name: str,
    address: str,
    first: int,
    temp_dir: Path,
    *,
    is_head: bool,
) -> list[str]:
    """Return the command line of `ray start` on fixed ports of one address, without dashboard."""
    last = first + NUM_PORTS - 1
    command = [sys.executable, "-m", "mcore_rl.controller.node", "ray", "start", "--block"]
    command += [f"--node-ip-address={address}", f"--node-name={name}"]
    command += [f"--temp-dir={temp_dir / RAY_DIR}", f"--num-cpus={options.cpus}"]
    command += [f"--object-store-memory={options.object_store_bytes}"]
    command += [f"--{name}={first + 1 + index}" for index, name in enumerate(_OPTIONS)]
    command += [f"--min-worker-port={first + _FIRST_WORKER_PORT}", f"--max-worker-port={last}"]
    command += ["--disable-usage-stats", "--include-log-monitor=false"]
    ranks = options.ranks if options.ranks >= 0 else _count_cpu_ranks()
    if ranks:
        command.append(f"--resources={json.dumps({'rank': ranks})}")
    if not is_head:
        return [*command, f"--address={options.head}"]
    config = json.dumps(RAY_CONFIG | HEALTH_CONFIG)
    command += ["--head", f"--port={first}"]
    return [*command, "--include-dashboard=false", "--no-monitor", f"--system-config={config}"]


def _run_ray(arguments: list[str]) -> int:
    from ray.scripts.scripts import main as ray

    sys.argv = arguments
    with skip_node_services():
        _preload_agent()
        ray()
    return 0


def _preload_agent() -> None:
    """Import what Ray's agent of a node imports, so that its files are in this node's memory.

    Ray gives the agent 15 s for it, which no setting changes; a shared file system may need more.
    """
    from ray.dashboard.utils import DashboardAgentModule, get_all_modules

    importlib.import_module("ray.dashboard.agent")
    logging.disable()  # it warns about most modules
    get_all_modules(DashboardAgentModule)
    logging.disable(logging.NOTSET)


def _wait_for_end(ray: subprocess.Popen[bytes], logs: Path) -> None:
    while ray.poll() is None:
        if select.select([sys.stdin], [], [], _POLL_S)[0] and not os.read(sys.stdin.fileno(), 4096):
            return
    name = _get_node_name()
    raise ConfigError(
        f"{name}: Ray has ended with status {ray.returncode}; {logs}/node-{name}.log and "
        f"{logs}/ray-{name} say why"
    )


def _check_logs(logs: Path) -> None:
    if not logs.is_dir():
        raise ConfigError(
            f"{_get_node_name()} does not see {logs}, which the launch script has made: output_dir "
            "must be on a file system that all nodes share"
        )


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def redirect_output(log: Path) -> None:
    """Append stdout and stderr of this process, and of those that it starts, to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # and not SIG_IGN, which Ray would inherit
    # SLURM sends it to every process of a step, so all processes of Ray have to inherit this.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _count_cpu_ranks() -> int:
    """Return the cores that the job has on a node without GPUs."""
    return 0 if any(Path("/dev").glob("nvidia[0-9]*")) else count_cores()


def _get_node_name() -> str:
    return os.environ.get(NODE) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _build_parser() -> argparse.ArgumentParser:
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
    holding.add_argument("--ranks", type=int, default=-1, help="CPUs: devices of this node")
    holding.add_argument("--cpus", type=int, default=1)
    holding.add_argument("--object-store-bytes", type=int, default=0)
    for command in (waiting, holding):
        command.add_argument("--head", required=True, help="ADDRESS:PORT")
        command.add_argument("--logs", required=True, help="a folder that all nodes share")
    return parser


if __name__ == "__main__":
    os.environ.pop(MARKER, None)
    sys.exit(main(sys.argv[1:]))
