"""Whether samples fit into the object stores of a Ray that somebody else has started."""

from __future__ import annotations

import math

import ray

_NAMED = 4


def tell_of_small_stores(held: int, resource: str, num_devices: int) -> None:
    """Prints a line where a node has less than its part of `held` bytes; Ray itself says nothing.

    Samples are on the nodes of servers, which have `num_devices` of `resource` and are on as few
    nodes as have them: each of these holds its part.
    """
    stores, most = dict[str, int](), 1
    for node in ray.nodes():
        devices = int(node["Resources"].get(resource, 0)) if node["Alive"] else 0
        if devices:
            stores[node["NodeName"]] = int(node["Resources"].get("object_store_memory", 0))
            most = max(most, devices)
    part = math.ceil(held / math.ceil(num_devices / most))
    small = [name for name, size in stores.items() if size < part]
    if not small:
        return
    names, others = ", ".join(small[:_NAMED]), len(small) - _NAMED
    print(
        f"Ray's object store has {_mib(min(stores[name] for name in small))} on {names}"
        f"{f' and {others} more nodes' if others > 0 else ''}; a node with servers may hold "
        f"samples of {_mib(part)}, without recorded experts. What does not fit is spilled to disk "
        "by Ray and read again, and steps take longer. Set "
        f"MCORE_RL_OBJECT_STORE_BYTES={part} for the launch script, "
        "where /dev/shm has that (without one, ray start --object-store-memory)"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
