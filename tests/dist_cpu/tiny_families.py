"""A tiny real checkpoint of every model family, written by transformers: what the tests run on.

A new family adds its config here, with the second layout to test it at, and nothing else.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file

from mcore_rl.checkpoint import fp8, mxfp4
from mcore_rl.config.schema import Layout
from mcore_rl.reshard.float8 import SCALE_SUFFIX

TP2 = Layout(tp=2)
TP2_EP2 = Layout(tp=2, ep=2)
TP2_ETP2 = Layout(tp=2, etp=2)

_SHAPE: dict[str, Any] = {
    "vocab_size": tiny_models.VOCAB, "hidden_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 16384,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
_GROUPED = {**_SHAPE, "num_key_value_heads": 2, "head_dim": 24}
_EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 40,
    "first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.3, "mscale_all_dim": 0.7, "original_max_position_embeddings": 64,
}  # fmt: skip
# With an original context of a few tokens: each acts within the sequences of the tests.
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 2.0,
    "high_freq_factor": 3.0, "original_max_position_embeddings": 16,
}  # fmt: skip
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN_OF_HEADS = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN_OF_PARTS = {
    **_YARN_OF_HEADS, "partial_rotary_factor": 0.5, "beta_fast": 2.0, "beta_slow": 0.5,
    "mscale": 1.3, "mscale_all_dim": 0.7, "truncate": False,
}  # fmt: skip
_HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 12, "shared_expert_intermediate_size": 56,
    "num_nextn_predict_layers": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A member of a family, and the layout to test it at besides one rank."""

    config: transformers.PretrainedConfig
    layout: Layout


def cases() -> dict[str, Case]:
    t = transformers
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    groups = {"n_group": 4, "topk_group": 2}
    no_groups = {"n_group": 1, "topk_group": 1}
    return {
        "qwen2": Case(t.Qwen2Config(**_SHAPE, num_key_value_heads=2), TP2),
        "qwen3": Case(t.Qwen3Config(**_GROUPED, tie_word_embeddings=True), TP2),
        "qwen3_moe": Case(t.Qwen3MoeConfig(**_GROUPED, **moe, norm_topk_prob=True), TP2_EP2),
        "qwen3_next": Case(t.Qwen3NextConfig(**_GROUPED, **moe, **_HYBRID), TP2_EP2),
        "llama": Case(t.LlamaConfig(**_GROUPED), TP2),
        "llama_scaled": Case(t.LlamaConfig(**_GROUPED, rope_parameters=_LLAMA3), TP2),
        "llama_linear": Case(t.LlamaConfig(**_GROUPED, rope_parameters=_LINEAR), TP2),
        "qwen3_yarn": Case(t.Qwen3Config(**_GROUPED, rope_parameters=_YARN_OF_HEADS), TP2),
        "mixtral": Case(t.MixtralConfig(**_GROUPED, num_local_experts=4), TP2_EP2),
        "deepseek_v3": Case(
            t.DeepseekV3Config(
                **_SHAPE, **_EXPERTS, **_LATENT, **groups, q_lora_rank=40, rope_parameters=_YARN
            ),
            TP2_EP2,
        ),
        # As in smaller models of that architecture: no latent queries, no groups, plain rotation.
        "deepseek_v3_plain": Case(
            t.DeepseekV3Config(**_SHAPE, **_EXPERTS, **_LATENT, **no_groups, q_lora_rank=None),
            TP2_ETP2,
        ),
        # Kimi K2: no groups, and YaRN with equal bounds.
        "kimi_k2": Case(
            t.DeepseekV3Config(
                **_SHAPE,
                **_EXPERTS,
                **_LATENT,
                **no_groups,
                q_lora_rank=40,
                rope_parameters=_YARN | {"beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            ),
            TP2_EP2,
        ),
        "glm4_moe": Case(
            t.Glm4MoeConfig(**_GROUPED, **_EXPERTS, attention_bias=True, use_qk_norm=True), TP2_EP2
        ),
        # As in the smaller model of the family: no norms of queries and keys.
        "glm4_moe_air": Case(t.Glm4MoeConfig(**_GROUPED, **_EXPERTS, attention_bias=True), TP2_EP2),
        "glm4_moe_yarn": Case(
            t.Glm4MoeConfig(**_GROUPED, **_EXPERTS, rope_parameters=_YARN_OF_PARTS), TP2_EP2
        ),
        # Its window is shorter than most sequences of the tests.
        "gpt_oss": Case(
            t.GptOssConfig(
                **_GROUPED, num_local_experts=8, num_experts_per_tok=2, sliding_window=8
            ),
            TP2_EP2,
        ),
        # GLM-4.7-Flash. transformers has 1e-6 in norms of latents, whatever the config.
        "glm4_moe_lite": Case(
            t.Glm4MoeLiteConfig(
                **_SHAPE, **_EXPERTS, **_LATENT, **no_groups, q_lora_rank=40, rms_norm_eps=1e-6
            ),
            TP2_EP2,
        ),
    }


def save(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def served_config(name: str) -> transformers.PretrainedConfig:
    """A case with heads of a size that vLLM's CPU kernels were compiled for."""
    config = cases()[name].config
    if hasattr(config, "kv_lora_rank"):
        config.kv_lora_rank, config.qk_rope_head_dim, config.head_dim = 512, 64, 64
    elif config.model_type == "qwen3_next":  # whose delta nets run in bfloat16 alone
        config.head_dim = 32
        config.linear_key_head_dim = config.linear_value_head_dim = 128
    elif config.model_type == "qwen2":  # its heads share the hidden size
        config.hidden_size = 32 * config.num_attention_heads
    else:
        config.head_dim = 32
    if config.model_type == "gpt_oss":  # the columns of a worker's expert are a multiple of 32
        config.intermediate_size = 128
    return config


def quantizable_config(name: str) -> transformers.PretrainedConfig:
    """Return a case that two ranks split between blocks of 128 x 128, some of them partial."""
    config = cases()[name].config
    config.hidden_size, config.intermediate_size = 200, 256
    if hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size = 256
    if hasattr(config, "kv_lora_rank"):
        config.kv_lora_rank, config.qk_rope_head_dim, config.head_dim = 512, 64, 64
        config.qk_nope_head_dim = config.v_head_dim = 64
        config.q_lora_rank = config.q_lora_rank and 128
    elif name == "qwen2":  # its heads share the hidden size
        config.hidden_size = 128 * config.num_attention_heads
    else:
        config.head_dim = 128
    if name == "qwen3_next":
        config.linear_key_head_dim = config.linear_value_head_dim = 128
        config.shared_expert_intermediate_size = 256
    return config


def name_kimi(path: Path) -> Path:
    """Give a checkpoint the model_type and the foreign code of the published Kimi K2."""
    fields = json.loads((path / "config.json").read_text())
    fields |= {
        "model_type": "kimi_k2",
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    }
    (path / "config.json").write_text(json.dumps(fields))
    return path


def save_served(model: Any, path: Path) -> Path:
    """A checkpoint that vLLM reads: with what transformers leaves out of published configs."""
    save(model, path)
    if hasattr(model.config, "kv_lora_rank"):
        fields = json.loads((path / "config.json").read_text())
        fields |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
        (path / "config.json").write_text(json.dumps(fields))
    return path


def save_with_mtp(name: str, folder: Path, config: Any = None, seed: int = 0) -> Path:
    """A checkpoint with one layer of multi-token prediction, as published models have it.

    Of `config`, or of the case.

    transformers writes none. The layer behind the last one becomes the prediction layer's decoder
    layer, which is what it is in published checkpoints, and what stands around it is added.
    """
    config = config or cases()[name].config
    num_layers = config.num_hidden_layers
    config.num_hidden_layers = num_layers + 1
    if name == "qwen3_next":
        return _save_qwen3_next_with_mtp(config, folder / f"{name}-mtp")
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
    path = save_served(tiny_models.build_from(config, seed), folder / f"{name}-mtp")
    tensors = load_file(path / "model.safetensors")
    extra, hidden = f"model.layers.{num_layers}.", config.hidden_size
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{extra}{norm}.weight"] = torch.empty(hidden).uniform_(0.7, 1.3)
    tensors[f"{extra}eh_proj.weight"] = torch.empty(hidden, 2 * hidden).normal_(0, 0.08)
    tensors[f"{extra}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{extra}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    fields |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    fields.pop("mlp_layer_types", None)  # published configs have first_k_dense_replace
    (path / "config.json").write_text(json.dumps(fields))
    return path


def _save_qwen3_next_with_mtp(config: Any, path: Path) -> Path:
    """Save tensors `mtp.*` and a config.json without the prediction layer, as published."""
    num_layers, hidden = config.num_hidden_layers - 1, config.hidden_size
    config.layer_types = [*config.layer_types, "full_attention"]
    save_served(tiny_models.build_from(config), path)
    last = f"model.layers.{num_layers}."
    tensors = {
        name.replace(last, "mtp.layers.0."): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{norm}.weight"] = torch.empty(hidden).uniform_(-0.3, 0.3)
    tensors["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden).normal_(0, 0.08)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    fields |= {"num_hidden_layers": num_layers, "layer_types": fields["layer_types"][:-1]}
    del fields["num_nextn_predict_layers"]
    (path / "config.json").write_text(json.dumps(fields))
    return path


class _Qwen3NextPredictor(torch.nn.Module):
    """The prediction layer of Qwen3-Next, of which transformers has the parts alone."""

    def __init__(self, main: Any, tensors: dict[str, torch.Tensor]) -> None:
        from transformers.modeling_layers import MtpLayer

        super().__init__()
        last = main.model.layers[-1]
        norm = type(last.input_layernorm)
        number = main.config.num_hidden_layers - 1
        self.layers = torch.nn.ModuleList([MtpLayer(main.config, type(last), norm, number)])
        names = {
            "mtp.fc.": "eh_proj.", "mtp.norm.": "post_norm.", "mtp.layers.0.": "mtp_block.",
            "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.",
        }  # fmt: skip
        state = {
            theirs + name.removeprefix(ours): tensor
            for ours, theirs in names.items()
            for name, tensor in tensors.items()
            if name.startswith(ours)
        }
        experts = "mtp_block.mlp.experts."
        single = {name: state.pop(name) for name in list(state) if name.startswith(experts)}

        def stack(part: str) -> torch.Tensor:
            numbers = range(main.config.num_experts)
            return torch.stack([single[f"{experts}{number}.{part}.weight"] for number in numbers])

        state[experts + "gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
        state[experts + "down_proj"] = stack("down_proj")
        self.layers[0].load_state_dict(state)
        self.tie_with_main_model(main)

    def tie_with_main_model(self, main: Any) -> None:
        self.embed_tokens, self.shared_head = main.model.embed_tokens, main.lm_head
        self.rotary_emb = main.model.rotary_emb


def save_published_deepseek(folder: Path, config: Any = None, seed: int = 0) -> tuple[Path, Path]:
    """DeepSeek-V3 in the form it is published in: float8 blocks, and a prediction layer.

    Returns its folder and one of a plain checkpoint with the same weights: the products of the
    blocks as bfloat16 has them, in files of float32.
    """
    plain = save_with_mtp("deepseek_v3", folder, config, seed)
    path = Path(shutil.copytree(plain, folder / "published"))
    tensors, blocks = load_file(plain / "model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        if not fp8.is_block_quantized(name, tuple(tensor.shape)):
            blocks[name] = tensor
            continue
        pair = fp8.quantize_blocks(tensor)
        blocks |= {name: pair[0], name + SCALE_SUFFIX: pair[1]}
        tensors[name] = fp8.dequantize_blocks(*pair, torch.bfloat16).float()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(blocks, path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    fields["quantization_config"] = fp8.build_quantization_config(tensors)
    (path / "config.json").write_text(json.dumps(fields))
    return path, plain


def save_published_gpt_oss(folder: Path, config: Any = None) -> tuple[Path, Path]:
    """gpt-oss in the form it is published in: experts in MXFP4, of any bits.

    Returns its folder and one of a plain checkpoint with the same weights, in float32.
    """
    model = tiny_models.build_from(config or cases()["gpt_oss"].config)
    plain = save(model, folder / "gpt_oss")
    path = Path(shutil.copytree(plain, folder / "published"))
    tensors, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(0)
    packed = dict(tensors)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = packed.pop(name).shape
        shape = (experts, rows, columns // mxfp4.BLOCK)
        options: Any = {"generator": generator, "dtype": torch.uint8}
        blocks = torch.randint(0, 256, (*shape, mxfp4.BLOCK // 2), **options)
        scales = torch.randint(120, 124, shape, **options)
        packed |= {name + mxfp4.BLOCKS_SUFFIX: blocks, name + mxfp4.SCALES_SUFFIX: scales}
        tensors[name] = mxfp4.dequantize(blocks, scales).transpose(1, 2).contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(fields))
    return path, plain


def with_prediction_layer(path: Path) -> Any:
    """transformers' reading of such a checkpoint: its MtpModel, tied to the main model."""
    main = transformers.AutoModelForCausalLM.from_pretrained(path)
    if main.config.model_type == "qwen3_next":
        return _Qwen3NextPredictor(main, load_file(path / "model.safetensors"))
    # It looks for the layer number of the published model.
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{main.config.num_hidden_layers}.*"]
    if hasattr(main.config, "mlp_layer_types"):  # the class of GLM-4.7-Flash reads other fields
        main.config.num_mtp_layers, main.config.mtp_mlp_layer_types = 1, ["sparse"]
    from transformers.modeling_layers import MtpModel

    return MtpModel.from_pretrained(main)
