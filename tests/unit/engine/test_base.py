"""Engines are created by backend and model type; calls check that their parts are on the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mcore_rl.config.errors import ConfigError, StateError
from mcore_rl.config.schema import EngineConfig, ModelConfig
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import EngineSpec, create_engine
from mcore_rl.engine.megatron.engine import MegatronEngine, ValueEngine
from mcore_rl.jobs.parity import engines

SPEC = EngineSpec(ModelConfig(path="/nowhere"), EngineConfig(), seed=0)


@pytest.mark.parametrize(
    ("model_type", "kind"), [("language_model", MegatronEngine), ("value_model", ValueEngine)]
)
def test_an_engine_is_chosen_by_backend_and_model_type(model_type, kind):
    assert type(create_engine(model_type, SPEC)) is kind


def test_an_engine_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(ConfigError, match="backend='deepspeed'; allowed: 'megatron', 'fsdp'"):
        create_engine("language_model", replace(SPEC, engine=EngineConfig(backend="deepspeed")))
    with pytest.raises(ConfigError, match="no engine of 'reward'; allowed: language_model, value"):
        create_engine("reward", SPEC)


def test_a_comparison_of_engines_has_the_one_that_its_settings_name():
    spec = replace(SPEC, engine=EngineConfig(backend="deepspeed"))
    for job in (engines.score_with_megatron, engines.trace_with_megatron):
        with pytest.raises(ConfigError, match="backend='deepspeed'; allowed: 'megatron', 'fsdp'"):
            job(spec, "", [])


def test_a_place_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match=r"engine.to\('cuda'\); allowed: 'host', 'device'"):
        MegatronEngine(SPEC).to("cuda")


@pytest.mark.parametrize(
    ("away", "call", "named"),
    [
        ("model", lambda engine: engine.infer_batch(Batch({})), "parameters"),
        ("model", lambda engine: engine.get_local_weights(), "parameters"),
        ("model", lambda engine: next(engine.get_per_tensor_param()), "parameters"),
        ("model", lambda engine: engine.save_checkpoint("nowhere"), "parameters"),
        ("optimizer", lambda engine: engine.save_checkpoint("nowhere"), "optimizer state"),
        ("optimizer", lambda engine: engine.load_checkpoint("nowhere"), "optimizer state"),
        ("optimizer", lambda engine: engine.optimizer_step(), "optimizer state"),
        (
            "optimizer",
            lambda engine: engine.train_batch(Batch({}), lambda *_: None),
            "optimizer state",
        ),
        (
            "optimizer",
            lambda engine: engine.train_batch_with_scores(Batch({}), lambda *_: None, bounds={}),
            "optimizer state",
        ),
        ("grad", lambda engine: engine.optimizer_zero_grad(), "gradients"),
        ("grad", lambda engine: engine.train_batch(Batch({}), lambda *_: None), "gradients"),
    ],
)
def test_a_call_that_needs_what_is_away_is_refused_by_its_name(away, call, named):
    engine = MegatronEngine(SPEC)
    engine.wrapped_chunks, engine.chunks = [], []
    engine.optimizer, engine.schedule = torch.optim.SGD([torch.zeros(1)]), object()
    engine.to("host", **{name: name == away for name in ("model", "optimizer", "grad")})
    with pytest.raises(StateError, match=rf"^the engine's {named} are away, on the host; allowed"):
        call(engine)
