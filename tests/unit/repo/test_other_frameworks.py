"""The names in docs/from_verl_and_trl.md are ours, and those of the frameworks that are here."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from mcore_rl.cli import other_names
from mcore_rl.config.describe import list_setting_groups
from mcore_rl.config.schema import RLConfig
from tests.pages import ROOT

PAGE = ROOT / "docs" / "from_verl_and_trl.md"
ROWS = [
    [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:4]]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and "`" in line
]


def names(column: int) -> list[str]:
    return [name for row in ROWS for name in row[column]]


def leaves(tree: Any, key: str = "") -> set[str]:
    """Dotted names of all groups and settings."""
    keys = {key}
    for name, inside in tree.items() if isinstance(tree, dict) else ():
        keys |= leaves(inside, f"{key}.{name}" if key else name)
    return keys


def test_each_setting_of_ours_exists_and_each_row_has_one():
    known = {setting.key for group in list_setting_groups(RLConfig()) for setting in group.settings}
    assert len(ROWS) > 100 and all(row[2] for row in ROWS)
    assert set(names(2)) <= known, set(names(2)) - known
    settings = [name for name in names(0) if name]
    assert len(settings) == len(set(settings))  # one place for each


def test_each_setting_of_verl_exists():
    if (spec := find_spec("verl")) is None:
        pytest.skip("verl is not installed")
    file = Path(spec.origin or "").parent / "trainer/config/_generated_ppo_megatron_trainer.yaml"
    known = leaves(yaml.safe_load(file.read_text()))
    assert set(names(0)) <= known, set(names(0)) - known


def test_each_setting_of_trl_that_is_one_of_transformers_exists():
    """TRL itself is not installed: these are the fields that it inherits."""
    inherited = {
        "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "eval_on_start", "eval_steps",
        "gradient_checkpointing", "learning_rate", "lr_scheduler_type", "max_grad_norm",
        "max_steps", "metric_for_best_model", "output_dir", "per_device_train_batch_size",
        "project", "report_to", "resume_from_checkpoint", "save_steps", "save_total_limit",
        "seed", "warmup_steps", "weight_decay",
    }  # fmt: skip
    assert inherited <= set(names(1))
    assert inherited <= TrainingArguments.__dataclass_fields__.keys()


def test_errors_know_the_names_of_the_page():
    shown = [[[n.removeprefix("actor_rollout_ref.") for n in cell] for cell in row] for row in ROWS]
    assert [list(row) for row in other_names.ROWS] == shown
