"""Settings of which prompts a run draws and which samples it trains on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CurriculumConfig:
    """Prompts drawn by the success rate p of their earlier responses."""

    # The weight of a prompt of rate p among all: learnability (4 p (1 - p)), window (1 from low to
    # high), or an import path. Empty: prompts come in random order, each once an epoch.
    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    success: str = "reward"  # what says that a response has succeeded: reward, or a part of it
    min_reward: float = 1.0  # a response with at least this much of it has
    decay: float = 0.5  # what earlier responses still count when a prompt is drawn again
    min_weight: float = 0.05  # the smallest weight of a prompt


@dataclass
class ReplayConfig:
    """Groups of earlier steps, trained on again in place of new ones."""

    share: float = 0.0  # of the groups of a step; 0: none
    max_age: int = 4  # most steps since a group was generated
    # The weight of a group among those that may be drawn: spread (of its rewards), rare_success,
    # uniform, or an import path.
    priority: str = "spread"
    priority_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function


@dataclass
class SamplesConfig:
    """Which of the generated samples a step trains on: docs/sample_policies.md."""

    # Which groups a step keeps: drop_uniform (those whose rewards are not all the same), or an
    # import path. Empty: all.
    group_filter: str = ""
    group_filter_settings: dict[str, Any] = field(default_factory=dict)  # of that function
    # Most rounds of generation in a step, until it has trainer.prompts_per_step groups that pass.
    max_rounds: int = 1
    prompts_per_round: int = 0  # 0: as many as the step has groups
    if_short: str = "train"  # with fewer groups after the last round: train on them, or stop
    keep_responses: int = 0  # responses of a group that are trained on; 0: all
    keep_by: str = "max_variance"  # best, best_and_worst, max_variance, random or an import path
    keep_by_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    advantages_of: str = "kept"  # responses that advantages compare: kept, or all generated
    mask_truncated: bool = False  # no loss for trajectories whose last turn is cut off
    replay: ReplayConfig = field(default_factory=ReplayConfig)
