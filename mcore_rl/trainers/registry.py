"""Trainers by trainer.mode: those of this package by name, a user's own by import path."""

from __future__ import annotations

import sys

import ray

from mcore_rl.config.import_path import is_import_path, load_user_class
from mcore_rl.trainers.base import RLTrainer
from mcore_rl.trainers.fully_async import FullyAsyncTrainer
from mcore_rl.trainers.one_step_off import OneStepOffTrainer
from mcore_rl.trainers.sync import SyncTrainer

TRAINERS: dict[str, type[RLTrainer]] = {
    "sync": SyncTrainer,
    "one_step_off": OneStepOffTrainer,
    "fully_async": FullyAsyncTrainer,
}


def load_trainer(mode: str) -> type[RLTrainer]:
    """Return the class of a loop: `sync`, ..., or `path/to/file.py:MyTrainer`.

    Raises:
        ConfigError: There is none of that name, or it is no subclass of RLTrainer.
    """
    if not is_import_path(mode):
        return TRAINERS[mode]
    loaded: type[RLTrainer] = load_user_class("trainer.mode", mode, RLTrainer, TRAINERS)
    # Functions of its file that workers apply travel by value: workers cannot import the file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[loaded.__module__])
    return loaded
