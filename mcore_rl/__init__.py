"""Reinforcement learning of large mixture-of-experts language models, Megatron first.

From a script or a notebook:

    import mcore_rl

    config = mcore_rl.load_recipe("quickstart", "seed=7", "output_dir=outputs/seed7")
    result = mcore_rl.run(config)
    print(result.metrics[-1]["reward"], result.summary["evaluation"]["after"])

The names below are the public interface, documented in docs/library.md; all others may change. They
are imported when they are first used, so that `import mcore_rl` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_rl.config.errors import ConfigError
    from mcore_rl.config.schema import RLConfig
    from mcore_rl.data.batch import Batch, Jagged, Samples
    from mcore_rl.library import RunResult, grpo, load_recipe, load_run, run
    from mcore_rl.trainers.base import RLTrainer, TrainerInputs
    from mcore_rl.trainers.fully_async import FullyAsyncTrainer
    from mcore_rl.trainers.one_step_off import OneStepOffTrainer
    from mcore_rl.trainers.sync import SyncTrainer

_MODULES = {
    "Batch": "data.batch",
    "ConfigError": "config.errors",
    "FullyAsyncTrainer": "trainers.fully_async",
    "Jagged": "data.batch",
    "OneStepOffTrainer": "trainers.one_step_off",
    "RLConfig": "config.schema",
    "RLTrainer": "trainers.base",
    "RunResult": "library",
    "Samples": "data.batch",
    "SyncTrainer": "trainers.sync",
    "TrainerInputs": "trainers.base",
    "grpo": "library",
    "load_recipe": "library",
    "load_run": "library",
    "run": "library",
}

__all__ = [
    "Batch",
    "ConfigError",
    "FullyAsyncTrainer",
    "Jagged",
    "OneStepOffTrainer",
    "RLConfig",
    "RLTrainer",
    "RunResult",
    "Samples",
    "SyncTrainer",
    "TrainerInputs",
    "grpo",
    "load_recipe",
    "load_run",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mcore_rl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mcore_rl.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
