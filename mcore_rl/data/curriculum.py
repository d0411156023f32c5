"""Which rows come next, by how often earlier responses to them have succeeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import CurriculumConfig
from mcore_rl.data.sampler import check_same_data

Floats = npt.NDArray[np.float64]


class CurriculumSampler:
    """Draws rows with a chance in proportion to max(weight(rate), min_weight), without replacement.

    The rate of a row is (successes + 1) / (responses + 2), the mean of its posterior from a uniform
    prior: 1/2 for a row that has not been drawn. Earlier counts are multiplied by decay whenever
    the row is drawn again. What is drawn depends on the seed, the number of draws and the counts.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        seed: int,
        config: CurriculumConfig,
        weight: Callable[[Floats], Floats],
    ) -> None:
        self._num_rows, self._batch_size, self._seed = num_rows, batch_size, seed
        self._config, self._weight = config, weight
        self._num_draws = 0
        self._successes, self._responses = np.zeros(num_rows), np.zeros(num_rows)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return self.take(self._batch_size)

    @property
    def rates(self) -> Floats:
        """[rows]"""
        return (self._successes + 1) / (self._responses + 2)

    def take(self, num: int) -> list[int]:
        """`num` different rows.

        Raises:
            ConfigError: the weights are no finite numbers, one a row.
        """
        found, name = self._weight(self.rates), self._config.name
        if not isinstance(found, np.ndarray) or found.shape != (self._num_rows,):
            raise ConfigError(
                f"data.curriculum.name={name!r} returned {type(found).__name__} of "
                f"{np.shape(found)}; allowed: an array of [rows], here ({self._num_rows},)"
            )
        if not np.isfinite(found).all():
            raise ConfigError(
                f"data.curriculum.name={name!r} returned {found[~np.isfinite(found)][0]}; allowed: "
                "finite"
            )
        weights = np.maximum(found, self._config.min_weight)
        rng = np.random.default_rng([self._seed, self._num_draws])
        self._num_draws += 1
        rows = rng.choice(self._num_rows, num, replace=False, p=weights / weights.sum())
        return [int(row) for row in rows]

    def observe(self, row: int, successes: int, responses: int) -> None:
        """What came of a row that was drawn."""
        decay = self._config.decay
        self._successes[row] = decay * self._successes[row] + successes
        self._responses[row] = decay * self._responses[row] + responses

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_rows": self._num_rows,
            "seed": self._seed,
            "num_draws": self._num_draws,
            "successes": self._successes.copy(),
            "responses": self._responses.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; ConfigError when it is of other data or another seed."""
        check_same_data(state, num_rows=self._num_rows, seed=self._seed)
        self._num_draws = state["num_draws"]
        self._successes = np.array(state["successes"], np.float64)
        self._responses = np.array(state["responses"], np.float64)
