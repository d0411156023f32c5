"""Arguments that settings pass to vLLM's engine: known, unknown, of another type, refused."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.passthrough import find_rule
from mcore_rl.config.rules_rollout import build_served_models
from mcore_rl.config.schema import RLConfig, RolloutConfig
from mcore_rl.inference.registry import check_server_settings
from mcore_rl.inference.vllm import engine_arguments
from mcore_rl.inference.vllm.engine_arguments import DENIED, OWNED, read_arguments
from tests.unit.inference.test_vllm_worker import build_config


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr("os.environ", dict(os.environ))  # a server's process sets variables


def check(engine: dict[str, Any], device: str = "cuda", key: str = "rollout") -> None:
    check_server_settings(RolloutConfig(engine=engine), key, device=device)


@pytest.mark.parametrize(
    "engine",
    [
        {"block_size": 64},
        {"kv_cache_dtype": "fp8"},
        {"moe_backend": "triton", "all2all_backend": "deepep_low_latency"},
        {"attention_backend": "FLASH_ATTN", "decode_context_parallel_size": 8},
        {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}, "enforce_eager": False},
        {"long_prefill_token_threshold": 512, "async_scheduling": None},
        {"kv_cache_dtype_skip_layers": ["0"], "optimization_level": 1},
    ],
)
def test_arguments_of_vllms_engine_pass_on_a_gpu(engine):
    check(engine)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        # unknown
        ("blok_size", 16, r": vLLM 0.32\S* has no such field; .*; did you mean block_size"),
        ("tensor_parallel", 2, r": vLLM .* has no such field; allowed: fields of EngineArgs"),
        # of another type
        ("block_size", "16", r"='16'; allowed: a whole number or null$"),
        ("kv_cache_dtype", "fp9", r"='fp9'; allowed: 'auto', "),
        ("disable_custom_all_reduce", "yes", r"='yes'; allowed: true or false$"),
        ("attention_backend", "flash", r"='flash'; allowed: 'FLASH_ATTN', "),
        ("kv_cache_dtype_skip_layers", [0], r"\[0\]=0; allowed: text$"),
        ("compilation_config", {"levl": 3}, r"\.levl=3; allowed: fields of CompilationConfig$"),
        ("compilation_config", {"mode": "fast"}, r".*; allowed: "),
        ("compilation_config", 3, r"=3; allowed: a mapping of fields of CompilationConfig"),
        # decided by other settings
        ("tensor_parallel_size", 2, r"=2: rollout.tp decides this field; allowed: rollout.tp$"),
        ("seed", 1, r": seed decides this field"),
        ("model", "/m", r": model.path decides this field"),
        ("load_format", "dummy", r": rollout.load_format decides"),
        ("quantization", "fp8", r": rollout.quantization decides"),
        ("max_num_batched_tokens", 64, r": rollout.max_num_batched_tokens decides"),
        ("gpu_memory_utilization", 0.9, r": rollout.kv_cache_bytes decides"),
        ("enable_lora", True, r": rollout.lora, models.NAME.adapter decides"),
        ("max_lora_rank", 8, r": rollout.lora, models.NAME.adapter decides"),
        # wrong here
        ("logprobs_mode", "raw_logprobs", r": log-probs would not be those of the distribution"),
        ("hf_overrides", {}, r": weights of other modules or ranks would not be those that an"),
        ("kv_transfer_config", None, r": keys and values of older weights would outlive"),
        ("pipeline_parallel_size", 2, r": weights of other modules or ranks"),
        ("data_parallel_size", 2, r": rollout.dp decides this field; allowed: rollout.dp$"),
        ("trust_remote_code", True, r": code of a checkpoint is never run"),
        ("moe_backend", "flashinfer_trtllm", r": weights of .*; allowed: 'triton', 'batched_tri"),
        ("worker_cls", "my.Worker", r": the server starts and watches its processes itself"),
    ],
)  # fmt: skip
def test_an_argument_is_refused_before_a_run_with_the_reason(name, value, message):
    with pytest.raises(ConfigError, match=rf"^rollout\.engine\.{name}.*{message}"):
        check({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("enforce_eager", True), ("optimization_level", 0), ("compilation_config", {"mode": 0})],
)
def test_data_parallel_ranks_of_several_workers_need_graphs(name, value):
    settings = RolloutConfig(dp=2, tp=1, ep=True, engine={name: value})
    check_server_settings(settings, "k", device="cuda")
    settings.tp = 2
    with pytest.raises(ConfigError, match=rf"k\.engine\.{name}=.* with k\.dp=2 and k\.tp=2"):
        check_server_settings(settings, "k", device="cuda")


def test_float8_of_the_engine_of_frozen_models_servers_is_refused():
    settings = RolloutConfig(engine={"quantization": "fp8"})
    with pytest.raises(ConfigError, match=r"judge\.engine\.quantization=.*only servers of the pol"):
        check_server_settings(settings, "models.judge", device="cuda")


@pytest.mark.parametrize("name", ["enable_chunked_prefill", "enforce_eager"])
def test_arguments_that_a_cpu_decides_are_refused_there(name):
    check({name: False})
    with pytest.raises(
        ConfigError, match=rf"^rollout.engine.{name}=False: on a CPU .*; allowed: n"
    ):
        check({name: False}, "cpu")


def test_arguments_of_a_frozen_models_servers_are_its_own():
    config = RLConfig(models={"judge": {"path": "/m", "engine": {"tensor_parallel_size": 2}}})
    servers = build_served_models(config)["judge"].servers
    with pytest.raises(ConfigError, match=r"^models.judge.engine.*=2: models.judge.tp decides"):
        check_server_settings(servers, "models.judge", device="cuda")


@pytest.mark.parametrize(("backend", "hint"), [("sglang", ", or rollout.sglang.arguments$")])
def test_another_backend_refuses_arguments_of_vllm_by_name(backend, hint):
    settings = RolloutConfig(backend=backend, engine={"block_size": 64})
    message = rf"^rollout.engine=.*64}} has no part in .*allowed: rollout.backend='vllm'{hint}"
    with pytest.raises(ConfigError, match=message):
        check_server_settings(settings, device="cuda")


@pytest.mark.parametrize("table", ["OWNED", "DENIED", "VALUES", "CPU_OWNED"])
def test_each_rule_is_of_an_argument_that_the_installed_vllm_has(table):
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    rules = getattr(engine_arguments, table)
    assert not [rule for rule in rules if not any(find_rule({rule: "x"}, name) for name in names)]


# Arguments of ours that a setting may replace: of kernels and of the cache.
OPEN = {
    "attention_backend", "block_size", "enable_chunked_prefill", "enable_prefix_caching",
    "enforce_eager", "moe_backend",
}  # fmt: skip


def test_an_argument_that_the_server_sets_is_refused_unless_it_chooses_kernels(
    tmp_path, monkeypatch
):
    from vllm.engine import arg_utils

    names: set[str] = set()

    class Recorder(arg_utils.AsyncEngineArgs):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            names.update(arguments)
            super().__init__(**arguments)

    monkeypatch.setattr(arg_utils, "AsyncEngineArgs", Recorder)
    build_config(tmp_path, RolloutConfig())
    assert {n for n in names if not find_rule({**OWNED, **DENIED}, n)} <= OPEN


def test_an_argument_reaches_vllms_config_in_place_of_ours(tmp_path):
    assert build_config(tmp_path, RolloutConfig()).cache_config.block_size == 32
    engine = {"block_size": 64, "enable_prefix_caching": False, "watermark": 0.25}
    config = build_config(tmp_path, RolloutConfig(engine=engine))
    cache, scheduler = config.cache_config, config.scheduler_config
    assert (cache.block_size, cache.enable_prefix_caching) == (64, False)
    assert scheduler.watermark == 0.25


def test_a_mapping_becomes_the_config_of_vllm_that_the_argument_takes():
    from vllm.config import CompilationConfig

    given = {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}
    [config] = read_arguments("rollout.engine", given).values()
    assert isinstance(config, CompilationConfig) and config.cudagraph_capture_sizes == [1, 2]
