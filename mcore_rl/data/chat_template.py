"""Chat templates, checked to render every message of a conversation completely.

Templates silently drop roles, tool calls and reasoning that they do not know. So the rendered text
is searched for the contents of the messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mcore_rl.data.rows import REASONING, Message, get_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Placeholders for a content and a role, to see whether and where the template writes them: private
# characters, which occur in no text.
MARK = "\ue000{}\ue001"
_ROLE = "\ue000role\ue001"
_THINK = re.compile(r"</?think>")


class ChatTemplateError(Exception):
    """A conversation that the chat template does not render completely."""


class ChatTemplate:
    """Chat template of a tokenizer; raises if it drops parts of messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._checked_shapes: set[tuple[Any, ...]] = set()  # of conversations whose roles it writes

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, Sequence[Message]]:
        """Return the text of a conversation, and its messages as the template reads them.

        Arguments of calls are passed as objects or, if the template renders these wrongly, as JSON
        text.

        Raises:
            ChatTemplateError: it drops a message or a call, or refuses the conversation.
        """
        errors = []
        for candidate in _list_candidates(messages):
            try:
                text = self.render(candidate, tools, add_generation_prompt=add_generation_prompt)
                self._check(candidate, tools, text)
                return text, candidate
            except ChatTemplateError as error:
                errors.append(error)
        raise errors[0]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render without checking the result; ChatTemplateError if the template raises."""
        from jinja2 import TemplateError  # comes with transformers

        schemas: Any = list(tools)
        if not self.tokenizer.chat_template:
            raise ChatTemplateError(
                "is a chat or has tools, and the model has no chat template; allowed: a prompt of "
                "text, which it reads as it is, or a model with chat_template.jinja"
            )
        try:
            if schemas and "tools" not in self.tokenizer.get_chat_template(tools=schemas):
                raise ChatTemplateError("has tools, and the model's chat template does not use any")
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=schemas or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError) as error:  # many templates refuse roles, or their order
            raise ChatTemplateError(f"does not fit the model's chat template: {error}") from error
        return str(text)

    def split_at(
        self, messages: Sequence[Message], index: int, tools: Sequence[Mapping[str, Any]], mark: str
    ) -> tuple[str, str]:
        """Return the text before and after the content of a message, rendered as `mark`."""
        marked = [*messages]
        marked[index] = {**messages[index], "content": mark}
        before, is_written, after = self.render(marked, tools).partition(mark)
        if not is_written:
            raise ChatTemplateError(_describe_loss(index, messages[index]["role"]))
        return before, after

    def _check(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], text: str
    ) -> None:
        shape = (
            bool(tools),
            *((m["role"], _is_replaceable(m), len(m.get("tool_calls", ()))) for m in messages),
        )
        if shape not in self._checked_shapes:
            self._check_roles(messages, tools)
            self._checked_shapes.add(shape)
        for index, message in enumerate(messages):
            content = (message["content"] or "").split("</think>")[-1].strip()
            if content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
                raise ChatTemplateError(_describe_loss(index, message["role"], repr(content[:40])))
            if missing := find_missing_call(message, text):
                raise ChatTemplateError(_describe_loss(index, message["role"], missing))

    def _check_roles(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Check that each message is rendered, as one of its role, with any content."""
        marked = [
            {**message, "content": MARK.format(index)} if _is_replaceable(message) else message
            for index, message in enumerate(messages)
        ]
        text = self.render(marked, tools)
        for index, message in enumerate(messages):
            role = message["role"]
            if _is_replaceable(message) and MARK.format(index) not in text:
                raise ChatTemplateError(_describe_loss(index, role))
            if role not in ("user", "assistant") and not self._reads_role(
                role, marked, tools, text
            ):
                raise ChatTemplateError(
                    f"does not fit the model's chat template: it does not know the role {role!r} "
                    f"of message {index}, and writes it as any other; allowed: roles that it knows"
                )

    def _reads_role(
        self, role: str, marked: Sequence[Message], tools: Sequence[Mapping[str, Any]], text: str
    ) -> bool:
        """Return whether a role is rendered unlike an unknown one, or roles are not rendered."""

        def write_as(name: str) -> str:
            renamed = [{**m, "role": name} if m["role"] == role else m for m in marked]
            try:
                return self.render(renamed, tools)
            except ChatTemplateError as error:
                return str(error)

        return write_as(_ROLE) != text or all(
            write_as(name) == text for name in ("user", "assistant")
        )


def find_missing_call(message: Message, text: str) -> str:
    """Describe the first call of a message that a text lacks; "" if it has all."""
    for number, call in enumerate(message.get("tool_calls", ())):
        function = get_function(call)
        if function["name"] not in text:
            return f"call {number} of {function['name']!r}"
        if not _has_arguments(text, function["arguments"]):
            return f"the arguments of call {number} ({function['name']!r}), or changes them"
    return ""


def find_missing_part(message: Message, text: str) -> str:
    """Describe the first part of a message that a text lacks; "" if it has all."""
    for part in _THINK.split(message["content"] or ""):
        if part.strip() not in text:
            return f"{part.strip()[:40]!r}"
    for name in REASONING:
        if message.get(name, "").strip() not in text:
            return f"its {name}"
    return find_missing_call(message, text)


def _describe_loss(index: int, role: str, what: str = "") -> str:
    of = f"{what} of " if what else ""
    return (
        f"is not written whole: the model's chat template leaves out {of}message {index} "
        f"(role {role!r}); allowed: roles, calls and contents that it writes"
    )


def _is_replaceable(message: Message) -> bool:
    """Return whether the content can be replaced: not that of a message of calls only."""
    return bool(message["content"] or not message.get("tool_calls"))


def _list_candidates(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the messages and, if they have calls, the messages with arguments as JSON text."""
    yield messages
    if not any(message.get("tool_calls") for message in messages):
        return
    written = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = get_function(call)
            text = json.dumps(function["arguments"], ensure_ascii=False)
            encoded = {**function, "arguments": text}
            calls.append({**call, "function": encoded} if "function" in call else encoded)
        written.append({**message, "tool_calls": calls} if calls else message)
    yield written


def _has_arguments(text: str, arguments: Mapping[str, Any] | str) -> bool:
    """Return whether a text has arguments as JSON or one by one, not as JSON in JSON or a repr."""
    if isinstance(arguments, str):
        return arguments in text
    written = json.dumps(arguments, ensure_ascii=False)
    if not arguments or written in text:
        return True
    wrong = repr(arguments), json.dumps(written, ensure_ascii=False)[1:-1]
    return not any(form in text for form in wrong) and _has_leaves(text, arguments)


def _has_leaves(text: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(name in text and _has_leaves(text, inner) for name, inner in value.items())
    if isinstance(value, list):
        return all(_has_leaves(text, inner) for inner in value)
    as_json = json.dumps(value, ensure_ascii=False)
    return str(value).strip() in text or as_json in text
