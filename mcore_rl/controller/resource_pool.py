"""The resources of a group of ranks: a placement group of Ray."""

from __future__ import annotations

import functools
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, Self

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_rl.config.errors import ConfigError

_POLL_S = 1.0  # of a wait for bundles


class ResourcePool:
    """A placement group of one bundle a rank, held until `close`.

    Groups that share a pool each take a share of every bundle (`WorkerGroup(..., share=0.5)`).
    `bundles` are the indices of Ray's bundles in the order of ranks: those of a node follow each
    other, so that ranks of a tensor- or expert-parallel group share one where they fit.
    """

    def __init__(
        self,
        num_ranks: int,
        resources_per_rank: Mapping[str, float],
        *,
        timeout_s: float = 60.0,
        log_dir: Path | None = None,
        detached: str = "",
    ) -> None:
        """Reserve the bundles.

        Args:
            resources_per_rank: Amounts by Ray's name of the resource: {"GPU": 1} on GPUs,
                {"CPU": 0.25} on a small CPU machine, any custom name.
            log_dir: Ranks print to `log_dir`/GROUP-RANK.log on nodes that have that folder,
                otherwise to Ray's own logs.
            detached: With a name the pool and the one group in it outlive this driver, on a cluster
                that does (`WorkerGroup.attach`): the end of its block leaves them, `close` ends
                them.

        Raises:
            ConfigError: the cluster does not provide the bundles within `timeout_s`, or could not
                even if it were idle; a detached pool has the name of another, or would end with
                this driver's private Ray.
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
        if _count_possible_bundles(resources_per_rank) < num_ranks:
            raise ConfigError(self._describe_shortage("do not fit, busy or free"))
        self._free = [1.0] * num_ranks  # the share of each bundle that no group has
        self.placement_group: PlacementGroup = placement_group(
            [dict(resources_per_rank)] * num_ranks,
            strategy="PACK",
            name=detached,
            lifetime="detached" if detached else None,
        )
        if not self._wait_for_bundles(timeout_s):
            message = self._describe_shortage(f"did not find room in {timeout_s:g} s")
            self.close()
            raise ConfigError(message)
        names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
        table = placement_group_table(self.placement_group)["bundles_to_node_id"]
        self._nodes: list[str] = [names[table[index]] for index in range(num_ranks)]
        self.bundles = order_by_node(self._nodes)

    def _wait_for_bundles(self, timeout_s: float) -> bool:
        """Wait for the bundles; return whether they are there. No call of Ray takes long."""
        deadline = time.monotonic() + timeout_s
        while not self.placement_group.wait(min(_POLL_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        return True

    def get_node(self, rank: int) -> str:
        """Return the name of the node that has the bundle of a rank."""
        return self._nodes[self.bundles[rank]]

    def reserve(self, share: float, ranks: range, group: str) -> None:
        """Take a share of the bundles of these ranks for a group, or raise ConfigError."""
        left = min(self._free[rank] for rank in ranks)
        if not 0 < share <= left + 1e-9:  # shares such as 1/3 do not add up to 1 exactly
            raise ConfigError(
                f"{group} asks for a share of {share:g} of a pool; it must be above 0 and at most "
                f"what other groups have left, {left:g}"
            )
        for rank in ranks:
            self._free[rank] -= share

    def release(self, share: float, ranks: range) -> None:
        """Give a share of the bundles of these ranks back."""
        for rank in ranks:
            self._free[rank] += share

    def get_actor_options(self, share: float) -> dict[str, Any]:
        """Return Ray's options for an actor that takes this share of its bundle."""
        # Ray has options of their own for CPUs and GPUs, and refuses them among `resources`.
        resources = {name: amount * share for name, amount in self.resources_per_rank.items()}
        cpus, gpus = resources.pop("CPU", 0), resources.pop("GPU", 0)
        return {"num_cpus": cpus, "num_gpus": gpus, "resources": resources}

    def get_gpu_ids(self, share: float, timeout_s: float) -> list[str]:
        """Return the ids of the GPUs of each bundle, with commas; `share` of it must be free."""
        task, options = ray.remote(_get_gpu_ids), self.get_actor_options(share)
        strategy = functools.partial(PlacementGroupSchedulingStrategy, self.placement_group)
        calls = [
            task.options(
                **options, scheduling_strategy=strategy(placement_group_bundle_index=index)
            ).remote()
            for index in self.bundles
        ]
        futures = [call.future() for call in calls]  # of concurrent.futures: one wait for all
        wait(futures, timeout=timeout_s)
        return [",".join(future.result(timeout=0)) for future in futures]

    def close(self) -> None:
        """Give the bundles back and end the actors in them. May be called twice."""
        if ray.is_initialized():
            remove_placement_group(self.placement_group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.detached or min(self._free) == 1.0:
            self.close()

    def _describe_shortage(self, what: str) -> str:
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
        "(WorkerGroup.attach), end it (end_detached_group of controller/worker_group.py), or use "
        "another name"
    )


def order_by_node(nodes: Sequence[str]) -> list[int]:
    """Order bundles node by node, those with most bundles first, given the node of each.

    Names decide between nodes with as many, so the order is the same in every start; a node that
    has fewer comes last, and groups stay aligned on the others.

    >>> order_by_node(["n10", "n2", "n10", "n2", "n1"])
    [1, 3, 0, 2, 4]
    """
    counts = Counter(nodes)

    def get_key(index: int) -> tuple[int, list[tuple[int, str]], int]:
        parts = re.findall("[0-9]+|[^0-9]+", nodes[index])
        name = [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
        return -counts[nodes[index]], name, index

    return sorted(range(len(nodes)), key=get_key)


def _get_gpu_ids() -> list[str]:
    gpu_ids: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return gpu_ids


def _count_possible_bundles(bundle: Mapping[str, float]) -> int:
    """Return how many of these bundles all nodes could hold if idle; a bundle is on one node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(
        int(min(node.get(name, 0) / amount for name, amount in bundle.items()) + 1e-9)
        for node in nodes
    )
