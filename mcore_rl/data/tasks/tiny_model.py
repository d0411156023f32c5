"""A tokenizer and a randomly initialised Qwen3-MoE small enough to learn on two CPU cores."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = (
    384  # rows of the embedding: the tokenizer's entries, padded to divide by every small TP
)
MAX_POSITIONS = 512

_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,  # of a dense layer, of which there is none
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "dtype": "float32",
}

_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML markers, in which every digit is a token of its own.

    Digits stand alone so that an answer is one token and arithmetic is a table over tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|[^\s\p{L}\p{N}]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[_PAD, _START, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=_CHATML,
    )


def save_checkpoint(directory: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Write config.json, generation_config.json, model.safetensors (float32) and tokenizer files.

    1.43 M parameters: 3 layers, hidden 128, 4 query and 2 KV heads of 32, 8 experts of 128, top 2.
    Weights depend on `seed` alone, and are initialised as transformers does. Its model class is not
    used for it: importing that takes longer than all else here together.
    """
    directory.mkdir(parents=True)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name, content in (("config", _CONFIG | ends), ("generation_config", ends)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _initial(shape, generator) for name, shape in _shapes()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(directory)


def _initial(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:  # the scale of a norm
        return torch.ones(shape)
    return torch.normal(0.0, _CONFIG["initializer_range"], shape, generator=generator)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of Qwen3MoeForCausalLM, by its name in a checkpoint."""
    hidden, head, vocabulary = _CONFIG["hidden_size"], _CONFIG["head_dim"], _CONFIG["vocab_size"]
    queries, keys = (_CONFIG[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    expert = _CONFIG["moe_intermediate_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(_CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.q_norm.weight", (head,)
        yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate.weight", (_CONFIG["num_experts"], hidden)
        for number in range(_CONFIG["num_experts"]):
            for name, shape in (
                ("gate", (expert, hidden)),
                ("up", (expert, hidden)),
                ("down", (hidden, expert)),
            ):
                yield f"{prefix}.mlp.experts.{number}.{name}_proj.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)
