"""A Ray session that leaves nothing behind, and the resources of a group of ranks in it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import signal
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import ray
from ray._private import ray_constants, utils, worker
from ray._private.node import Node
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller.idle_nodes import tell_of_idle_nodes
from mcore_rl.controller.node import RAY_CONFIG
from mcore_rl.controller.reaper import GCS, RAY_DIR, RAYLET, command_line, processes
from mcore_rl.controller.run_scope import environment, noted_ray, own_sigterm, run_scope

NAMESPACE = "mcore_rl"  # of what Ray finds by name
# Of the raylet's children, by what is in their command lines at their start, and later.
_AGENTS = {
    b"dashboard/agent.py": "dashboard agent",
    b"ray::DashboardAgent": "dashboard agent",
    b"runtime_env/agent": "runtime env agent",
    b"ray::RuntimeEnvAgent": "runtime env agent",
}


@contextlib.contextmanager
def ray_session(
    *,
    scratch: Path | None = None,
    num_cpus: int = 1,
    num_gpus: int | None = None,
    resources: Mapping[str, float] | None = None,
    object_store_bytes: int = 512 << 20,
    log_to_driver: bool = True,
    needed: Mapping[str, float] | None = None,
) -> Iterator[None]:
    """Starts a private Ray on this machine, on the loopback interface, and ends it whole on exit.

    With RAY_ADDRESS set it joins that cluster instead, and all other arguments but `log_to_driver`
    and `needed` are the cluster's own business. `num_cpus` is a scheduling quantity, not a limit:
    ranks ask for fractions of it. `num_gpus=None` counts the GPUs. `needed` names resources that
    pools will ask for, all together.

    `scratch` is what a `run_scope` around the session gave; without it the session has a scope of
    its own. Either way nothing of the session outlives the driver.

    Raises:
        ConfigError: the cluster does not answer, or has less in all than `needed`.
    """
    if ray.is_initialized():
        raise RuntimeError("this process already has a Ray session")
    address = os.environ.get("RAY_ADDRESS")
    with contextlib.ExitStack() as stack:
        folder = scratch or stack.enter_context(run_scope())
        if address:
            stack.enter_context(_join(address, log_to_driver))
        else:
            session = _start(
                folder,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                resources=dict(resources or {}),
                object_store_memory=object_store_bytes,
                log_to_driver=log_to_driver,
            )
            stack.enter_context(session)
        _check_resources(needed or {}, address)
        yield


def _check_resources(needed: Mapping[str, float], address: str | None) -> None:
    total = ray.cluster_resources()
    short = [
        f"{amount:g} of {name!r} (it has {total.get(name, 0):g})"
        for name, amount in needed.items()
        if amount > total.get(name, 0)
    ]
    if short:
        place = f"the Ray cluster at RAY_ADDRESS={address!r}" if address else "this machine"
        raise ConfigError(
            f"{place} has too little of what the run needs: {', '.join(short)}; use a smaller "
            "layout, or start nodes with more (ray start --resources)"
        )
    if address:
        tell_of_idle_nodes(needed)


@functools.cache
def has_gpus(address: str) -> bool:
    """Ask the cluster at RAY_ADDRESS whether a node has a GPU, without joining it.

    Raises:
        ConfigError: no cluster answers there.
    """
    with _answered(address):
        _connect(address)
        head = canonicalize_bootstrap_address_or_die(address)
        nodes = GcsClient(address=head).get_all_node_info(timeout=10).values()
    return any(node.state == 0 and node.resources_total.get("GPU", 0) for node in nodes)


@contextlib.contextmanager
def _join(address: str, log_to_driver: bool) -> Iterator[None]:
    with _answered(address):
        _connect(address)
        tries = os.environ.get("RAY_gcs_server_port_wait_time_s", "1")  # noqa: SIM112 (Ray spells it so)
        with own_sigterm(), environment(RAY_gcs_server_port_wait_time_s=tries):
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


def _connect(address: str) -> None:
    """Raise OSError where nothing listens: Ray itself tries for a minute or more."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


@contextlib.contextmanager
def _answered(address: str) -> Iterator[None]:
    """Raise ConfigError where no Ray answers inside."""
    try:
        yield
    # RayError and RuntimeError: of a Ray that does not know us, say.
    except (OSError, RuntimeError, RayError) as error:
        raise ConfigError(
            f"RAY_ADDRESS is {address!r}, where no Ray cluster answers "
            f"({str(error).partition('Last connection')[0].strip()}); start one there with `ray "
            "start`, or unset it to run a private one"
        ) from error


@contextlib.contextmanager
def _start(scratch: Path, **settings: Any) -> Iterator[None]:
    # Ray reads its token once a process, so one token serves every session of this process.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray_dir = scratch / RAY_DIR  # Ray opens it to every user; the one around it stays shut
    try:
        idlers = _without_idlers(settings["log_to_driver"])
        with _loopback(), idlers, own_sigterm(), _deaf_to_hangups():
            ray.init(
                address="local",
                namespace=NAMESPACE,
                include_dashboard=False,
                logging_level="error",
                _node_ip_address="127.0.0.1",
                _temp_dir=str(ray_dir),
                _system_config=RAY_CONFIG,
                **settings,
            )
        with noted_ray(scratch, _own_processes()):
            yield
    finally:
        ray.shutdown()


def _own_processes() -> dict[str, int]:
    """The pids of this session's GCS, its raylet and that one's agents."""
    own = worker._global_node.all_processes
    gcs, raylet = (own[kind][0].process.pid for kind in ("gcs_server", "raylet"))
    found = {GCS: gcs, RAYLET: raylet}
    for pid, (parent, _) in processes().items():
        if parent == raylet:
            command = command_line(pid)
            found |= {name: pid for words, name in _AGENTS.items() if words in command}
    return found


@contextlib.contextmanager
def _deaf_to_hangups() -> Iterator[None]:
    """What is started inside takes no SIGHUP; one for this process waits until the end.

    A terminal that hangs up tells every process that runs in it. Ray's have to stay for the driver,
    which ends the session in order: without them its shutdown waits a minute for an answer.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Keeps every Ray port of this node on 127.0.0.1.

    Ray 2.60 replaces 127.0.0.1 by an outward address (_private/services.py:811) and then listens
    on all interfaces, unless clusters are switched off, as they are on macOS and Windows.
    """
    with _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, Ray has another value of that name, which must exist."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _without_idlers(log_to_driver: bool) -> Iterator[None]:
    """Starts none of Ray's processes that serve nobody here: 4 s of CPU and 0.3 GB.

    They are the autoscaler's monitor, the server of the dashboard (`include_dashboard=False` leaves
    it without pages only) and, unless the driver is to see what workers print, the log monitor
    (_private/node.py:1654, :1666 and :1765). `lean_node` comes on top.
    """
    names = ["start_monitor", "start_api_server"]
    if not log_to_driver:
        names.append("start_log_monitor")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_replaced(Node, name, lambda *_, **__: None))
        stack.enter_context(lean_node())
        yield


@contextlib.contextmanager
def lean_node() -> Iterator[None]:
    """Inside, a node starts without Ray's client server, and its agent without modules.

    A node must have the dashboard's agent, and gives it 15 s to start (_private/services.py:1910).
    `ray start` of a head always starts the client server (_private/node.py:1657).
    """
    no_client_server = _replaced(Node, "start_ray_client_server", lambda *_, **__: None)
    no_modules = _replaced(utils, "get_dashboard_dependency_error", lambda: "unwanted")
    with no_client_server, no_modules:
        yield


class ResourcePool:
    """A placement group of one bundle a rank, held until `close`.

    `resources_per_rank` names Ray resources: {"GPU": 1} on GPUs, {"CPU": 0.25} on a small CPU
    machine, any custom name. Groups that share a pool each take a share of every bundle
    (`WorkerGroup(..., share=0.5)`). Ranks print to `log_dir`/GROUP-RANK.log on nodes that have that
    folder; elsewhere, and without it, to Ray's own logs.

    With a name in `detached` the pool and the one group in it outlive this driver, on a cluster
    that does (`WorkerGroup.attach`): the end of its block leaves them, `close` ends them.

    `bundles` are the indices of Ray's bundles in the order of ranks: those of a node follow each
    other, so that ranks of a tensor- or expert-parallel group share one where they fit.
    """

    def __init__(
        self,
        num_ranks: int,
        resources_per_rank: Mapping[str, float],
        *,
        strategy: str = "PACK",
        timeout_s: float = 60.0,
        log_dir: Path | None = None,
        detached: str = "",
    ) -> None:
        """Raises ConfigError when the cluster does not provide the bundles within `timeout_s`.

        At once, when its nodes could not hold them even if all were free, and when a detached pool
        has the name of another, or would end with this driver's private Ray.
        """
        if detached:
            _check_detached(detached)
        if num_ranks < 1 or not resources_per_rank or min(resources_per_rank.values()) <= 0:
            raise ConfigError(
                f"a pool of {num_ranks} ranks with {dict(resources_per_rank)} each; it needs one "
                "rank or more and a positive amount of at least one resource"
            )
        self.num_ranks = num_ranks
        self.resources_per_rank = dict(resources_per_rank)
        self.log_dir, self.detached = log_dir, detached
        if _most_bundles(resources_per_rank) < num_ranks:
            raise ConfigError(self._shortage("do not fit, busy or free"))
        self._free = [1.0] * num_ranks  # the share of each bundle that no group has
        self.placement_group: PlacementGroup = placement_group(
            [dict(resources_per_rank)] * num_ranks,
            strategy=strategy,
            name=detached,
            lifetime="detached" if detached else None,
        )
        if not self.placement_group.wait(timeout_seconds=timeout_s):
            message = self._shortage(f"did not find room in {timeout_s:g} s")
            self.close()
            raise ConfigError(message)
        names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
        table = placement_group_table(self.placement_group)["bundles_to_node_id"]
        self._nodes = [names[table[index]] for index in range(num_ranks)]
        self.bundles = by_node(self._nodes)

    def node(self, rank: int) -> str:
        """The name of the node that has the bundle of a rank."""
        return self._nodes[self.bundles[rank]]

    def reserve(self, share: float, ranks: range, group: str) -> None:
        """Takes a share of the bundles of these ranks for a group, or raises ConfigError."""
        left = min(self._free[rank] for rank in ranks)
        if not 0 < share <= left + 1e-9:
            raise ConfigError(
                f"{group} asks for a share of {share:g} of a pool; it must be above 0 and at most "
                f"what other groups have left, {left:g}"
            )
        for rank in ranks:
            self._free[rank] -= share

    def release(self, share: float, ranks: range) -> None:
        for rank in ranks:
            self._free[rank] += share

    def actor_options(self, share: float) -> dict[str, Any]:
        """Ray's options for an actor that takes this share of its bundle."""
        wanted = {name: amount * share for name, amount in self.resources_per_rank.items()}
        cpus, gpus = wanted.pop("CPU", 0), wanted.pop("GPU", 0)
        return {"num_cpus": cpus, "num_gpus": gpus, "resources": wanted}

    def gpu_ids(self, share: float, timeout_s: float) -> list[str]:
        """Of each bundle, its GPU as CUDA_VISIBLE_DEVICES names it; `share` of it must be free."""
        ask, options = ray.remote(_gpu_ids), self.actor_options(share)
        on = functools.partial(PlacementGroupSchedulingStrategy, self.placement_group)
        found = [
            ask.options(
                **options, scheduling_strategy=on(placement_group_bundle_index=index)
            ).remote()
            for index in self.bundles
        ]
        return [",".join(ids) for ids in ray.get(found, timeout=timeout_s)]

    def close(self) -> None:
        """Gives the bundles back; ends the actors in them. May be called twice."""
        if ray.is_initialized():
            remove_placement_group(self.placement_group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.detached or min(self._free) == 1.0:
            self.close()

    def _shortage(self, what: str) -> str:
        total, free = ray.cluster_resources(), ray.available_resources()
        lines = [
            f"{name}: asked {amount * self.num_ranks:g}, cluster has {total.get(name, 0):g}, "
            f"free {free.get(name, 0):g}"
            for name, amount in self.resources_per_rank.items()
        ]
        return (
            f"{self.num_ranks} ranks of {self.resources_per_rank} each {what} ({'; '.join(lines)}; "
            f"{len(ray.nodes())} nodes). Use a smaller layout or a larger cluster"
        )


def _check_detached(name: str) -> None:
    if not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"the detached pool {name!r} would end with this driver's private Ray; set RAY_ADDRESS "
            "to a cluster that stays"
        )
    try:
        get_placement_group(name)
    except ValueError:  # there is none, as it should be
        return
    raise ConfigError(
        f"there is a detached pool {name!r} on this Ray cluster; take up its group "
        "(WorkerGroup.attach), end it (controller/detached.py), or use another name"
    )


def by_node(nodes: Sequence[str]) -> list[int]:
    """Indices of bundles, given the node of each: node by node, those with most bundles first.

    Names decide between nodes with as many, so the order is the same in every start; a node that
    has fewer comes last, and groups stay aligned on the others.

    >>> by_node(["n10", "n2", "n10", "n2", "n1"])
    [1, 3, 0, 2, 4]
    """
    counts = Counter(nodes)

    def key(index: int) -> tuple[int, list[tuple[int, str]], int]:
        parts = re.findall("[0-9]+|[^0-9]+", nodes[index])
        number = [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
        return -counts[nodes[index]], number, index

    return sorted(range(len(nodes)), key=key)


def _gpu_ids() -> list[str]:
    found: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return found


def _most_bundles(bundle: Mapping[str, float]) -> int:
    """How many of these bundles all nodes together can hold; a bundle lies on one node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(
        int(min(node.get(name, 0) / amount for name, amount in bundle.items()) + 1e-9)
        for node in nodes
    )
