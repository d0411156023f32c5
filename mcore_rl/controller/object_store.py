"""The size of Ray's object store on a node, which is shared memory with the columns of batches.

No Ray.
"""

from __future__ import annotations

import os
from pathlib import Path

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import count_extra_groups, get_loop, get_staleness
from mcore_rl.config.schema import RLConfig
from mcore_rl.parallel.host_limits import get_free_memory_bytes

MIN_BYTES = 512 << 20
SHARED_MEMORY = Path("/dev/shm")
BYTES_PER_TOKEN = 96  # all columns that a sample gets in a step, without recorded experts
GENERATED_BYTES_PER_TOKEN = 40  # the columns that a server makes
_MAX_SHARE = 0.8  # of the free memory


def estimate_sample_bytes(config: RLConfig) -> int:
    """Return an upper bound on the bytes of samples.

    They are those of a step that is trained on, those that are generated, and those that may be
    replayed: all max_age steps of the buffer count in full, as all are new where nothing is drawn.
    Prompts on their way to a server take less than the samples that there will be of them.
    """
    trainer, replay = config.trainer, config.algorithm.filter.replay
    steps, extra = 2, 0
    if get_loop(trainer) == "fully_async":
        steps += get_staleness(trainer)
        extra = count_extra_groups(trainer.asynchronous.oversampling, trainer.prompts_per_step)
    if replay.share:
        steps += replay.max_age
    samples = (steps * _count_generated_groups(config) + extra) * config.algorithm.group_size
    tokens = config.data.prompt_limit + config.rollout.response_limit
    return samples * tokens * BYTES_PER_TOKEN


def _count_generated_groups(config: RLConfig) -> int:
    """Return the most groups that a step generates in all its rounds.

    A step holds them until it has selected, and afterwards too: an object stays while one of its
    samples is used. Where groups are filtered as they arrive, rejected ones are freed at once.
    """
    trainer, policy = config.trainer, config.algorithm.filter
    is_filtered_at_once = get_loop(trainer) == "fully_async" and get_staleness(trainer) > 0
    if is_filtered_at_once or not policy.group_filter:
        return trainer.prompts_per_step
    return policy.max_rounds * (policy.prompts_per_round or trainer.prompts_per_step)


def choose_object_store_bytes(
    requested: int, sample_bytes: int = 0, *, setting: str, free_bytes: int = -1
) -> int:
    """Return the size of an object store, whose memory is taken when objects are stored.

    Args:
        requested: 0 chooses `sample_bytes` within the free memory, and at least MIN_BYTES.
        setting: The name of the setting that requests it.
        free_bytes: -1 measures the free memory.

    Raises:
        ConfigError: more is requested than is free in /dev/shm and in the memory of the cgroup, or
            less than MIN_BYTES.
    """
    if free_bytes < 0:
        space = os.statvfs(SHARED_MEMORY)
        free_bytes = min(space.f_bavail * space.f_frsize, get_free_memory_bytes())
    if not requested:
        return max(MIN_BYTES, min(sample_bytes, int(_MAX_SHARE * free_bytes)))
    if not MIN_BYTES <= requested <= free_bytes:
        raise ConfigError(
            f"{setting}={requested}; allowed: 0, or from {MIN_BYTES} to what {SHARED_MEMORY} and "
            f"memory.max of the cgroup leave here, {free_bytes}"
        )
    return requested
