"""A codec for known families: prompts by the chat template, turns by the package `renderers`.

The package knows how each family ends a turn, what follows it, and how it writes calls. gpt-oss has
harmony_codec.py: its renderer in the package loads a vocabulary from the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from mcore_rl.agents.chat_template.codec import (
    ChatMessage,
    ChatTokenizer,
    JsonValue,
    ParsedTurn,
    TemplateRenderer,
    ToolSpec,
    convert_response,
)
from mcore_rl.agents.chat_template.tagged_calls import (
    GLM_TAGS,
    QWEN_TAGS,
    CallTags,
    declare_texts,
    read_calls,
)

# Family -> values of the template's own variables to try in this order; its renderer is given those
# with which it writes what the template writes.
FAMILIES: Mapping[str, Sequence[Mapping[str, JsonValue]]] = {
    "qwen3": ({},),
    "qwen3.5": ({"enable_thinking": True}, {"enable_thinking": False}),
    "qwen3.6": ({"enable_thinking": True}, {"enable_thinking": False}),
    "deepseek-v3": ({},),
    "deepseek-r1": ({},),
    "glm-4.5": ({},),
    "glm-5": ({},),
    "glm-5.1": ({},),
    "kimi-k2": ({},),
    "kimi-k2.5": ({},),
    "llama-3": ({},),
}
# Families that write the arguments of calls without JSON.
_CALL_TAGS: Mapping[str, CallTags] = {
    "qwen3.5": QWEN_TAGS,
    "qwen3.6": QWEN_TAGS,
    "glm-4.5": GLM_TAGS,
    "glm-5": GLM_TAGS,
    "glm-5.1": GLM_TAGS,
}


class RenderersCodec:
    """`ChatCodec` with the renderer of one family."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        family: str,
        options: Mapping[str, JsonValue],
        variant: Mapping[str, JsonValue] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Create the renderer.

        Args:
            options: Values of the template's variables.
            variant: More values, for the renderer alone.
            stop_ids: Tokens that end a turn beside the family's, as generation_config.json has.

        Raises:
            ValueError: The tokenizer lacks the family's tokens, or the values do not suit it.
        """
        from renderers import config_from_name, create_renderer

        self._template, self._tags = TemplateRenderer(tokenizer, options), _CALL_TAGS.get(family)
        self.name, self.tool_refusal = f"renderers:{family}", ""
        try:
            self._renderer = create_renderer(
                tokenizer,
                config_from_name(family),
                chat_template_kwargs={**(variant or {}), **options},
            )
        except AssertionError as error:  # the tokenizer lacks a token
            raise ValueError(str(error)) from error
        family_ids = frozenset(self._renderer.get_stop_token_ids())
        self._foreign_ids = frozenset(stop_ids) - family_ids  # the renderer takes them for text
        self.stop_ids = family_ids | self._foreign_ids

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Render a prompt by the chat template."""
        return self._template.render(messages, tools)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """Return the next prompt, or None; see `ChatCodec.extend`."""
        if completion_ids and completion_ids[-1] in self._foreign_ids:
            return None  # the renderer would end the turn again
        rendered = self._renderer.bridge_to_next_turn(
            list(prompt_ids),
            list(completion_ids),
            _to_dicts(new_messages),
            tools=_to_dicts(tools) or None,
        )
        done = len(prompt_ids) + len(completion_ids)
        if rendered is None:
            return None
        ids: list[int] = rendered.token_ids
        return ids[:done] + self._merge_pieces(ids[done:])

    def parse(
        self,
        completion_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        """Split a completion into its parts; see `ChatCodec.parse`."""
        ids = [*takewhile(lambda token: token not in self._foreign_ids, completion_ids)]
        declared = _to_dicts(tools) if self._tags is None else declare_texts(tools)
        response = self._renderer.parse_response(
            ids, tools=declared or None, prompt_ids=list(prompt_ids)
        )
        if self._tags is not None:
            response = read_calls(response, self._tags, tools)
        return convert_response(response, tools)

    def _merge_pieces(self, ids: list[int]) -> list[int]:
        """Tokenise the text of `ids` at once, as the chat template does.

        Renderers encode some texts in pieces: a newline, then an answer that begins with one.
        """
        return self._template.tokenizer.encode(self._template.decode(ids), add_special_tokens=False)


def _to_dicts(items: Sequence[ChatMessage] | Sequence[ToolSpec]) -> list[dict[str, JsonValue]]:
    return [item.to_dict() for item in items]
