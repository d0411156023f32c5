"""What a server hands to vLLM, as vLLM's own config takes it."""

import pickle

from vllm.config import VllmConfig

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.vllm_worker import ServerName, lane_arguments


def config_of(name: ServerName) -> VllmConfig:
    arguments = lane_arguments(RolloutConfig(), name, max_model_tokens=64, eager=False)
    return VllmConfig(additional_config=arguments["additional_config"])


def test_servers_of_different_names_share_compiled_graphs(monkeypatch):
    monkeypatch.setattr("os.environ", {})  # lane_arguments sets those of a process of its own
    first, second = ServerName.new(), ServerName.new()
    assert first != second
    assert config_of(first).compute_hash() == config_of(second).compute_hash()
    assert config_of(first).compute_hash() != VllmConfig().compute_hash()


def test_the_name_travels_in_the_config(monkeypatch):
    monkeypatch.setattr("os.environ", {})
    name = ServerName.new()
    copy = pickle.loads(pickle.dumps(config_of(name))).additional_config
    assert isinstance(copy, ServerName) and copy == name and copy.pid == name.pid
