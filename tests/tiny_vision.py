"""Tiny vision-language checkpoints with a byte-level tokenizer and a processor, as published ones.

Written without torchvision: the files of the processor are JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
PATCH = 16  # pixels; a token of an image is a square of 2 x 2 patches
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' or 'image' in c or 'image_url' in c %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 256 + len(SPECIAL)


def get_special_id(token: str) -> int:
    return 256 + SPECIAL.index(token)


def save(path: Path, kind: str, seed: int = 0) -> Any:
    """Write model, tokenizer and processor; return the model of transformers."""
    model = build(kind, seed)
    model.save_pretrained(path)
    if kind == "qwen3_vl_moe":
        transpose_experts(path)
    build_tokenizer().save_pretrained(path)
    write_processor(path, kind)
    return model


def build(kind: str, seed: int = 0) -> Any:
    """Return a model with random weights, far from the tame initial values."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(build_config(kind))
    with torch.no_grad():
        for name, parameter in model.float().named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
            elif "norm" in name:
                parameter.uniform_(0.7, 1.3)
            else:
                parameter.normal_(0, 0.2)
    return model.eval()


def build_config(kind: str) -> Any:
    text: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": 1024, "tie_word_embeddings": False, "dtype": "float32",
        "eos_token_id": get_special_id("<|im_end|>"),
        "pad_token_id": get_special_id("<|endoftext|>"),
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5],
        },
        "bos_token_id": None,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96,
        "patch_size": PATCH, "out_hidden_size": 64, "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }  # fmt: skip
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    else:
        text["rope_parameters"]["mrope_interleaved"] = True
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    if kind == "qwen3_vl_moe":
        text |= {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
            "norm_topk_prob": True,  # vLLM reads it, transformers does not
        }  # fmt: skip
    ids = {
        f"{name}_token_id": get_special_id(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"), ("video", "video_pad"),
            ("vision_start", "vision_start"), ("vision_end", "vision_end"),
        )
    }  # fmt: skip
    return transformers.AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, tie_word_embeddings=False, **ids
    )


def transpose_experts(path: Path) -> None:
    """Store stacked experts as published checkpoints and vLLM have them; transformers does not."""
    file = path / "model.safetensors"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def build_tokenizer() -> Any:
    """Return a tokenizer with an id for each byte, and the special tokens behind them."""
    words = [*bytes_to_unicode().values(), *SPECIAL]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        chat_template=CHAT_TEMPLATE,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return tokenizer


def write_processor(path: Path, kind: str) -> None:
    """Write the files of a processor that takes images of 4 to 64 patches."""
    is_first = kind == "qwen2_5_vl"
    processor = "Qwen2_5_VLProcessor" if is_first else "Qwen3VLProcessor"
    mean = [0.48145466, 0.4578275, 0.40821073] if is_first else [0.5] * 3
    std = [0.26862954, 0.26130258, 0.27577711] if is_first else [0.5] * 3
    common = {
        "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2, "image_mean": mean,
        "image_std": std, "processor_class": processor,
        "size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (8 * PATCH) ** 2},
    }  # fmt: skip
    videos = "Qwen2VLVideoProcessor" if is_first else "Qwen3VLVideoProcessor"
    files = {
        "preprocessor_config.json": {**common, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {**common, "video_processor_type": videos},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=2))
