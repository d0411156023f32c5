"""A function run once on each node of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_rl.config.errors import ConfigError


class EachNode:
    """Calls function(what, number) on the nodes that are alive, all at once."""

    def __init__(self, function: Callable[[Any, int], Any], address: str = "") -> None:
        """`address` is one of this machine; empty: that which Ray uses."""
        found = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: n["NodeName"])
        if not found:
            raise ConfigError("the Ray cluster has no node that is alive")
        self.nodes = _names(found)
        self.address = address or ray.util.get_node_ip_address()
        self._ids = [one["NodeID"] for one in found]
        self._function = function
        self._calls: list[Any] = []

    def start(self, what: Any) -> None:
        remote = ray.remote(num_cpus=0, max_retries=0)(self._function)
        for number, node_id in enumerate(self._ids):
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._calls.append(remote.options(scheduling_strategy=there).remote(what, number))

    def ended(self) -> bool:
        done, _ = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        return len(done) == len(self._calls)

    def why(self, name: str) -> str:
        """The error of that node's call; empty when there is none."""
        call = self._calls[self.nodes.index(name)]
        done, _ = ray.wait([call], timeout=0)
        if not done:
            return ""
        try:
            ray.get(call)
        except Exception as error:  # noqa: BLE001 (any that the function raises there, or Ray)
            return str(error).strip().splitlines()[-1]
        return ""

    def value(self, name: str, timeout_s: float) -> Any:
        """What the function has returned on that node. Raises as `ray.get`."""
        return ray.get(self._calls[self.nodes.index(name)], timeout=timeout_s)

    def stop(self) -> None:
        """Nothing: who leaves the Ray session ends the calls that go on.

        `ray.cancel(force=True)` of a call that has just ended ends this process, too (Ray 2.60,
        a failed check in task_manager.cc).
        """


def _names(found: list[dict[str, Any]]) -> list[str]:
    """As `ray start --node-name` has it, or the host's; with the id where that is not enough."""
    names = [
        one["NodeManagerHostname" if one["NodeName"] == one["NodeManagerAddress"] else "NodeName"]
        for one in found
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({one['NodeID'][:6]})"
        for name, one in zip(names, found, strict=True)
    ]
