"""Samplers: endless, seeded orders of rows that can be saved and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import CurriculumConfig

Floats = npt.NDArray[np.float64]


class IndexSampler:
    """Endless lists of `batch_size` row indices, every epoch in a new order.

    Each epoch has every row once. The last batch of an epoch is filled from the next epoch, so all
    batches are full. The order depends on the seed, the number of rows, the epoch and `stream`
    only: the state is two numbers, and the batch size may change on resuming.
    """

    def __init__(
        self, num_rows: int, batch_size: int, seed: int, stream: Sequence[int] = ()
    ) -> None:
        if num_rows < 1 or batch_size < 1:
            raise ConfigError(
                f"cannot draw batches of {batch_size} from {num_rows} rows; "
                f"allowed: at least 1 of each"
            )
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._seed = seed
        self._stream = stream
        self._start_epoch(0)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return self.take(self._batch_size)

    def take(self, num: int) -> list[int]:
        """Draw the next rows."""
        batch: list[int] = []
        while len(batch) < num:
            if self._position == self._num_rows:
                self._start_epoch(self._epoch + 1)
            missing = num - len(batch)
            drawn = self._order[self._position : self._position + missing]
            self._position += len(drawn)
            batch.extend(drawn.tolist())
        return batch

    @property
    def num_drawn(self) -> int:
        return self._epoch * self._num_rows + self._position

    def state_dict(self) -> dict[str, int]:
        return {
            "num_rows": self._num_rows,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from `state`; ConfigError if it is of other data or another seed."""
        check_same_data(state, num_rows=self._num_rows, seed=self._seed)
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        rng = np.random.default_rng([self._seed, epoch, *self._stream])
        self._order = rng.permutation(self._num_rows)  # 8 bytes a row


def check_same_data(state: Mapping[str, Any], **expected: int) -> None:
    """Raise ConfigError if a saved position is of other data or another seed."""
    for name, value in expected.items():
        if state[name] != value:
            raise ConfigError(
                f"the saved position in the data is for {name}={state[name]}, this run has "
                f"{name}={value}; allowed: the data and seed it was saved with"
            )


class MixtureSampler:
    """Endless mixture of files; row 0 of the second file is after the last row of the first.

    Each prompt is from the file that is most behind its share of all prompts so far, as in
    Megatron-core's BlendedDataset. After n prompts a file of weight w has been drawn
    n * w / sum(weights) times, to within 1 for two files, to within the number of files for more.
    Each file has an IndexSampler.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int
    ) -> None:
        self._files = [IndexSampler(n, 1, seed, [index]) for index, n in enumerate(sizes)]
        self._first_rows = [0, *accumulate(sizes)]
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self._batch_size = batch_size
        self._count_drawn()

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return self.take(self._batch_size)

    def take(self, num: int) -> list[int]:
        """Draw the next rows."""
        return [self._draw() for _ in range(num)]

    def _draw(self) -> int:
        self._total_drawn += 1
        file = int(np.argmax(self._share_array * self._total_drawn - self._drawn))
        self._drawn[file] += 1
        return self._first_rows[file] + self._files[file].take(1)[0]

    def _count_drawn(self) -> None:
        """Build the arrays with which a draw compares a thousand files in microseconds."""
        self._share_array = np.array(self._shares)
        self._drawn = np.array([file.num_drawn for file in self._files], np.int64)
        self._total_drawn = int(self._drawn.sum())

    def state_dict(self) -> dict[str, Any]:
        return {"shares": self._shares, "files": [file.state_dict() for file in self._files]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; ConfigError if it is of other data, weights or another seed."""
        if state.get("shares") != self._shares:
            raise ConfigError(
                f"the saved position in the data is for files with the shares "
                f"{state.get('shares')}, this run has {self._shares}; allowed: the same "
                "data.train_weights"
            )
        for file, file_state in zip(self._files, state["files"], strict=True):
            file.load_state_dict(file_state)
        self._count_drawn()


class CurriculumSampler:
    """Draws without replacement, with probabilities proportional to max(weight(rate), min_weight).

    The success rate of a row is (successes + 1) / (responses + 2), the posterior mean under a
    uniform prior: 1/2 for a row without responses. `observe` multiplies earlier counts by decay. A
    draw depends on the seed, the number of draws and the counts.
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
        """Success rate of each row: [rows]."""
        return (self._successes + 1) / (self._responses + 2)

    def take(self, num: int) -> list[int]:
        """Draw different rows.

        Raises:
            ConfigError: the weight function did not return a finite number per row.
        """
        weights, name = self._weight(self.rates), self._config.name
        if not isinstance(weights, np.ndarray) or weights.shape != (self._num_rows,):
            raise ConfigError(
                f"data.curriculum.name={name!r} returned {type(weights).__name__} of "
                f"{np.shape(weights)}; allowed: an array of [rows], here ({self._num_rows},)"
            )
        if not np.isfinite(weights).all():
            raise ConfigError(
                f"data.curriculum.name={name!r} returned {weights[~np.isfinite(weights)][0]}; "
                "allowed: finite"
            )
        weights = np.maximum(weights, self._config.min_weight)
        rng = np.random.default_rng([self._seed, self._num_draws])
        self._num_draws += 1
        rows = rng.choice(self._num_rows, num, replace=False, p=weights / weights.sum())
        return [int(row) for row in rows]

    def observe(self, row: int, successes: int, responses: int) -> None:
        """Count the responses to a row that was drawn."""
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
        """Continue from `state`; ConfigError if it is of other data or another seed."""
        check_same_data(state, num_rows=self._num_rows, seed=self._seed)
        self._num_draws = state["num_draws"]
        self._successes = np.array(state["successes"], np.float64)
        self._responses = np.array(state["responses"], np.float64)
