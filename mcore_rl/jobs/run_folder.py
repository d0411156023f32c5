"""The model that a folder means: a Hugging Face checkpoint, or what a run has left last."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.checkpoint.run_checkpoints import format_name, list_steps
from mcore_rl.config.checks import exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.schema import ModelConfig
from mcore_rl.jobs.output import CHECKPOINT, STARTED
from mcore_rl.trainers.checkpointing import CHECKPOINTS


def chat_date_of(path: str) -> str:
    """Read model.chat_date of the run in `path`; without a run, the setting's default."""
    model: object = None
    if (Path(path) / STARTED).is_file():
        model = read_json_object(Path(path) / STARTED).get("model")
    if not isinstance(model, dict):  # config.json of transformers has no such object
        return ModelConfig.chat_date
    return str(model.get("chat_date", ModelConfig.chat_date))


def model_folder(path: str, setting: str = "model.path") -> Path:
    """The folder of a Hugging Face checkpoint: `path`, or what is last in the output folder of a
    run: its checkpoint/, written when it has ended, or else its last hf/step_NNNNNN.

    Raises:
        ConfigError: it is neither; `setting` names it.
    """
    folder = Path(path)
    exists(setting, folder)
    if not folder.is_dir():
        raise ConfigError(f"{setting}={path!r} is not a folder")
    if (folder / CHECKPOINT / "config.json").is_file():
        return folder / CHECKPOINT
    if steps := list_steps(folder / "hf"):
        return folder / "hf" / format_name(steps[-1])
    if (folder / CHECKPOINTS).is_dir() or (folder / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{setting}={path!r} is of a run that has left no Hugging Face checkpoint yet; allowed:"
            f" a run that has ended, or one with checkpoint.hf_every, or what mcore-rl convert "
            f"mcore-to-hf makes of a checkpoint in {CHECKPOINTS}"
        )
    if not (folder / STARTED).is_file():
        raise ConfigError(
            f"{setting}={path!r} has no config.json; allowed: the folder of a Hugging Face "
            f"checkpoint, or the output_dir of a run"
        )
    return folder
