"""Tiny tokenizers with the special tokens and chat templates of model families.

The templates in templates/ are ours: what is public about each family's format, and no more than
the messages that the tests have. The package `renderers`, which nobody here wrote, has to agree.
Those in templates/published/ are the authors' own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mcore_rl.data.tokenizer import set_chat_date

CHAT_DATE = "2025-03-09"
_QWEN = (
    "<|endoftext|> <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> "
    "<tool_response> </tool_response> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
)
# DeepSeek's have a wide bar and a low block in place of | and _.
_DEEPSEEK = (
    "<|begin_of_sentence|> <|end_of_sentence|> <|User|> <|Assistant|> <|tool_calls_begin|> "
    "<|tool_calls_end|> <|tool_call_begin|> <|tool_call_end|> <|tool_sep|> "
    "<|tool_outputs_begin|> <|tool_outputs_end|> <|tool_output_begin|> <|tool_output_end|>"
).translate({ord("|"): 0xFF5C, ord("_"): 0x2581})
_GLM = (
    "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> "
    "</think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> "
    "<arg_value> </arg_value>"
)
_KIMI = (
    "[EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> "
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
    "<|tool_call_argument_begin|> <|tool_call_end|>"
)
_LLAMA = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|>"
)
_HARMONY = (
    "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> "
    "<|message|> <|call|>"
)
# Family -> its tokens, and which of them is the end-of-sequence token.
FAMILIES = {
    "chatml": (_QWEN, 2),
    "qwen3": (_QWEN, 2),
    "qwen3.5": (_QWEN, 2),
    "deepseek-v3": (_DEEPSEEK, 1),
    "deepseek-r1": (_DEEPSEEK, 1),
    "glm-4.5": (_GLM, 0),
    "kimi-k2": (_KIMI, 1),
    "llama-3": (_LLAMA, 4),
    "gpt-oss": (_HARMONY, 2),
    "qwen2": (_QWEN, 2),
    "deepseek-v2": (_DEEPSEEK, 1),
    "moonlight": (_KIMI, 1),
    "mixtral": ("<s> </s>", 1),
    "llama-2": ("<s> </s>", 1),
    "published/qwen2.5": (_QWEN, 2),
    "published/qwen3": (_QWEN, 2),
    "published/qwen3-2507": (_QWEN, 2),
    "published/deepseek-v3": (_DEEPSEEK, 1),
    "published/deepseek-r1-distill": (_DEEPSEEK, 1),
    "published/glm-4.5": (_GLM, 0),
}
_TEMPLATES = {
    family: Path(__file__).with_name("templates").joinpath(f"{family}.jinja").read_text("utf-8")
    for family in FAMILIES
}
# How GPT-4's tokenizer and most since cut text before merges.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def template_of(family: str) -> str:
    return _TEMPLATES[family]


@cache
def tokenizer_of(family: str, template: str = "") -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a few merges; `template` replaces the family's."""
    text, end = FAMILIES[family]
    tokens = text.split()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_TEMPLATES.values(), *["\n\n \n"] * 9], trainer)
    tokenizer.add_tokens(
        [AddedToken(token, special=not token.startswith(("<t", "</"))) for token in tokens]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=tokens[end],
        clean_up_tokenization_spaces=False,
        chat_template=template or _TEMPLATES[family],
    )
    set_chat_date(fast, CHAT_DATE)
    return fast
