"""Damage that shows in values."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.checkpoint.integrity import require_finite
from mcore_rl.config.errors import ConfigError

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (3, 101), (63, 256)])
def test_the_first_value_that_is_not_finite_is_named(dtype, value, place):
    tensor = torch.zeros(64, 257, dtype=dtype)
    tensor[place] = tensor[63, 256] = value
    with pytest.raises(ConfigError) as caught:
        require_finite("w", tensor)
    assert str(caught.value) == f"tensor w is damaged: it has {value} at {list(place)}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_are_finite(dtype):
    largest = torch.finfo(dtype).max
    require_finite("w", torch.full((300, 300), largest, dtype=dtype))
    require_finite("w", torch.tensor([-largest, largest, 0.0], dtype=dtype))
    require_finite("w", torch.empty(0, 3, dtype=dtype))
