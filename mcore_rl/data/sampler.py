"""Which rows come next: an endless seeded shuffle that can be stopped and resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mcore_rl.config.errors import ConfigError


class IndexSampler:
    """Yields lists of `batch_size` row indices for ever, every epoch in a new order.

    Each epoch has every row once. A batch at the end of an epoch is filled from the next one, so
    all batches are full. The order depends on the seed, the number of rows, the epoch and `stream`
    alone, hence the state is two numbers, and the batch size may change on resuming.
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
        """Continue from `state`; ConfigError when it is of other data or another seed."""
        check_same_data(state, num_rows=self._num_rows, seed=self._seed)
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        rng = np.random.default_rng([self._seed, epoch, *self._stream])
        self._order = rng.permutation(self._num_rows)  # 8 bytes a row


def check_same_data(state: Mapping[str, Any], **expected: int) -> None:
    """Raises ConfigError when a saved position is of other data or another seed."""
    for name, value in expected.items():
        if state[name] != value:
            raise ConfigError(
                f"the saved position in the data is for {name}={state[name]}, this run has "
                f"{name}={value}; allowed: the data and seed it was saved with"
            )


class MixtureSampler:
    """The same over several files, which follow each other: row 0 of the second is after the first.

    Each prompt is of the file that is most behind its share of all prompts so far. So after n
    prompts a file of weight w has been drawn n * w / sum(weights) times, to within 1 for two files,
    and the number of files for more: no chance is in it. Inside a file the order is that of an
    IndexSampler, another one for each file. (Megatron-core's BlendedDataset mixes in the same way.)
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
        return [self._draw() for _ in range(num)]

    def _draw(self) -> int:
        self._total_drawn += 1
        file = int(np.argmax(self._share_array * self._total_drawn - self._drawn))
        self._drawn[file] += 1
        return self._first_rows[file] + self._files[file].take(1)[0]

    def _count_drawn(self) -> None:
        """A draw looks at all files, in arrays: it takes microseconds with a thousand of them."""
        self._share_array = np.array(self._shares)
        self._drawn = np.array([file.num_drawn for file in self._files], np.int64)
        self._total_drawn = int(self._drawn.sum())

    def state_dict(self) -> dict[str, Any]:
        return {"shares": self._shares, "files": [file.state_dict() for file in self._files]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; ConfigError when it is of other data, weights or another seed."""
        if state.get("shares") != self._shares:
            raise ConfigError(
                f"the saved position in the data is for files with the shares "
                f"{state.get('shares')}, this run has {self._shares}; allowed: the same "
                "data.train_weights"
            )
        for file, of_file in zip(self._files, state["files"], strict=True):
            file.load_state_dict(of_file)
        self._count_drawn()
