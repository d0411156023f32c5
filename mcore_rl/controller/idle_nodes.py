"""Whether a Ray that somebody else has started has nodes that a run leaves idle."""

from __future__ import annotations

from collections.abc import Mapping

import ray


def tell_of_idle_nodes(needed: Mapping[str, float]) -> None:
    """Prints a line where nodes with devices are left over once the largest have filled up.

    Pools may leave gaps on nodes, so that a run may take a few more.
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
