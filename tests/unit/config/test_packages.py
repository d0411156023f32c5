"""A package that the installed extra lacks is named, with the extras that have it, at the start."""

import importlib.util

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig, SFTConfig
from mcore_rl.inference.registry import EXAMPLE, load_server_class
from mcore_rl.jobs.placement import resolve_for_nodes
from mcore_rl.jobs.supervised_preflight import resolve_for_device


@pytest.fixture(autouse=True)
def without_engines(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in ("megatron", "vllm") else find_spec(name, *rest),
    )


def make_config(backend: str, servers: str) -> RLConfig:
    config = RLConfig(output_dir="out")
    config.task.name, config.actor.backend, config.rollout.backend = "last_digit", backend, servers
    config.warm_start.moe_aux_loss_coef = 0.0
    return config


@pytest.mark.parametrize(
    ("backend", "servers", "error"),
    [
        (
            "megatron",
            "vllm",
            "actor.backend='megatron': the package megatron is not installed; allowed: 'fsdp', or "
            "the extra 'cpu' or 'gpu' of mcore-rl",
        ),
        (
            "fsdp",
            "vllm",
            "rollout.backend='vllm': the package vllm is not installed; allowed: "
            "'mcore_rl.examples.hf_server:HFServer', or the extra 'cpu' or 'gpu' of mcore-rl",
        ),
    ],
)
def test_a_run_without_the_package_of_an_engine_or_a_server_is_refused(backend, servers, error):
    config = make_config(backend, servers)
    with pytest.raises(ConfigError) as refusal:
        resolve_for_nodes(config, "cpu")
    assert str(refusal.value) == error
    resolve_for_nodes(config, "cpu", needs_data=False)  # a plan needs neither


def test_a_run_on_fsdp_with_the_server_of_transformers_needs_neither():
    resolve_for_nodes(make_config("fsdp", EXAMPLE), "cpu")


def test_the_server_that_an_error_names_is_one_that_needs_no_extra_package():
    assert load_server_class(make_config("fsdp", EXAMPLE).rollout).package == ""


def test_servers_of_frozen_models_are_checked_too():
    config = make_config("fsdp", EXAMPLE)
    config.agent.loop = "mcore_rl.examples.delegating:Delegating"
    config.models = {"judge": {"path": "/judge", "backend": "vllm"}}
    with pytest.raises(ConfigError, match=r"^models\.judge\.backend='vllm': the package vllm"):
        resolve_for_nodes(config, "cpu")


def test_supervised_training_without_megatron_is_refused():
    config = SFTConfig(output_dir="out")
    config.model.path, config.data.train_file = "model", "train.jsonl"
    with pytest.raises(ConfigError, match=r"^engine\.backend='megatron': the package megatron is"):
        resolve_for_device(config, "cpu")
