"""A randomly initialised Qwen3-VL small enough to learn on two CPU cores, with its processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from mcore_rl.data.tokenizer import import_transformers
from mcore_rl.examples.tasks.tiny_model import MAX_POSITIONS, VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3VLConfig

PATCH_SIZE = 8  # pixels; an image of 32 x 32 is 16 patches, which merge into 4 tokens
MERGE_SIZE = 2  # patches of a side of an image token


def save_checkpoint(directory: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Write model (float32), tokenizer and processor, as Qwen3-VL is published.

    Weights depend on `seed` alone; the caller's random state is left as it was.
    """
    config = _build_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = import_transformers().Qwen3VLForConditionalGeneration(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    end = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    _write_json(directory / "generation_config.json", end)
    save_file(model.state_dict(), directory / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(directory)
    _save_processor(directory)


def _build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    hidden_size = 64
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "out_hidden_size": hidden_size,
        "initializer_range": 0.1,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": 2,
        "spatial_merge_size": MERGE_SIZE,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    image, video, start, end = tokenizer.convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    )
    return import_transformers().Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        dtype="float32",
    )


def _save_processor(directory: Path) -> None:
    """Write the files of the processor; the class of its video part needs torchvision."""
    size = PATCH_SIZE * MERGE_SIZE
    common = {
        "size": {"shortest_edge": (2 * size) ** 2, "longest_edge": (8 * size) ** 2},
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": 2,
        "merge_size": MERGE_SIZE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    images = common | {"image_processor_type": "Qwen2VLImageProcessor"}
    videos = common | {"video_processor_type": "Qwen3VLVideoProcessor"}
    _write_json(directory / "preprocessor_config.json", images)
    _write_json(directory / "video_preprocessor_config.json", videos)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps(content, indent=2)}\n")
