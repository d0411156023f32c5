"""The Ray of a job, and what a device is called in it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.object_store import held_bytes, object_store_bytes
from mcore_rl.controller.pool import ray_session
from mcore_rl.engine.lane import lane

RANK = "rank"  # the Ray resource of the CPU lane


def session(config: RLConfig, num_devices: int, scratch: Path) -> AbstractContextManager[None]:
    """A private Ray has as much as the run needs; on the CPU lane ranks share cores by turns.

    Raises ConfigError when /dev/shm has too little for the object store.
    """
    store = object_store_bytes(
        config.object_store_bytes, held_bytes(config), setting="object_store_bytes"
    )
    needed = {resource(): num_devices}
    own = needed if RANK in needed else None
    return ray_session(
        scratch=scratch,
        log_to_driver=False,
        resources=own,
        needed=needed,
        object_store_bytes=store,
    )


def resource() -> str:
    """What Ray calls a device."""
    return "GPU" if lane() == "cuda" else RANK
