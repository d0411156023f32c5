"""Megatron's own loading calls, as Megatron-LM makes them, on what `convert` writes."""

from __future__ import annotations

import pytest
import torch
import transformers

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.schema import EngineConfig, Layout
from mcore_rl.engine.megatron import device
from mcore_rl.jobs.convert import to_megatron
from mcore_rl.jobs.convert.plan import Resources
from mcore_rl.models.base import get_family
from mcore_rl.parallel.mesh import split_into_chunks

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "dtype": "float32",
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False),
    "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
}
# Parameters that both sides keep as they are, by Megatron's name of a layer and Hugging Face's.
ALIKE = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
}
DENSE = {"mlp.linear_fc2.weight": "mlp.down_proj.weight"}


def stock_model(folder):
    """A GPTModel whose settings are those of `--moe-layer-freq 1`, the default of Megatron-LM."""
    from mcore_rl.engine.megatron import model

    config = CheckpointReader(folder).read_config()
    num_layers = config["num_hidden_layers"]
    [chunk] = model.build_chunks(
        get_family(config),
        config,
        EngineConfig(),
        torch.float32,
        split_into_chunks(Layout(), num_layers),
        0,
        config["vocab_size"],
        model.PolicyModel,
    )
    chunk.config.moe_layer_freq = 1
    return chunk


@pytest.mark.parametrize("name", MODELS)
def test_stock_calls_load_a_converted_model(name, tmp_path):
    """Megatron-LM's training/checkpointing.py passes the metadata to the model, too."""
    torch.manual_seed(0)
    expected = transformers.AutoModelForCausalLM.from_config(MODELS[name])
    expected.save_pretrained(tmp_path / "hf")
    to_megatron.convert(tmp_path / "hf", tmp_path / "mcore", Layout(), None, Resources(workers=1))
    device.install(1, on_cpu=True)
    from megatron.core import dist_checkpointing

    from mcore_rl.parallel.groups import use_single_rank_groups

    with use_single_rank_groups():
        model = stock_model(tmp_path / "hf")
        path = str(tmp_path / "mcore")
        metadata = dist_checkpointing.load_content_metadata(path)
        loaded = dist_checkpointing.load(
            {"model": model.sharded_state_dict(metadata=metadata)}, path
        )
        model.load_state_dict(loaded["model"])
        check(dict(model.named_parameters()), expected.state_dict(), MODELS[name])


def check(actual, expected, config):
    embedding = expected["model.embed_tokens.weight"]
    assert torch.equal(actual["embedding.word_embeddings.weight"], embedding)
    num_experts = getattr(config, "num_experts", 0)
    for layer in range(config.num_hidden_layers):
        prefix, hf_prefix = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for name, other in (ALIKE if num_experts else ALIKE | DENSE).items():
            assert torch.equal(actual[prefix + name], expected[hf_prefix + other])
        for expert in range(num_experts):
            for name, other in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
                weight = expected[f"{hf_prefix}mlp.experts.{other}"][expert]
                assert torch.equal(actual[f"{prefix}mlp.experts.{name}.weight{expert}"], weight)
