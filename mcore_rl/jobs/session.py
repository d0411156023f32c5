"""The Ray of a job, and what a device is called in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.object_store import held_bytes, object_store_bytes
from mcore_rl.controller.pool import ray_session
from mcore_rl.controller.small_stores import tell_of_small_stores
from mcore_rl.jobs.placement import CPU_RESOURCE, get_device_resource


@contextlib.contextmanager
def session(config: RLConfig, num_devices: int, scratch: Path) -> Iterator[None]:
    """A private Ray has as much as the run needs; on the CPU lane ranks share cores by turns.

    The Ray at RAY_ADDRESS has what it was started with; where that is less, it prints a line.

    Raises ConfigError when /dev/shm has too little for the object store.
    """
    held = held_bytes(config)
    store = object_store_bytes(config.object_store_bytes, held, setting="object_store_bytes")
    needed = {get_device_resource(): num_devices}
    own = needed if CPU_RESOURCE in needed else None
    with ray_session(
        scratch=scratch,
        log_to_driver=False,
        resources=own,
        needed=needed,
        object_store_bytes=store,
    ):
        if os.environ.get("RAY_ADDRESS"):
            tell_of_small_stores(
                held, get_device_resource(), config.rollout.num_servers * config.rollout.tp
            )
        yield
