"""A reward of a user's own that says which answer a response gives."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from mcore_rl.rewards.registry import with_answers


def answer(text: str, finish_reason: str) -> str | None:
    """One of three, or none: of any text."""
    return [None, "a", "b", "c"][zlib.crc32(text.encode()) % 4]


@with_answers(lambda settings: answer)
def is_a(text: str, fields: Mapping[str, Any], finish_reason: str) -> dict[str, float]:
    return {"reward": float(answer(text, finish_reason) == "a"), "length": float(len(text))}


def without_answers(text: str, fields: Mapping[str, Any], finish_reason: str) -> dict[str, float]:
    if int(fields["answer"]) % 2:
        raise ValueError("odd")
    return {"reward": 0.5 + len(text) % 2}
