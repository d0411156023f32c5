"""Engines are found by model type, backend and device; memory moves only where there is another."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import EngineConfig, ModelConfig
from mcore_rl.engine.base import EngineSpec, create_engine
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.engine.megatron.offload import move
from mcore_rl.engine.megatron.value_engine import ValueEngine

SPEC = EngineSpec(ModelConfig(path="/nowhere"), EngineConfig(), seed=0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("model_type", "kind"), [("language_model", MegatronEngine), ("value_model", ValueEngine)]
)
def test_the_megatron_engines_serve_both_lanes(device, model_type, kind):
    assert type(create_engine(model_type, "megatron", device, SPEC)) is kind


def test_an_engine_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(ConfigError, match=r"'fsdp'.*\('language_model', 'megatron', 'cpu'\)"):
        create_engine("language_model", "fsdp", "cpu", SPEC)


def test_on_the_cpu_lane_moving_to_the_cpu_leaves_everything_where_it_is():
    model = torch.nn.Linear(2, 2)
    before = model.weight.data_ptr()
    move(model, None, "cpu", parameters=True, optimizer_state=True, grad=True)
    assert model.weight.data_ptr() == before


def test_a_device_that_the_lane_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"engine.to\('cuda'\); allowed: 'cpu'"):
        move(torch.nn.Linear(2, 2), None, "cuda", parameters=True, optimizer_state=True, grad=True)
