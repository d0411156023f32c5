"""Adaptive coefficients of KL and entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mcore_rl.algorithms.kl import compute_reference_kl, compute_sequence_mean
from mcore_rl.config.schema import AlgorithmConfig
from mcore_rl.data.batch import Batch

_MAX_ERROR = 0.2  # of the KL, relative to its target


class Coefficients:
    """Coefficients of KL and entropy: constant, or adapted to a target after each step.

    Adapted coefficients are part of a training checkpoint.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._kl, self._entropy = config.kl_coef, config.entropy_coef

    def update(
        self, measurements: Mapping[str, float], num_samples: int
    ) -> tuple[AlgorithmConfig, dict[str, float]]:
        """Return the settings with this step's coefficients, and adapt them for the next step.

        Args:
            measurements: Result of `measure` for the samples of the step.
            num_samples: Number of these samples.

        Returns:
            The settings, and metrics algorithm/NAME.

        algorithm.kl_target: Ziegler et al. 2019 (arXiv:1909.08593), with samples and horizon as in
        its code: after the step, coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * samples / horizon.
        The KL is per token, averaged over responses, as in verl; the paper's is per response.

        algorithm.entropy_target: Skywork-OR1 (arXiv:2505.22312): the bonus has the coefficient c if
        the entropy is at most the target, else 0; after the step, c goes up by entropy_coef_step if
        the entropy is below the target, down if it is above. Here c stays within 0 and
        entropy_coef_max. The entropy is the mean over the tokens of the step.
        """
        config, metrics = self._config, dict[str, float]()
        if "kl" in measurements:
            metrics |= {"reference_kl": measurements["kl"], "kl_coef": self._kl}
        if (target := config.kl_target) is not None:
            config = replace(config, kl_coef=self._kl)
            error = min(max(measurements["kl"] / target - 1, -_MAX_ERROR), _MAX_ERROR)
            self._kl *= 1 + error * num_samples / config.kl_horizon
        if (target := config.entropy_target) is not None:
            entropy = measurements["entropy"]
            used = self._entropy if entropy <= target else 0.0
            metrics |= {"entropy": entropy, "entropy_coef": used}
            config = replace(config, entropy_coef=used)
            coef = self._entropy + config.entropy_coef_step * float(np.sign(target - entropy))
            self._entropy = min(max(coef, 0.0), config.entropy_coef_max)
        return config, {f"algorithm/{name}": value for name, value in metrics.items()}

    @property
    def needs_measurements(self) -> bool:
        """True if `measure` returns anything with these settings."""
        return _reads_kl(self._config) or self._config.entropy_target is not None

    @property
    def config(self) -> AlgorithmConfig:
        """Settings with the initial coefficients."""
        return self._config

    def state_dict(self) -> dict[str, Any]:
        return {"kl": self._kl, "entropy": self._entropy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the coefficients with a target; the settings, which may be new, give the rest."""
        if self._config.kl_target is not None:
            self._kl = state["kl"]
        if self._config.entropy_target is not None:
            self._entropy = state["entropy"]


def _reads_kl(config: AlgorithmConfig) -> bool:
    return config.kl_placement == "reward" or config.kl_target is not None


def measure(batch: Batch, config: AlgorithmConfig) -> dict[str, float]:
    """Measure the `kl` and the `entropy` of a step's samples, each if a setting needs it."""
    mask, measurements = batch.jagged("response_mask"), dict[str, float]()
    if _reads_kl(config):
        measurements["kl"] = compute_sequence_mean(compute_reference_kl(batch, config), mask)
    if config.entropy_target is not None:
        chosen = batch.jagged("entropy").values[mask.values != 0]
        measurements["entropy"] = float(chosen.mean(dtype=np.float64)) if len(chosen) else 0.0
    return measurements
