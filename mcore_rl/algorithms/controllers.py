"""Coefficients of KL and entropy that change from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mcore_rl.algorithms.token_rewards import mean_over_sequences, reference_kl
from mcore_rl.config.schema import AlgorithmConfig
from mcore_rl.data.batch import Batch

_MAX_ERROR = 0.2  # of the KL, as a share of its target


class Coefficients:
    """The coefficients of each step: those of the settings, and those that follow a target.

    A state that a checkpoint keeps, where a coefficient follows a target.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._kl, self._entropy = config.kl_coef, config.entropy_coef

    def of_step(
        self, found: Mapping[str, float], num_samples: int
    ) -> tuple[AlgorithmConfig, dict[str, float]]:
        """The settings with the coefficients of a step; and what they follow.

        `found` is what `measured` finds in its `num_samples` samples.

        With algorithm.kl_target: Ziegler et al. 2019 (arXiv:1909.08593), with samples
        and horizon as in its code: coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * samples /
        horizon, after the step. The KL is of a token, the mean of means of responses, where the
        paper has that of a response: so does verl.

        With algorithm.entropy_target: Skywork-OR1 (arXiv:2505.22312): the bonus has
        the coefficient c where the entropy is at most the target, else none; after the step, c goes
        up by entropy_coef_step where the entropy is below the target, down where it is above. Ours
        stays within 0 and entropy_coef_max. The entropy is of a token, over all of the step.
        """
        config, metrics = self._config, dict[str, float]()
        if "kl" in found:
            kl = found["kl"]
            metrics |= {"reference_kl": kl, "kl_coef": self._kl}
        if (target := config.kl_target) is not None:
            config = replace(config, kl_coef=self._kl)
            error = min(max(kl / target - 1, -_MAX_ERROR), _MAX_ERROR)
            self._kl *= 1 + error * num_samples / config.kl_horizon
        if (target := config.entropy_target) is not None:
            entropy = found["entropy"]
            used = self._entropy if entropy <= target else 0.0
            metrics |= {"entropy": entropy, "entropy_coef": used}
            config = replace(config, entropy_coef=used)
            moved = self._entropy + config.entropy_coef_step * float(np.sign(target - entropy))
            self._entropy = min(max(moved, 0.0), config.entropy_coef_max)
        return config, {f"algorithm/{name}": value for name, value in metrics.items()}

    @property
    def follow(self) -> bool:
        """Whether `measured` finds anything."""
        config = self._config
        is_told = config.kl_placement == "reward" or config.kl_target is not None
        return is_told or config.entropy_target is not None

    @property
    def config(self) -> AlgorithmConfig:
        """The settings, with the coefficients that they begin with."""
        return self._config

    def state_dict(self) -> dict[str, Any]:
        return {"kl": self._kl, "entropy": self._entropy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A coefficient without a target is that of the settings, which may be others now."""
        if self._config.kl_target is not None:
            self._kl = state["kl"]
        if self._config.entropy_target is not None:
            self._entropy = state["entropy"]


def measured(batch: Batch, config: AlgorithmConfig) -> dict[str, float]:
    """What coefficients follow: `kl` and `entropy`, each only where a setting needs it."""
    mask, found = batch.jagged("response_mask"), dict[str, float]()
    if config.kl_placement == "reward" or config.kl_target is not None:
        found["kl"] = mean_over_sequences(reference_kl(batch, config), mask)
    if config.entropy_target is not None:
        chosen = batch.jagged("entropy").values[mask.values != 0]
        found["entropy"] = float(chosen.mean(dtype=np.float64)) if len(chosen) else 0.0
    return found
