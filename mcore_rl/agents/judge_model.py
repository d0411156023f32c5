"""A frozen model in the place of a judge's server."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mcore_rl.agents.codec import ContextFullError
from mcore_rl.agents.messages import messages_of
from mcore_rl.agents.remote import FrozenModel
from mcore_rl.rewards.remote import Post, RemoteError


def chat_of(model: FrozenModel) -> Post:
    """What chat completions do, for requests and answers as the reward `judge` has them.

    Each prompt has a seed of its own: with it, a verdict is the same in every run.
    """

    async def post(asked: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RemoteError where the prompt leaves no room for a verdict."""
        longest = model.max_context
        try:
            prompt = model.codec.render(messages_of(asked["messages"]))
        except ContextFullError:
            told = f"the judge's prompt has more tokens than its max_context={longest}"
            raise RemoteError(told) from None
        room = longest - len(prompt)
        if room < 1:
            raise RemoteError(
                f"the judge's prompt has {len(prompt)} tokens, and its max_context is {longest}"
            )
        sampling = replace(
            model.sampling,
            n=asked["n"],
            temperature=asked["temperature"],
            max_tokens=min(asked["max_tokens"], room),
            seed=_seed(prompt),
        )
        completions = await model.generator.submit(prompt, sampling)
        parsed = [model.codec.parse(c.token_ids, (), prompt) for c in completions]
        return {"choices": [{"message": {"content": turn.content}} for turn in parsed]}

    return post


def _seed(prompt: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(prompt, np.int64).tobytes())
