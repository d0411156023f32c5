"""Servers by `backend`: an import path is a server, and settings that it cannot do are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.schema import RLConfig, RolloutConfig, SGLangConfig, SpeculativeConfig
from mcore_rl.inference.protocol import ServerSpec
from mcore_rl.inference.registry import (
    BACKENDS,
    check_server_settings,
    create_server,
    load_server_class,
)
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.jobs.preflight import check_servers
from mcore_rl.jobs.run_plan import plan_run

SERVER = """
from mcore_rl.config.errors import ConfigError
from mcore_rl.inference.protocol import GenerationServer, ServerFeatures

class Server(GenerationServer):
    features = ServerFeatures({features})

    @classmethod
    def check_settings(cls, settings, key):
        if (settings.max_num_seqs or 0) > 999:
            raise ConfigError(f"{{key}}.max_num_seqs={{settings.max_num_seqs}}; allowed: 999")

    async def start(self): ...
    async def submit(self, prompt_ids, sampling, *, request_id=""): return []
    async def abort(self, request_id): ...
    async def load_checkpoint(self, path, version, *, in_flight=False, recompute_cache=False): ...

class Unfinished(GenerationServer):
    async def start(self): ...

def build(spec):
    return None
"""
ALL = 'weight_format="huggingface", sleep=True, updates_in_flight=True, routed_experts=True'


def write_backend(folder: Path, features: str = ALL, name: str = "Server") -> str:
    (folder / "server.py").write_text(SERVER.format(features=features))
    return f"{folder}/server.py:{name}"


def make_config(backend: str, **settings: Any) -> RLConfig:
    config = RLConfig()
    config.task.name, config.rollout.backend, config.actor.layout.tp = "last_digit", backend, 2
    for key, value in settings.items():
        part, *names = key.split("__")
        target: Any = getattr(config, part)
        for name in names[:-1]:
            target = getattr(target, name)
        setattr(target, names[-1], value)
    return config


def test_a_server_of_a_file_is_built_by_its_import_path(tmp_path):
    settings = RolloutConfig(backend=write_backend(tmp_path))
    spec = ServerSpec("/model", "float32", 64, settings, seed=3)
    server = create_server(spec)
    assert type(server).__name__ == "Server" and server.spec is spec
    assert (server.weight_version, server.is_dead, server.is_headless) == (0, False, False)


def test_the_default_is_a_server_of_vllm_with_all_features(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    server = create_server(ServerSpec(str(tmp_path), "float32", 64, RolloutConfig(), seed=3))
    assert isinstance(server, VLLMServer) and list(BACKENDS) == ["vllm", "sglang"]
    settings = RolloutConfig(tp=4, nodes_per_server=2, ep=True)
    assert check_server_settings(settings, device="cpu").weight_format == "vllm"


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("trtllm", "rollout.backend='trtllm'; allowed: 'vllm', 'sglang', or the import path of "),
        ("{file}:Missing", "server.py' has no function 'Missing'; it has: Server, Unfinished, bu"),
        ("{file}:build", "is no subclass of mcore_rl.inference.protocol.GenerationServer; allowed"),
        ("{file}:Unfinished", "does not define abort, load_checkpoint, submit; allowed: a subcl"),
        ("/nowhere.py:Server", "cannot be imported: FileNotFoundError"),
        ("os:system", "is Python's own posix.system; allowed: a function that was written for"),
    ],
)
def test_a_backend_that_is_none_is_refused_before_anything_starts(tmp_path, backend, message):
    write_backend(tmp_path)
    config = make_config(backend.format(file=tmp_path / "server.py"))
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_rl(config)
        check_servers(resolved := resolve_for_device_type(config, "cpu"), plan_run(resolved))


@pytest.mark.parametrize(
    ("missing", "settings", "message"),
    [
        ("", {"rollout__tp": 2}, "rollout.tp=2: a server of rollout.backend="),
        ("", {"rollout__ep": True}, "rollout.ep=true: a server of rollout.backend="),
        (
            "",
            {"rollout__dp": 2, "rollout__ep": True},
            "rollout.ep=true: a server of rollout.backend=",
        ),
        ("", {"rollout__max_num_seqs": 1000}, "rollout.max_num_seqs=1000; allowed: 999"),
        ("sleep", {}, "placement.rollout='shared': servers of rollout.backend="),
        (
            "updates_in_flight",
            {"trainer__mode": "fully_async", "weight_sync__method": "disaggregated"},
            "trainer.mode='fully_async': servers of rollout.backend=",
        ),
        (
            "routed_experts",
            {"actor__moe__router_replay": "rollout"},
            "actor.moe.router_replay='rollout': servers of rollout.backend=",
        ),
        (
            "drafts",
            {"rollout__speculative__num_tokens": 2, "actor__mtp_loss_coef": 0.1},
            "rollout.speculative.num_tokens=2 has no part in rollout.backend=",
        ),
        ("weight_format", {}, "weight_sync.method='colocated': servers of rollout.backend="),
    ],
)
def test_a_setting_that_needs_a_feature_is_refused_by_name(tmp_path, missing, settings, message):
    features = ", ".join(part for part in ALL.split(", ") if not missing or missing not in part)
    config = make_config(write_backend(tmp_path, features), **settings)
    validate_rl(config)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_servers(resolved := resolve_for_device_type(config, "cpu"), plan_run(resolved))


CONFIG = transformers.Qwen3Config(
    num_attention_heads=12, num_key_value_heads=4, architectures=["Qwen3ForCausalLM"]
).to_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ep": True}, "k.ep=true: the model has no experts; allowed: false"),
        ({"ep": True, "dp": 2}, "k.dp=2: the model has no experts to split over data-parallel"),
        ({"tp": 5}, "k.tp=5 does not divide the model's 12 attention heads"),
        ({"tp": 12}, ""),  # with copies of the 4 key/value heads
        (
            {"speculative": SpeculativeConfig(2)},
            "k.speculative.num_tokens=2: the family 'qwen3' has no rules of vLLM's draft model",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["vllm", "{file}"])
def test_vllm_checks_the_model_and_a_server_of_a_file_takes_any(
    tmp_path, backend, settings, message
):
    path = write_backend(tmp_path, f"{ALL}, tensor_parallel=True, data_parallel=True")
    config = RolloutConfig(backend=backend.format(file=path), **settings)
    server_class = load_server_class(config, "k")
    if message and backend == "vllm":
        with pytest.raises(ConfigError, match=re.escape(message)):
            server_class.check_model(config, "k", CONFIG, "cpu")
    else:
        server_class.check_model(config, "k", CONFIG, "cpu")


def test_drafts_need_prediction_layers_that_are_not_quantized():
    config = transformers.Glm4MoeConfig(
        architectures=["Glm4MoeForCausalLM"], head_dim=128
    ).to_dict()
    settings = RolloutConfig(speculative=SpeculativeConfig(1))
    config["num_nextn_predict_layers"] = 1
    VLLMServer.check_model(settings, "k", config, "cpu")
    for change, reason in (
        ({"num_nextn_predict_layers": 0}, "the model has no layers for multi-token prediction"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the checkpoint is quantized"),
    ):
        message = re.escape(f"k.speculative.num_tokens=1: {reason}")
        with pytest.raises(ConfigError, match=message):
            VLLMServer.check_model(settings, "k", config | change, "cpu")


def test_vllm_refuses_sparse_attention_without_a_gpu_by_name():
    config = transformers.DeepseekV32Config(architectures=["DeepseekV32ForCausalLM"]).to_dict()
    server_class = load_server_class(RolloutConfig(), "rollout")
    server_class.check_model(RolloutConfig(), "rollout", config, "cuda")
    with pytest.raises(ConfigError, match=r"^rollout.backend='vllm' without a GPU: .*Deep.* GPUs$"):
        server_class.check_model(RolloutConfig(), "rollout", config, "cpu")


@pytest.mark.parametrize(
    ("backend", "url", "num_bytes"),
    [("vllm", "", 9), ("sglang", "", 9), ("sglang", "http://x:1", 0), ("{file}", "", 0)],
)
def test_a_server_says_what_its_kv_cache_takes(tmp_path, backend, url, num_bytes):
    backend = backend.format(file=write_backend(tmp_path))
    settings = RolloutConfig(backend=backend, kv_cache_bytes=9, sglang=SGLangConfig(url=url))
    assert load_server_class(settings).get_kv_cache_bytes(settings) == num_bytes


def test_a_server_of_a_file_may_read_the_settings_of_sglang(tmp_path):
    sglang = SGLangConfig(url="http://127.0.0.1:30000")
    settings = RolloutConfig(backend=write_backend(tmp_path), sglang=sglang)
    with pytest.raises(ConfigError, match=r"rollout.sglang=.* has no part in rollout.backend='/"):
        check_server_settings(settings, device="cpu")
    (tmp_path / "other").mkdir()
    settings.backend = write_backend(tmp_path / "other", f"{ALL}, sglang=True")
    check_server_settings(settings, device="cpu")


def test_a_server_over_nodes_needs_the_feature(tmp_path):
    settings = RolloutConfig(backend=write_backend(tmp_path), nodes_per_server=2)
    with pytest.raises(ConfigError, match=r"rollout.nodes_per_server=2: .* one node; allowed: 1"):
        check_server_settings(settings, device="cpu")


def test_without_features_a_server_takes_checkpoints_on_devices_of_its_own(tmp_path):
    config = make_config(
        write_backend(tmp_path, ""), weight_sync__method="full_export", placement__rollout="own"
    )
    validate_rl(config)
    check_servers(resolved := resolve_for_device_type(config, "cpu"), plan_run(resolved))


def test_servers_of_frozen_models_have_backends_too(tmp_path):
    config = make_config(write_backend(tmp_path))
    config.agent.loop, config.agent.environment = "environment", "guessing"
    config.models = {"judge": {"backend": write_backend(tmp_path), "tp": 2}}
    validate_rl(config)
    with pytest.raises(ConfigError, match=r"models.judge.tp=2: a server of models.judge.backend="):
        check_servers(resolved := resolve_for_device_type(config, "cpu"), plan_run(resolved))
    config.models["judge"]["backend"] = "trtllm"
    with pytest.raises(ConfigError, match=r"models.judge.backend='trtllm'; allowed: 'vllm', 's"):
        validate_rl(config)
