"""rollout.quantization is refused where float8 blocks would be cut or nothing multiplies them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "dist_cpu"))

import tiny_families

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import FLOAT8_LOGPROB_GAPS, resolve_for_device_type
from mcore_rl.config.rules_rollout import validate_servers
from mcore_rl.config.schema import EngineConfig, Layout, ModelConfig, RLConfig, RolloutConfig
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.jobs.quantization_preflight import check_quantization
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.models.base import read_config


def build_model(family: str, **fields: Any) -> dict[str, Any]:
    config = tiny_families.quantizable_config(family).to_dict()
    return config | {"architectures": [ARCHITECTURES[family]]} | fields


ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def build_config(layout: Layout, **rollout: Any) -> RLConfig:
    return RLConfig(
        model=ModelConfig(path="model"),
        actor=EngineConfig(layout=layout),
        rollout=RolloutConfig(quantization="fp8_block", **rollout),
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_layouts_between_blocks_pass(family):
    check_quantization(build_config(Layout(tp=2, pp=1), tp=2), build_model(family))


@pytest.mark.parametrize(
    ("family", "fields", "layout", "tp", "message"),
    [
        ("qwen3", {"intermediate_size": 384}, Layout(), 2, r"rollout\.tp=2: .*(down|gate)_proj"),
        ("qwen3", {"intermediate_size": 384}, Layout(tp=2), 1, r"actor\.layout .*_proj"),
        ("qwen3", {"head_dim": 64}, Layout(), 1, r"actor\.layout .*k_proj.* cuts a block"),
        ("qwen3", {"head_dim": 96}, Layout(), 1, r"rollout\.tp=1: .*[kv]_proj.*heads"),
        ("qwen3_moe", {"moe_intermediate_size": 128}, Layout(), 2, r"rollout\.tp=2: .*experts\.0"),
        ("deepseek_v3", {"q_lora_rank": 100}, Layout(), 1, r"rollout\.tp=1: .*q_a_proj"),
        ("gpt_oss", {}, Layout(), 1, r"experts \(.*\) that no checkpoint has in float8 blocks"),
    ],
)
def test_a_layout_that_cuts_a_block_is_refused(family, fields, layout, tp, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        check_quantization(build_config(layout, tp=tp), build_model(family, **fields))
    assert str(refusal.value).startswith("rollout.quantization='fp8_block'")
    assert "null" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Qwen3.5-35B-A3B", "no tensor of the family 'qwen3_5_moe' has the name of a projection"),
        ("Kimi-K2.5", "no tensor of the family 'kimi_k25' has the name of a projection"),
        ("DeepSeek-V3.2", r"has model\.layers\.0\.self_attn\.indexer\.weights_proj\.weight, which"),
    ],
)
def test_a_family_with_other_projections_is_refused_by_name(name, reason, tmp_path):
    (tmp_path / "config.json").write_text((find_published(name) / "config.json").read_text())
    message = rf"^rollout\.quantization='fp8_block': .*{reason}.* allowed: null$"
    with pytest.raises(ConfigError, match=message):
        check_quantization(build_config(Layout()), read_config(tmp_path))


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "layout", "rollout"),
    [
        ("DeepSeek-V3", Layout(tp=2, ep=2), {"tp": 8, "ep": True}),
        ("DeepSeek-V3", Layout(tp=2, ep=2), {"tp": 8, "dp": 2, "ep": True}),  # docs/recipes.md
        ("Qwen3-Next-80B-A3B", Layout(dp=2, ep=2), {"tp": 1}),
        ("MiniMax-M2", Layout(tp=2, ep=2), {"tp": 8, "ep": True}),
    ],
)
def test_a_model_as_published_passes(name, layout, rollout):
    """DeepSeek-V3 in float8: heads of 128 and 192, 576 rows of latents in one partial block."""
    model = json.loads((find_published(name) / "config.json").read_text())
    check_quantization(build_config(layout, **rollout), model)


def test_servers_in_float8_are_corrected_for_and_have_bounds_of_their_own():
    """Truncated importance sampling is the default, and a level that is set stays."""
    config = build_config(Layout())
    resolved = resolve_for_device_type(config, "cuda")
    assert resolved.algorithm.correction.level == "token"
    assert resolved.algorithm.correction.method == "truncate"
    trainer = resolved.trainer
    assert (trainer.max_logprob_gap, trainer.mean_logprob_gap) == FLOAT8_LOGPROB_GAPS
    config.algorithm.correction.level, config.trainer.max_logprob_gap = "off", 3.0
    resolved = resolve_for_device_type(config, "cuda")
    assert resolved.algorithm.correction.level == "off"
    assert resolved.trainer.max_logprob_gap == 3.0


def test_adapters_on_servers_in_float8_are_refused():
    with pytest.raises(ConfigError, match=r"rollout\.lora='merged'"):
        validate_servers(RolloutConfig(quantization="fp8_block", lora="adapter"))


def test_servers_of_a_backend_without_float8_are_refused():
    config = build_config(Layout(), backend="sglang")
    with pytest.raises(ConfigError, match=r"'sglang' take weights in model\.dtype; allowed: null"):
        check_quantization(config, build_model("qwen3"))


def test_float32_and_servers_on_a_cpu_are_refused():
    config = build_config(Layout())
    config.model.dtype = "float32"
    with pytest.raises(ConfigError, match=r"model\.dtype='float32': vLLM multiplies"):
        resolve_for_device_type(config, "cuda")
    with pytest.raises(ConfigError, match=r"on CPUs with AMX alone .* allowed on a CPU: null"):
        VLLMServer.check_model(config.rollout, "rollout", build_model("qwen3"), "cpu")
    VLLMServer.check_model(config.rollout, "rollout", build_model("qwen3"), "cuda")
