"""A Ray session that leaves nothing behind: a private Ray, or the cluster at RAY_ADDRESS."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient
from ray.exceptions import RayError

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import TimeoutsConfig
from mcore_rl.controller.pending_call import Timeout
from mcore_rl.controller.process_cleanup import (
    clean_up_on_exit,
    keep_sigterm_handler,
    set_environment,
    watch_ray_processes,
)
from mcore_rl.controller.ray_calls import limit_ray_calls
from mcore_rl.controller.ray_patches import RAY_CONFIG, listen_on_loopback, skip_session_services
from mcore_rl.controller.reaper import GCS, RAY_DIR, RAYLET, list_processes, read_command_line

NAMESPACE = "mcore_rl"  # of named actors
# The raylet's children by a part of their command lines, before and after they rename themselves.
_AGENTS = {
    b"dashboard/agent.py": "dashboard agent",
    b"ray::DashboardAgent": "dashboard agent",
    b"runtime_env/agent": "runtime env agent",
    b"ray::RuntimeEnvAgent": "runtime env agent",
}
_MAX_NAMED = 4  # nodes in a warning
_END_S = 10.0


@contextlib.contextmanager
def ray_session(
    *,
    temp_dir: Path | None = None,
    num_cpus: int = 1,
    num_gpus: int | None = None,
    resources: Mapping[str, float] | None = None,
    object_store_bytes: int = 512 << 20,
    log_to_driver: bool = True,
    needed: Mapping[str, float] | None = None,
    timeouts: TimeoutsConfig | None = None,
) -> Iterator[None]:
    """Start a private Ray on the loopback interface of this machine; end it completely on exit.

    With RAY_ADDRESS set it joins that cluster instead, and all arguments except `log_to_driver`,
    `needed` and `timeouts` have no effect. A Ray that this process has joined before, as a notebook
    may have, is used as it is, and left running. Each call of Ray inside has the limit `call_s`.

    Args:
        temp_dir: The folder of `clean_up_on_exit`, if the session is inside of it; otherwise the
            session cleans up by itself. Either way nothing of it outlives the driver.
        num_cpus: A quantity to schedule by, not a limit: ranks ask for fractions of it.
        num_gpus: None counts the GPUs.
        needed: Resources that all pools together will ask for.

    Raises:
        ConfigError: the cluster does not answer, or has less in all than `needed`.
    """
    address = os.environ.get("RAY_ADDRESS")
    timeouts = timeouts or TimeoutsConfig()
    with contextlib.ExitStack() as stack:
        folder = temp_dir or stack.enter_context(clean_up_on_exit())
        start = Timeout(timeouts.start_s, "timeouts.start_s")
        limit = stack.enter_context(limit_ray_calls(start))
        is_joined_before = ray.is_initialized()
        if is_joined_before:
            address = address or ray.get_runtime_context().gcs_address
        elif address:
            stack.enter_context(_join_cluster(address, log_to_driver))
        else:
            session = _start_private_ray(
                folder,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                resources=dict(resources or {}),
                object_store_memory=object_store_bytes,
                log_to_driver=log_to_driver,
            )
            stack.enter_context(session)
        limit.set_timeout(Timeout(timeouts.call_s, "timeouts.call_s"))
        # The calls at the end wait for nothing but Ray itself.
        stack.callback(limit.set_timeout, Timeout(_END_S, "the end of a session"))
        _check_resources(needed or {}, address, is_joined_before=is_joined_before)
        yield


def _check_resources(
    needed: Mapping[str, float], address: str | None, *, is_joined_before: bool = False
) -> None:
    """Raise ConfigError if the session has less in all than `needed`."""
    total = ray.cluster_resources()
    short = [
        f"{amount:g} of {name!r} (it has {total.get(name, 0):g})"
        for name, amount in needed.items()
        if amount > total.get(name, 0)
    ]
    if short:
        place = f"the Ray cluster at RAY_ADDRESS={address!r}" if address else "this machine"
        remedy = "a smaller layout, or nodes with more (ray start --resources)"
        if is_joined_before:
            place = f"the Ray of this process, at {address}, which was started before the run,"
            resources = {name: n for name, n in needed.items() if name not in ("CPU", "GPU")}
            remedy = "ray.shutdown() before the run, which then starts its own"
            remedy += f", or ray.init(resources={resources})" if resources else ""
        raise ConfigError(
            f"{place} has too little of what the run needs: {', '.join(short)}; allowed: {remedy}"
        )
    if address:
        _warn_of_idle_nodes(needed)


def _warn_of_idle_nodes(needed: Mapping[str, float]) -> None:
    """Print a line if nodes with devices are left over once the largest nodes are full.

    Pools may leave gaps on nodes, so a run may take a few more.
    """
    for resource, amount in needed.items():
        nodes = [node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]]
        sizes = sorted((size for size in nodes if size), reverse=True)
        taken = sum(sum(sizes[:number]) < amount for number in range(len(sizes)))
        if 0 < taken < len(sizes):
            print(
                f"{len(sizes) - taken} of the {len(sizes)} nodes stay idle: the cluster has "
                f"{sum(sizes):g} of {resource!r}, and the run takes {amount:g}. To use them, raise "
                "actor.layout.dp (engine.layout.dp of sft, dpo and rm) or rollout.num_servers; "
                f"else ask for {taken} nodes"
            )


def warn_of_small_stores(sample_bytes: int, resource: str, num_devices: int) -> None:
    """Print a line if a node's object store is smaller than its share of the samples.

    Ray itself spills to disk without a word. Samples are on the nodes of servers, which have
    `num_devices` of `resource` and are on as few nodes as have them; each of these has a share.
    """
    stores, max_devices = dict[str, int](), 1
    for node in ray.nodes():
        devices = int(node["Resources"].get(resource, 0)) if node["Alive"] else 0
        if devices:
            stores[node["NodeName"]] = int(node["Resources"].get("object_store_memory", 0))
            max_devices = max(max_devices, devices)
    share = math.ceil(sample_bytes / math.ceil(num_devices / max_devices))
    small = [name for name, size in stores.items() if size < share]
    if not small:
        return

    def format_mib(num_bytes: int) -> str:
        return f"{num_bytes / 2**20:,.0f} MiB"

    names, num_more = ", ".join(small[:_MAX_NAMED]), len(small) - _MAX_NAMED
    print(
        f"Ray's object store has {format_mib(min(stores[name] for name in small))} on {names}"
        f"{f' and {num_more} more nodes' if num_more > 0 else ''}; a node with servers may hold "
        f"samples of {format_mib(share)}, without recorded experts. What does not fit is spilled "
        "to disk by Ray and read again, and steps take longer. Set "
        f"MCORE_RL_OBJECT_STORE_BYTES={share} for the launch script, "
        "where /dev/shm has that (without one, ray start --object-store-memory)"
    )


@functools.cache
def has_gpus(address: str) -> bool:
    """Ask the cluster at RAY_ADDRESS whether a node has a GPU, without joining it.

    Raises:
        ConfigError: no cluster answers there.
    """
    with _report_unreachable(address):
        _check_port(address)
        head = canonicalize_bootstrap_address_or_die(address)
        nodes = GcsClient(address=head).get_all_node_info(timeout=10).values()
    return any(node.state == 0 and node.resources_total.get("GPU", 0) for node in nodes)


@contextlib.contextmanager
def _join_cluster(address: str, log_to_driver: bool) -> Iterator[None]:
    with _report_unreachable(address):
        _check_port(address)
        tries = os.environ.get("RAY_gcs_server_port_wait_time_s", "1")  # noqa: SIM112 (Ray spells it so)
        with keep_sigterm_handler(), set_environment(RAY_gcs_server_port_wait_time_s=tries):
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=log_to_driver,
                logging_level="error",
            )
    try:
        yield
    finally:
        ray.shutdown()


def _check_port(address: str) -> None:
    """Raise OSError if nothing listens: Ray itself tries for a minute or more."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


@contextlib.contextmanager
def _report_unreachable(address: str) -> Iterator[None]:
    """Raise ConfigError if no Ray answers inside."""
    try:
        yield
    # RayError and RuntimeError: another version of Ray, for example.
    except (OSError, RuntimeError, RayError) as error:
        raise ConfigError(
            f"RAY_ADDRESS is {address!r}, where no Ray cluster answers "
            f"({str(error).partition('Last connection')[0].strip()}); start one there with `ray "
            "start`, or unset it to run a private one"
        ) from error


@contextlib.contextmanager
def _start_private_ray(temp_dir: Path, **settings: Any) -> Iterator[None]:
    # Ray reads its token once a process, so one token serves every session of this process.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray_dir = temp_dir / RAY_DIR  # Ray opens it to every user; temp_dir stays closed
    try:
        services = skip_session_services(has_log_monitor=settings["log_to_driver"])
        with listen_on_loopback(), services, keep_sigterm_handler(), _block_hangups():
            ray.init(
                address="local",
                namespace=NAMESPACE,
                include_dashboard=False,
                logging_level="error",
                _node_ip_address="127.0.0.1",
                _temp_dir=str(ray_dir),
                _system_config={**RAY_CONFIG},  # Ray adds the folder of this session
                **settings,
            )
        with watch_ray_processes(temp_dir, _list_ray_processes()):
            yield
    finally:
        ray.shutdown()


def _list_ray_processes() -> dict[str, int]:
    """Return the pids of this session's GCS, its raylet and the raylet's agents."""
    by_kind = worker._global_node.all_processes
    gcs, raylet = (by_kind[kind][0].process.pid for kind in ("gcs_server", "raylet"))
    pids = {GCS: gcs, RAYLET: raylet}
    for pid, (parent, _) in list_processes().items():
        if parent == raylet:
            command = read_command_line(pid)
            pids |= {name: pid for words, name in _AGENTS.items() if words in command}
    return pids


@contextlib.contextmanager
def _block_hangups() -> Iterator[None]:
    """Block SIGHUP for processes that are started inside, and for this one until the end.

    A terminal that hangs up signals every process that runs in it. Ray's have to stay for the
    driver, which ends the session in order: without them its shutdown waits a minute for an answer.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
