"""What to do with a run that has ended: commands that look at it, evaluate it and talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from pathlib import Path

from mcore_rl.config.resolve import list_test_files
from mcore_rl.config.schema import EvalConfig, RLConfig, RMConfig, RolloutConfig, TrainConfig
from mcore_rl.data.sample_tables import list_tables
from mcore_rl.data.tasks.prepared import prepared
from mcore_rl.observability.process import wrap_command

CHECKPOINT = "checkpoint"  # the folder with the weights of the end
_SET = "data.sets.NAME=FILE"
_EVALUATED_ALIKE = (
    "data.prompt_column", "data.answer_column", "data.tools_column", "data.max_prompt_tokens",
    "rollout.max_response_tokens", "rollout.tp", "rollout.kv_cache_bytes", "reward.name",
)  # fmt: skip


def list_next_commands(folder: Path, config: RLConfig | TrainConfig) -> list[str]:
    """Return lines with commands, to be pasted into a shell; long ones go on in the next line."""
    lines: list[str] = []
    for words in _commands(folder, config):
        head = f"{' ' * 5} mcore-rl" if lines else "next: mcore-rl"
        lines += wrap_command(words, head)
    return lines


def _commands(folder: Path, config: RLConfig | TrainConfig) -> Iterator[list[str]]:
    if isinstance(config, RMConfig):
        yield ["rl", "recipe=MINE.yaml", f"reward_model.model_path={folder / CHECKPOINT}"]
        return
    if list_tables(folder):
        yield ["samples", str(folder)]
    own = [*_list_eval_settings(folder, config)] if isinstance(config, RLConfig) else [_SET]
    if own:
        yield ["eval", f"model.path={folder}", *own]
    chat = ["chat", str(folder)]
    if isinstance(config, RLConfig):
        for name in ("tp", "kv_cache_bytes"):
            value = getattr(config.rollout, name)
            if value != getattr(RolloutConfig(), name):
                chat += [f"--{name.replace('_', '-')}", str(value)]
    yield chat


def _list_eval_settings(folder: Path, config: RLConfig) -> Iterator[str]:
    """Nothing for runs that `mcore-rl eval` cannot repeat: of agents, or with terms of a reward."""
    if config.agent.loop != "single_turn" or config.reward.terms:
        return
    sets = {name: file for name, (_, file) in list_test_files(config.data).items()}
    made = prepared(folder / "task").test_file
    if config.task.name and made.is_file():
        sets["test"] = str(made)
    yield from [f"data.sets.{name}={file}" for name, file in sets.items()] or [_SET]
    for key in _EVALUATED_ALIKE:
        value, default = (reduce(getattr, key.split("."), of) for of in (config, EvalConfig()))
        if value != default:
            yield f"{key}={value}"
