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
import torch_reference
import transformers
from safetensors.torch import load_file, save_file

from mcore_rl.checkpoint import fp8, int4, mxfp4
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
# With few heads the scores of many keys are 0, of which any may be picked.
_INDEXER = {"q_lora_rank": 40, "index_n_heads": 24, "index_head_dim": 12, "index_topk": 10}
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
_SEPARATE = {  # Qwen3.5
    **{n: v for n, v in _HYBRID.items() if n != "num_nextn_predict_layers"},
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
_TOWER = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 4,
    "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip


_LAYER_KINDS = {"mlp_layer_types", "layer_types", "indexer_types"}  # a value for each layer


@dataclass(frozen=True)
class Case:
    """A member of a family, and the layout to test it at besides one rank."""

    config: transformers.PretrainedConfig
    layout: Layout


def _without_ffn(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "intermediate_size"}


def _without_experts(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in fields.items() if name != "shared_expert_intermediate_size"}


def cases() -> dict[str, Case]:
    """Return a small config of each family, and a layout.

    Long because: there are many families.
    """
    t = transformers
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    groups = {"n_group": 4, "topk_group": 2}
    no_groups = {"n_group": 1, "topk_group": 1}
    return {
        "qwen2": Case(t.Qwen2Config(**_SHAPE, num_key_value_heads=2), TP2),
        "qwen3": Case(t.Qwen3Config(**_GROUPED, tie_word_embeddings=True), TP2),
        "qwen3_moe": Case(t.Qwen3MoeConfig(**_GROUPED, **moe, norm_topk_prob=True), TP2_EP2),
        "qwen3_next": Case(t.Qwen3NextConfig(**_GROUPED, **moe, **_HYBRID), TP2_EP2),
        # With experts and a vision tower, as published; and a dense model of text.
        "qwen3_5_moe": Case(
            t.Qwen3_5MoeConfig(
                text_config=_without_ffn({**_GROUPED, **moe, **_SEPARATE}),
                vision_config=_TOWER,
                dtype="float32",
            ),
            TP2_EP2,
        ),
        "qwen3_5": Case(t.Qwen3_5TextConfig(**_without_experts({**_GROUPED, **_SEPARATE})), TP2),
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
        # Most queries of the tests have more keys than the indexer picks.
        "deepseek_v32": Case(
            t.DeepseekV32Config(
                **_SHAPE, **_EXPERTS, **_LATENT, **_INDEXER, **groups, rope_parameters=_YARN
            ),
            TP2_EP2,
        ),
        "glm_moe_dsa": Case(
            t.GlmMoeDsaConfig(
                **_SHAPE,
                **_EXPERTS,
                **_LATENT,
                **_INDEXER,
                **no_groups,
                rms_norm_eps=1e-6,
                indexer_rope_interleave=True,
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
        # Half of each head is rotated. vLLM reads the last fields, of which transformers has none.
        "minimax_m2": Case(
            t.MiniMaxM2Config(
                **_GROUPED,
                num_local_experts=8,
                num_experts_per_tok=2,
                rotary_dim=12,
                scoring_func="sigmoid",
                use_routing_bias=True,
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


def save_stacked(model: Any, path: Path) -> Path:
    """Save the parameters of transformers' model as they are: its experts are stacked."""
    save(model, path)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def save(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def served_config(name: str) -> transformers.PretrainedConfig:
    """A case with heads of a size that vLLM's CPU kernels were compiled for."""
    config = cases()[name].config
    if hasattr(config, "kv_lora_rank"):
        config.kv_lora_rank, config.qk_rope_head_dim, config.head_dim = 512, 64, 64
    elif hasattr(text := config.get_text_config(), "linear_key_head_dim"):  # bfloat16 alone
        text.head_dim = 32
        text.linear_key_head_dim = text.linear_value_head_dim = 128
        if "mrope_section" in text.rope_parameters:  # all rotary frequencies
            text.rope_parameters["mrope_section"] = [2, 1, 1]
    elif config.model_type == "qwen2":  # its heads share the hidden size
        config.hidden_size = 32 * config.num_attention_heads
    else:
        config.head_dim = 32
    if config.model_type == "minimax_m2":
        config.rotary_dim = config.head_dim // 2
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
    if name in ("qwen3_next", "qwen3_5_moe"):
        return _save_hybrid_with_mtp(config, folder / f"{name}-mtp")
    num_layers = config.num_hidden_layers
    config.num_hidden_layers = num_layers + 1
    for kinds in _LAYER_KINDS & vars(config).keys():
        setattr(config, kinds, [*getattr(config, kinds), getattr(config, kinds)[-1]])
    path = save_served(tiny_models.build_from(config, seed), folder / f"{name}-mtp")
    return make_last_layer_predict(path)


def make_last_layer_predict(path: Path) -> Path:
    """Make the last layer of a checkpoint a prediction layer."""
    fields = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    num_layers, hidden = fields["num_hidden_layers"] - 1, fields["hidden_size"]
    extra = f"model.layers.{num_layers}."
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{extra}{norm}.weight"] = torch.empty(hidden).uniform_(0.7, 1.3)
    tensors[f"{extra}eh_proj.weight"] = torch.empty(hidden, 2 * hidden).normal_(0, 0.08)
    tensors[f"{extra}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{extra}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    fields |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    for kinds in _LAYER_KINDS:  # published configs have first_k_dense_replace
        fields.pop(kinds, None)
    (path / "config.json").write_text(json.dumps(fields))
    return path


def _save_hybrid_with_mtp(config: Any, path: Path) -> Path:
    """Save tensors `mtp.*`, and a config.json of the layers before, as published.

    Qwen3.5 stacks the experts of these and has those of the prediction layer apart.
    """
    text, is_nested = config.get_text_config(), hasattr(config, "text_config")
    num_layers, hidden = text.num_hidden_layers, text.hidden_size
    text.num_hidden_layers += 1
    text.layer_types = [*text.layer_types, "full_attention"]
    model = tiny_models.build_from(config)
    save_served(model, path)
    last = f"layers.{num_layers}."
    tensors = load_file(path / "model.safetensors")
    if is_nested:
        tensors = {name: tensor for name, tensor in tensors.items() if last in name} | {
            name: tensor.clone() for name, tensor in model.state_dict().items() if last not in name
        }
    tensors = {
        f"mtp.layers.0.{name.partition(last)[2]}" if last in name else name: tensor
        for name, tensor in tensors.items()
    }
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{norm}.weight"] = torch.empty(hidden).uniform_(-0.3, 0.3)
    tensors["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden).normal_(0, 0.08)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    inner = fields["text_config"] if is_nested else fields
    inner |= {"num_hidden_layers": num_layers, "layer_types": inner["layer_types"][:-1]}
    if is_nested:
        inner["mtp_num_hidden_layers"] = 1
    else:
        del fields["num_nextn_predict_layers"]
    (path / "config.json").write_text(json.dumps(fields))
    return path


def make_predictable(path: Path, seed: int = 0) -> Path:
    """Give a checkpoint of save_with_mtp tokens that it predicts, and its prediction layer too.

    Token t is mostly followed by token p(t) of a permutation: rows of the head are embeddings. The
    prediction layer projects the embedding alone.
    """
    tensors = load_file(path / "model.safetensors")
    vocab, hidden = tensors["lm_head.weight"].shape
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(vocab, hidden, generator=generator)
    head = embedding[torch.randperm(vocab, generator=generator)] * 8 / hidden
    projection = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    ends = {
        "embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "shared_head.head.weight": head,
        "eh_proj.weight": projection,
        "mtp.fc.weight": projection,
    }
    for end, tensor in ends.items():
        for name in [name for name in tensors if name.endswith(end)]:
            tensors[name] = tensor.to(tensors[name].dtype, copy=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


class _HybridPredictor(torch.nn.Module):
    """The prediction layer of Qwen3-Next or Qwen3.5: transformers has its parts alone."""

    def __init__(self, main: Any, tensors: dict[str, torch.Tensor]) -> None:
        from transformers.modeling_layers import MtpLayer

        super().__init__()
        config, decoder = main.config.get_text_config(), main.get_decoder()
        last = decoder.layers[-1]
        norm = type(last.input_layernorm)
        number = config.num_hidden_layers - 1
        self.layers = torch.nn.ModuleList([MtpLayer(config, type(last), norm, number)])
        names = {
            "mtp.fc.": "eh_proj.", "mtp.norm.": "post_norm.", "mtp.layers.0.": "mtp_block.",
            "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.",
        }  # fmt: skip
        state = {
            target + name.removeprefix(prefix): tensor
            for prefix, target in names.items()
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        experts = "mtp_block.mlp.experts."
        single = {name: state.pop(name) for name in list(state) if name.startswith(experts)}

        def stack(part: str) -> torch.Tensor:
            numbers = range(config.num_experts)
            return torch.stack([single[f"{experts}{number}.{part}.weight"] for number in numbers])

        state[experts + "gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
        state[experts + "down_proj"] = stack("down_proj")
        self.layers[0].load_state_dict(state)
        self.tie_with_main_model(main)

    def tie_with_main_model(self, main: Any) -> None:
        decoder = main.get_decoder()
        self.embed_tokens, self.shared_head = decoder.embed_tokens, main.lm_head
        self.rotary_emb = decoder.rotary_emb


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
        tensors[name] = mxfp4.dequantize(blocks, scales).contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(fields))
    return path, plain


_KIMI_TOWER = {
    "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 40,
    "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2,
}  # fmt: skip
# Names that transformers writes for Kimi K2.5, and those that are published, which it reads.
_KIMI_NAMES = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.mm_projector.": "mm_projector.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}


def name_kimi_tensor(name: str) -> str:
    for written, published in _KIMI_NAMES.items():
        name = published + name.removeprefix(written) if name.startswith(written) else name
    return name


def save_published_kimi(folder: Path, config: Any = None) -> tuple[Path, Path]:
    """Kimi K2.5 in the form it is published in: inside a wrapper, experts in int4, of any bits.

    Returns its folder and one of a plain checkpoint with the same weights, in float32.
    """
    text = config or cases()["kimi_k2"].config
    text.moe_intermediate_size = 64  # a multiple of a group
    wrapper = transformers.Kimi_K25Config(
        text_config=text,
        vision_config=_KIMI_TOWER,
        projection_hidden_size=32,
        tie_word_embeddings=False,
        dtype="float32",
    )
    plain = save(tiny_models.build_from(wrapper), folder / "kimi_k25")
    fields = json.loads((plain / "config.json").read_text())
    fields |= {"architectures": ["KimiK25ForConditionalGeneration"]}
    fields["text_config"] |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    fields["text_config"] |= {"moe_layer_freq": 1}
    (plain / "config.json").write_text(json.dumps(fields))
    path = Path(shutil.copytree(plain, folder / "published"))
    tensors = {
        name_kimi_tensor(name): tensor
        for name, tensor in load_file(plain / "model.safetensors").items()
    }
    packed, generator = dict(tensors), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        rows, columns = packed.pop(name).shape
        bits = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=generator).int()
        scales = torch.rand(rows, columns // 32, generator=generator).mul(0.04).bfloat16()
        parts = bits, scales, torch.tensor([rows, columns], dtype=torch.int32)
        base = name.removesuffix(int4.BASE)
        packed |= {base + suffix: t for suffix, t in zip(int4.SUFFIXES, parts, strict=True)}
        tensors[name] = int4.dequantize(bits, scales).float()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, path / "model.safetensors", metadata={"format": "pt"})
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
    }  # fmt: skip
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    fields["text_config"]["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(fields))
    return path, plain


def with_prediction_layer(path: Path) -> Any:
    """transformers' reading of such a checkpoint: its MtpModel, tied to the main model."""
    main = torch_reference.load(path)
    if main.config.model_type in ("qwen3_next", "qwen3_5_moe"):
        return _HybridPredictor(main, load_file(path / "model.safetensors"))
    # It looks for the layer number of the published model.
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{main.config.num_hidden_layers}.*"]
    if hasattr(main.config, "mlp_layer_types"):  # the class of GLM-4.7-Flash reads other fields
        main.config.num_mtp_layers, main.config.mtp_mlp_layer_types = 1, ["sparse"]
        main.config.mtp_layer_types = ["indexed_attention"]
    from transformers.modeling_layers import MtpModel

    return MtpModel.from_pretrained(main)
