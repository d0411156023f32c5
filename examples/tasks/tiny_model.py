"""A tokenizer and a randomly initialised Qwen3-MoE small enough to learn on two CPU cores."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mcore_rl.data.tokenizer import import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

VOCAB_SIZE = (
    384  # rows of the embedding: the tokenizer's entries, padded to divide by every small TP
)
MAX_POSITIONS = 512

_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# ChatML with tools, in few tokens: their names and parameters, and calls as in Qwen3.
_CHATML_WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(', ') }})\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    '{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOOL_TOKENS = "<tool_call>", "</tool_call>"
# ChatML with images as in Qwen3-VL: a content is text, or a list of texts and images.
_CHATML_WITH_IMAGES = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_IMAGE_TOKENS = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"


def train_tokenizer(
    texts: Iterable[str], *, with_tools: bool = False, with_images: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with ChatML markers; every digit is a separate token.

    So an answer is one token and arithmetic is a table over tokens. `with_tools`: the chat template
    renders tools, calls and their answers; `with_images`: images.
    """
    tool_tokens = _TOOL_TOKENS if with_tools else ()
    image_tokens = _IMAGE_TOKENS if with_images else ()
    template = _CHATML_WITH_TOOLS if with_tools else _CHATML
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|[^\s\p{L}\p{N}]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(tool_tokens),
        special_tokens=[_PAD, _START, _END, *image_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tool_tokens])
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=_CHATML_WITH_IMAGES if with_images else template,
    )


def save_checkpoint(directory: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Write config.json, generation_config.json, model.safetensors (float32) and tokenizer files.

    1.43 M parameters: 3 layers, hidden 128, 4 query and 2 KV heads of 32, 8 experts of 128, top 2.
    Weights depend on `seed` alone; the caller's random state is left as it was.
    """
    config = import_transformers().Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(directory)
    end = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (directory / "generation_config.json").write_text(f"{json.dumps(end, indent=2)}\n")
    save_file(_draw_weights(config, seed), directory / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(directory)


@torch.no_grad()
def _draw_weights(config: Qwen3MoeConfig, seed: int) -> dict[str, torch.Tensor]:
    """Return the weights by name, number for number those of Qwen3MoeForCausalLM(config).

    Importing that class takes three CPU seconds. Its modules draw numbers when they are made, then
    all but the head are drawn again in order, then the head (modeling_utils.py:2389).
    """
    hidden, size = config.hidden_size, config.moe_intermediate_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    projections = {
        name: (num * config.head_dim, hidden)
        for name, num in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
    }
    projections["o_proj"] = (hidden, heads * config.head_dim)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(*shape).normal_(0, config.initializer_range)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.nn.Embedding(config.vocab_size, hidden)
        for _ in range(config.num_hidden_layers):
            for rows, columns in projections.values():
                torch.nn.Linear(columns, rows, bias=False)
        weights = {"model.embed_tokens.weight": draw(config.vocab_size, hidden)}
        weights["model.embed_tokens.weight"][config.pad_token_id] = 0
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            for name, shape in projections.items():
                weights[f"{prefix}.self_attn.{name}.weight"] = draw(*shape)
            gates_and_ups = draw(config.num_experts, 2, size, hidden)
            downs = draw(config.num_experts, hidden, size)
            for expert, ((gate, up), down) in enumerate(zip(gates_and_ups, downs, strict=True)):
                named = {"gate": gate, "up": up, "down": down}
                for name, weight in named.items():
                    weights[f"{prefix}.mlp.experts.{expert}.{name}_proj.weight"] = weight.clone()
            weights[f"{prefix}.mlp.gate.weight"] = draw(config.num_experts, hidden)
            for name, width in (
                ("input_layernorm", hidden), ("post_attention_layernorm", hidden),
                ("self_attn.q_norm", config.head_dim), ("self_attn.k_norm", config.head_dim),
            ):  # fmt: skip
                weights[f"{prefix}.{name}.weight"] = torch.ones(width)
        weights["model.norm.weight"] = torch.ones(hidden)
        torch.nn.Linear(hidden, config.vocab_size, bias=False)
        weights["lm_head.weight"] = draw(config.vocab_size, hidden)
    return weights
