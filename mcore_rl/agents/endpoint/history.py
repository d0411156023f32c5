"""Which earlier turn a request goes on from: clients send the whole conversation each time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcore_rl.agents.codec import ChatCodec, ChatMessage, ToolSpec
from mcore_rl.agents.trajectory import Turn


@dataclass(frozen=True, slots=True)
class _Node:
    """The conversation up to a turn, with that turn."""

    turn: Turn
    messages: tuple[ChatMessage, ...]  # the policy's as it said them


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request is in the tree of turns."""

    prompt: list[int]
    parent: str  # a turn_id, or "" of a new conversation
    messages: tuple[ChatMessage, ...]  # the policy's as it said them
    digest: bytes  # of the messages as the client has them


class History:
    """The conversations of a session, by digests of their messages.

    Tools, roles, contents, names and calls have to be the same; call ids, reasoning and white space
    around what the policy said need not: clients drop or change these. What does not match begins
    a conversation of its own.
    """

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._nodes: dict[bytes, _Node] = {}

    def place(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> Place:
        """After the longest conversation that is known. Raises ConfigError as a codec does."""
        digests = list(_digests(messages, tools))
        for end in range(len(messages) - 1, 0, -1):
            if messages[end].role == "assistant":  # not one that the policy said
                break
            node = self._nodes.get(digests[end - 1])
            if node is None:
                continue
            new, last = tuple(messages[end:]), node.turn
            whole = node.messages + new
            prompt = self._codec.extend(last.prompt_ids, last.token_ids, new, tools)
            if prompt is None:  # a new sample, of the same conversation
                prompt = self._codec.render(whole, tools)
            return Place(prompt, last.turn_id, whole, digests[-1])
        return Place(self._codec.render(messages, tools), "", tuple(messages), digests[-1])

    def add(self, place: Place, turn: Turn, said: ChatMessage, sent: ChatMessage) -> None:
        """What the policy said there, and what the client was sent of it."""
        self._nodes[_after(place.digest, sent)] = _Node(turn, (*place.messages, said))


def _digests(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> Iterator[bytes]:
    """One a message, of all up to it and the tools."""
    before = _hashed(b"", [tool.as_dict() for tool in tools])
    for message in messages:
        before = _after(before, message)
        yield before


def _after(before: bytes, message: ChatMessage) -> bytes:
    is_ours = message.role == "assistant"
    content = message.content.strip() if is_ours else message.content
    calls = [[call.name, dict(call.arguments)] for call in message.tool_calls]
    return _hashed(before, [message.role, content, message.name, calls])


def _hashed(before: bytes, value: object) -> bytes:
    return hashlib.sha256(before + json.dumps(value, sort_keys=True).encode()).digest()
