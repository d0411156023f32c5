"""The reward `http`: a server of one's own says what a response is worth."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.rewards.base import register_reward, shown
from mcore_rl.rewards.remote import Post, RemoteError, RemoteSettings


@dataclass(frozen=True, kw_only=True)
class HttpSettings(RemoteSettings):
    """Settings of `reward.name=http`."""

    batched: bool = False  # one request for all responses to a prompt, in place of one for each


@register_reward("http")
async def http(
    texts: Sequence[str],
    fields: Sequence[Mapping[str, Any]],
    finish_reasons: Sequence[str],
    num_tokens: Sequence[int],
    max_tokens: int,
    messages: Sequence[Sequence[Mapping[str, Any]]],
    turns: Sequence[Sequence[str]],
    turn_token_ids: Sequence[Sequence[Sequence[int]]],
    post: Post,
    settings: HttpSettings,
) -> Sequence[object]:
    """What a server answers to each response: an object as a reward returns it.

    It gets text, fields, finish_reason, num_tokens, max_tokens, messages, turns and turn_token_ids
    of a response or, `batched`, {"responses": [these of each]}, and answers {"results": [an object
    each]}.
    """
    columns = {
        "text": texts,
        "fields": fields,
        "finish_reason": finish_reasons,
        "num_tokens": num_tokens,
        "max_tokens": [max_tokens] * len(texts),
        "messages": messages,
        "turns": turns,
        "turn_token_ids": turn_token_ids,
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if not settings.batched:
        return await asyncio.gather(*map(post, rows), return_exceptions=True)
    results = (await post({"responses": rows})).get("results")
    if not isinstance(results, list) or len(results) != len(rows):
        raise RemoteError(
            f"{settings.url} answered {shown(results)} as 'results' of {len(rows)} responses; "
            "allowed: a list of as many objects"
        )
    return results
