"""Folder of a toy task: paths of its model and data, and how to write it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config.atomic_file import create_folder, get_partial_path
from mcore_rl.config.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """The paths of a prepared task. No held-out problem is in the other two files."""

    model_dir: Path  # a Hugging Face checkpoint with its tokenizer
    train_file: Path  # parquet: messages, answer; of a task with pictures also images
    test_file: Path  # the same columns
    warm_start_file: Path  # parquet: messages and, unless they are whole conversations, response


def get_task_paths(directory: Path) -> PreparedTask:
    """Return the paths of a task in a folder, whether or not it is written."""
    return PreparedTask(
        model_dir=directory / "model",
        train_file=directory / "train.parquet",
        test_file=directory / "test.parquet",
        warm_start_file=directory / "warm_start.parquet",
    )


def write_task(
    directory: Path, settings: dict[str, object], write: Callable[[PreparedTask], None]
) -> PreparedTask:
    """Write all files by `write` to a temporary folder, and rename it to `directory`.

    Replaces the files of an earlier call; ConfigError if the folder has other files. `settings` are
    saved in task.json.
    """
    _refuse_foreign(directory)
    partial_path = get_partial_path(directory)
    create_folder(partial_path)
    try:
        write(get_task_paths(partial_path))
        (partial_path / "task.json").write_text(json.dumps(settings, indent=2) + "\n")
        if directory.exists():
            shutil.rmtree(directory)
        partial_path.rename(directory)
    except BaseException:
        shutil.rmtree(partial_path, ignore_errors=True)
        raise
    return get_task_paths(directory)


def _refuse_foreign(directory: Path) -> None:
    """Raise ConfigError if a folder has files that `write_task` did not write."""
    if not directory.exists() or (directory / "task.json").is_file():
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise ConfigError(
            f"task directory {directory} exists and was not made by this task; "
            f"allowed: a new or empty folder, or one of an earlier run"
        )
