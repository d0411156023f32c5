"""How large Ray's object store of a node is: it is shared memory, where columns of batches lie."""

from __future__ import annotations

import os
from pathlib import Path

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import count_extra_groups, get_loop, get_staleness
from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.node_limits import memory_left

LEAST_BYTES = 512 << 20
SHARED_MEMORY = Path("/dev/shm")
BYTES_PER_TOKEN = 96  # of all columns that a sample gets in a step, recorded experts apart
MADE_BYTES_PER_TOKEN = 40  # of those that a server makes
_MOST = 0.8  # of what is free


def held_bytes(config: RLConfig) -> int:
    """What samples hold at most.

    Those of a step that is trained on, those that are generated, and those that may be replayed:
    all max_age steps of the buffer count in full, as all are new where nothing is drawn. Prompts on
    their way to a server take less than the samples that there will be of them.
    """
    trainer, replay = config.trainer, config.algorithm.filter.replay
    steps, extra = 2, 0
    if get_loop(trainer) == "fully_async":
        steps += get_staleness(trainer)
        extra = count_extra_groups(trainer.asynchronous.oversampling, trainer.prompts_per_step)
    if replay.share:
        steps += replay.max_age
    samples = (steps * _generated_groups(config) + extra) * config.algorithm.group_size
    tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return samples * tokens * BYTES_PER_TOKEN


def _generated_groups(config: RLConfig) -> int:
    """Those of a step at most, with all its rounds.

    A step holds them until it has selected, and afterwards too: an object stays while one of its
    samples is used. Where groups are filtered as they come, rejected ones are let go of at once.
    """
    trainer, policy = config.trainer, config.algorithm.filter
    as_they_come = get_loop(trainer) == "fully_async" and get_staleness(trainer) > 0
    if as_they_come or not policy.group_filter:
        return trainer.prompts_per_step
    return policy.max_rounds * (policy.prompts_per_round or trainer.prompts_per_step)


def object_store_bytes(wanted: int, held: int = 0, *, setting: str, shm: int = -1) -> int:
    """`wanted`, or with 0 what samples hold within what is free, and no less than LEAST_BYTES.

    Memory is taken when objects are stored. `shm` is for tests: what is free.

    Raises:
        ConfigError: more is wanted than is free in /dev/shm and in the memory of the cgroup, or
            less than LEAST_BYTES.
    """
    if shm < 0:
        space = os.statvfs(SHARED_MEMORY)
        shm = min(space.f_bavail * space.f_frsize, memory_left())
    if not wanted:
        return max(LEAST_BYTES, min(held, int(_MOST * shm)))
    if not LEAST_BYTES <= wanted <= shm:
        raise ConfigError(
            f"{setting}={wanted}; allowed: 0, or from {LEAST_BYTES} to what {SHARED_MEMORY} and "
            f"memory.max of the cgroup leave here, {shm}"
        )
    return wanted
