"""The Ray of a job, and what a device is called in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.config.schema import RLConfig
from mcore_rl.controller import torchrun
from mcore_rl.controller.object_store import choose_object_store_bytes, estimate_sample_bytes
from mcore_rl.controller.ray_session import has_gpus, ray_session, warn_of_small_stores
from mcore_rl.engine import lane as machine

RANK = "rank"  # the Ray resource of the CPU lane


@contextlib.contextmanager
def session(config: RLConfig, num_devices: int, scratch: Path) -> Iterator[None]:
    """A private Ray has as much as the run needs; on the CPU lane ranks share cores by turns.

    The Ray at RAY_ADDRESS has what it was started with; where that is less, it prints a line.

    Raises ConfigError when /dev/shm has too little for the object store.
    """
    held = estimate_sample_bytes(config)
    store = choose_object_store_bytes(config.object_store_bytes, held, setting="object_store_bytes")
    needed = {resource(): num_devices}
    own = needed if RANK in needed else None
    with ray_session(
        temp_dir=scratch,
        log_to_driver=False,
        resources=own,
        needed=needed,
        object_store_bytes=store,
    ):
        if os.environ.get("RAY_ADDRESS"):
            warn_of_small_stores(held, resource(), config.rollout.num_servers * config.rollout.tp)
        yield


def lane() -> str:
    """Return "cuda" if the nodes that ranks run on have GPUs, else "cpu".

    They are the nodes at RAY_ADDRESS where it is set: the driver's own need not have a GPU. Ranks
    that torchrun has started are on this machine.

    Raises:
        ConfigError: no cluster answers there.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address or torchrun.is_launched():
        return machine.lane()
    return "cuda" if has_gpus(address) else "cpu"


def resource() -> str:
    """What Ray calls a device."""
    return "GPU" if lane() == "cuda" else RANK
