"""vLLM's parameters of sparse attention, which it cannot run on a CPU: names, shapes and loader."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mcore_rl.models.base import get_vllm_weights, read_config
from mcore_rl.reshard.rules import Shard
from tests.nightly import all_but

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "index_n_heads": 4, "index_head_dim": 128,
    "index_topk": 16, "max_position_embeddings": 256,
}  # fmt: skip
_CLASSES = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}


@pytest.fixture(scope="module")
def vllm_worker():
    """The groups of a worker; attention gets a backend, which has no parameters of its own."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.platforms.cpu import CpuPlatform

    choose = CpuPlatform.get_attn_backend_cls

    def choose_dense(backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        return choose(backend, attn_selector_config._replace(use_sparse=False), num_heads)

    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(VllmConfig()):
        patch.setattr(CpuPlatform, "get_attn_backend_cls", staticmethod(choose_dense))
        store = f"file:///tmp/mcore_rl_sparse_{os.getpid()}"
        init_distributed_environment(1, 0, store, 0, "gloo")
        initialize_model_parallel()
        yield
        cleanup_dist_env_and_memory()
    Path(store.removeprefix("file://")).unlink(missing_ok=True)


@pytest.mark.parametrize("name", all_but(["deepseek_v32"], _CLASSES))
def test_the_rules_are_what_vllms_loader_puts_into_its_model(vllm_worker, name, tmp_path):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from mcore_rl.inference.vllm.loader_trace import trace_loader

    config = getattr(transformers, f"{_CLASSES[name]}Config")(
        **_SIZES, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1,
        indexer_rope_interleave=name == "glm_moe_dsa", dtype="bfloat16",
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(tmp_path)
    arguments = EngineArgs(
        str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16",
        attention_backend="CPU_MLA",  # AMX_MLA takes no arguments of sparse attention
    )  # fmt: skip
    with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        served = initialize_model(arguments.create_engine_config())
    traced = {parameter.name: parameter for parameter in trace_loader(served, str(tmp_path))}
    expected = {w.get_local_name(): w for w in get_vllm_weights(read_config(tmp_path))}
    assert traced.keys() == expected.keys()
    for key, weight in expected.items():
        assert set(traced[key].blocks) == set(weight.rule.get_blocks(Shard(0, 1))), key
        if ".indexer." in key:
            dtype = "float32" if weight.float32 else "bfloat16"
            assert (traced[key].dtype, traced[key].shape) == (
                dtype, weight.rule.get_local_shape(Shard(0, 1))
            ), key  # fmt: skip
