"""Which rows come next: an endless seeded shuffle that can be stopped and resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from mcore_rl.config.errors import ConfigError


class IndexSampler:
    """Yields lists of `batch_size` row indices for ever, every epoch in a new order.

    Each epoch has every row once. A batch at the end of an epoch is filled from the next one, so
    all batches are full. The order depends on the seed, the number of rows and the epoch alone,
    hence the state is two numbers, and the batch size may change on resuming.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        if num_rows < 1 or batch_size < 1:
            raise ConfigError(
                f"cannot draw batches of {batch_size} from {num_rows} rows; "
                f"allowed: at least 1 of each"
            )
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._seed = seed
        self._start_epoch(0)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        batch: list[int] = []
        while len(batch) < self._batch_size:
            if self._position == self._num_rows:
                self._start_epoch(self._epoch + 1)
            missing = self._batch_size - len(batch)
            drawn = self._order[self._position : self._position + missing]
            self._position += len(drawn)
            batch.extend(drawn)
        return batch

    def state_dict(self) -> dict[str, int]:
        return {
            "num_rows": self._num_rows,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from `state`; ConfigError when it is of other data or another seed."""
        for name, value in (("num_rows", self._num_rows), ("seed", self._seed)):
            if state[name] != value:
                raise ConfigError(
                    f"the saved position in the data is for {name}={state[name]}, this run has "
                    f"{name}={value}; allowed: the data and seed it was saved with"
                )
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        rng = np.random.default_rng([self._seed, epoch])
        self._order: list[int] = rng.permutation(self._num_rows).tolist()
