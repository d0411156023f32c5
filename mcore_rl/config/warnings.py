"""Settings that are valid but probably a mistake."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_rl.config.resolve_train import data_of
from mcore_rl.config.schema import OptimizerConfig, RLConfig
from mcore_rl.config.sources import test_files
from mcore_rl.config.train_schema import TrainConfig


def warnings_of(config: RLConfig) -> Iterator[str]:
    """A line for each doubtful setting, naming it. The config may be unresolved."""
    data, warm, trainer = config.data, config.warm_start, config.trainer
    for key, file in test_files(data).values():
        if file in (data.train_file, *data.train_files):
            where = "data.train_file" if data.train_file else "in data.train_files"
            yield f"{key}={file!r} is {where}: evaluations are of training data"
    if warm.train_file and not warm.num_steps:
        yield (
            f"warm_start.train_file={warm.train_file!r} is not read: warm_start.num_steps=0 "
            "disables supervised training"
        )
    if config.reward.shuffle:
        yield "reward.shuffle=true: a control experiment, in which rewards have no signal"
    yield from _of_checkpoints(config)
    steps = trainer.num_steps * config.algorithm.num_mini_batches
    yield from _of_optimizer("actor.optimizer", config.actor.optimizer, steps)
    if warm.num_steps:
        yield from _of_optimizer("warm_start.optimizer", warm.optimizer, warm.num_steps)


def warnings_of_training(config: TrainConfig) -> Iterator[str]:
    """The same for a job that trains on examples."""
    data, optimizer = data_of(config), config.engine.optimizer
    for key, file in test_files(data).values():
        if file in (data.train_file, *data.train_files):
            where = "data.train_file" if data.train_file else "in data.train_files"
            yield f"{key}={file!r} is {where}: evaluations are of training data"
    yield from _of_checkpoints(config)
    yield from _of_optimizer("engine.optimizer", optimizer, config.trainer.num_steps)


def _of_checkpoints(config: RLConfig | TrainConfig) -> Iterator[str]:
    if config.trainer.save_every:
        return
    found: dict[str, object] = {
        "checkpoint.keep_best": config.checkpoint.keep_best,
        "checkpoint.async_save": config.checkpoint.async_save,
        "resume": config.resume if config.resume == "auto" else "",
    }
    for key, value in found.items():
        if value:
            yield f"{key}={value!r}: trainer.save_every=0 writes no training checkpoints"


def _of_optimizer(key: str, config: OptimizerConfig, num_steps: int) -> Iterator[str]:
    if config.warmup_steps >= num_steps > 0:
        yield (
            f"{key}.warmup_steps={config.warmup_steps}: all {num_steps} steps are warm-up "
            f"to {key}.lr={config.lr}"
        )
    if config.schedule == "constant" and config.min_lr:
        yield f"{key}.min_lr={config.min_lr} has no effect with {key}.schedule='constant'"
