"""What travels between ranks of torchrun; the ranks themselves are in e2e/test_train_jobs.py."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.controller.torchrun import _bytes_of, _packed, _unpacked, _value_of, check_world
from mcore_rl.data.batch import Batch, Jagged


def there_and_back(value):
    return _unpacked(_value_of(_bytes_of(_packed(value))))


def test_a_batch_arrives_as_it_was_sent():
    columns = {
        "ids": Jagged.pack([[1, 2], [], [3]], np.int64),
        "weights": Jagged.pack([[0.5, -1.0], [], [np.inf]], np.float32),
        "margins": np.array([0.0, 1.0, 2.0]),
    }
    found = there_and_back({"batch": 1, "values": (Batch(columns), "text", 2.5, None, [True])})
    batch, *others = found["values"]
    assert (found["batch"], others) == (1, ["text", 2.5, None, [True]])
    for name, column in columns.items():
        for one, other in zip(column, batch[name], strict=True):
            np.testing.assert_array_equal(one, other)
        values = [c.values if isinstance(c, Jagged) else c for c in (column, batch[name])]
        assert values[0].dtype == values[1].dtype


def test_nothing_that_is_received_is_run():
    class Evil:
        def __reduce__(self):
            return eval, ("1",)  # print is another function where Ray has run

    with pytest.raises(pickle.UnpicklingError, match="Unsupported global: GLOBAL eval"):
        _value_of(_bytes_of({"method": Evil()}))


def test_a_world_has_to_be_that_of_the_layout(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_world(Layout(pp=2))
    with pytest.raises(ConfigError, match=r"started 2 ranks, engine\.layout has 4"):
        check_world(Layout(pp=2, dp=2))
