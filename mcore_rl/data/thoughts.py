"""Find the answer of a response, behind the thoughts of a reasoning model."""

from __future__ import annotations

import re

# The marks of published chat templates, as vLLM's parsers of reasoning know them.
_MARKS = {
    "<think>": "</think>",  # Qwen, DeepSeek, GLM, Kimi, MiniMax, Olmo, and most others
    "<thought>": "</thought>",
    "<mm:think>": "</mm:think>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|plamo:begin_think:plamo|>": "<|plamo:end_think:plamo|>",
}
_OPENING = re.compile(rf"\s*({'|'.join(map(re.escape, _MARKS))})")
_CLOSING = re.compile("|".join(map(re.escape, _MARKS.values())))
# Messages of harmony, the format of gpt-oss; the answer is in the channel final.
_HARMONY = re.compile(r"\s*(?:<\|start\|>assistant)?<\|channel\|>")
_HARMONY_FINAL = re.compile(r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
_HARMONY_END = re.compile(r"<\|(?:end|return|call|start)\|>")


def find_answer(response: str, prompt_end: str = "") -> str:
    r"""Return the answer of a response: what follows its thoughts, all of it without thoughts.

    Thoughts begin with the response or at the end of its prompt. As in vLLM, they also end at a
    mark that nothing has opened, unless the prompt has closed them. Later marks are text, as a
    model may write about them.

    Args:
        prompt_end: Text of the last tokens before the response, where a chat template may have
            opened or closed the thoughts.

    Returns:
        The answer, without blanks before it; "" if the thoughts were cut off.

    >>> find_answer("<think>\nThe answer is A? No.\n</think>\n\nC")
    'C'
    >>> find_answer("The answer is A? ", prompt_end="<|im_start|>assistant\n<think>\n")
    ''
    """
    if _HARMONY.match(response):
        return _find_harmony_answer(response)
    prompt_end = prompt_end.rstrip()
    opening = next((mark for mark in _MARKS if prompt_end.endswith(mark)), "")
    answer = opening + response
    if not opening and not prompt_end.endswith(tuple(_MARKS.values())):
        closing = _CLOSING.search(response)
        if closing and not any(mark in response[: closing.start()] for mark in _MARKS):
            answer = response[closing.end() :].lstrip()
    while match := _OPENING.match(answer):
        _, is_closed, rest = answer.partition(_MARKS[match[1]])
        answer = rest.lstrip()
        if not is_closed:
            return ""
    return answer


def _find_harmony_answer(response: str) -> str:
    messages = _HARMONY_FINAL.split(response)
    return "" if len(messages) == 1 else _HARMONY_END.split(messages[-1])[0]
