"""Chats of rows as the model's chat template writes them: every message in it, or an error.

Templates leave out what they do not know: roles, calls of tools, reasoning. Nothing of this is an
error for them, so what they write is searched for what the messages say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mcore_rl.data.rows import REASONING, Message, function_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stand for a content and a role, to see where and whether the template writes them: private
# characters, which occur in no text.
MARK = "\ue000{}\ue001"
_ROLE = "\ue000role\ue001"
_THINK = re.compile(r"</?think>")


class ChatTemplateError(Exception):
    """A conversation that the chat template does not write as it is."""


class ChatTemplate:
    """The chat template of a tokenizer, held to write all that messages say."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._known: set[tuple[Any, ...]] = set()  # shapes of conversations whose roles it writes

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, Sequence[Message]]:
        """Return the text of a conversation, and its messages as the template reads them.

        Arguments of calls are objects or, where the template writes those wrongly, JSON text.

        Raises:
            ChatTemplateError: it leaves out a message or a call, or refuses the conversation.
        """
        errors = []
        for candidate in _with_either_arguments(messages):
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
        """Render without a look at the result. Raises ChatTemplateError where the template does."""
        from jinja2 import TemplateError  # comes with transformers

        schemas: Any = list(tools)
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
        """Return what is written before and after the content of a message if that is `mark`."""
        marked = [*messages]
        marked[index] = {**messages[index], "content": mark}
        before, is_written, after = self.render(marked, tools).partition(mark)
        if not is_written:
            raise ChatTemplateError(_leaves_out(index, messages[index]["role"]))
        return before, after

    def _check(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], text: str
    ) -> None:
        shape = (
            bool(tools),
            *((m["role"], _has_mark(m), len(m.get("tool_calls", ()))) for m in messages),
        )
        if shape not in self._known:
            self._check_roles(messages, tools)
            self._known.add(shape)
        for index, message in enumerate(messages):
            content = (message["content"] or "").split("</think>")[-1].strip()
            if content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
                raise ChatTemplateError(_leaves_out(index, message["role"], repr(content[:40])))
            if missing := missing_calls(message, text):
                raise ChatTemplateError(_leaves_out(index, message["role"], missing))

    def _check_roles(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Check that each message is written, as that of its role, whatever its content is."""
        marked = [
            {**message, "content": MARK.format(index)} if _has_mark(message) else message
            for index, message in enumerate(messages)
        ]
        text = self.render(marked, tools)
        for index, message in enumerate(messages):
            role = message["role"]
            if _has_mark(message) and MARK.format(index) not in text:
                raise ChatTemplateError(_leaves_out(index, role))
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
        """Whether a role is written otherwise than a made-up name; true if no role is read."""

        def write_as(name: str) -> str:
            renamed = [{**m, "role": name} if m["role"] == role else m for m in marked]
            try:
                return self.render(renamed, tools)
            except ChatTemplateError as error:
                return str(error)

        return write_as(_ROLE) != text or all(
            write_as(name) == text for name in ("user", "assistant")
        )


def missing_calls(message: Message, text: str) -> str:
    """Return the first call of a message that a text does not have, in words; empty for none."""
    for number, call in enumerate(message.get("tool_calls", ())):
        function = function_of(call)
        if function["name"] not in text:
            return f"call {number} of {function['name']!r}"
        if not _has_arguments(text, function["arguments"]):
            return f"the arguments of call {number} ({function['name']!r}), or changes them"
    return ""


def missing_part(message: Message, text: str) -> str:
    """Return the first part of what a message says that a text does not have; empty for none."""
    for part in _THINK.split(message["content"] or ""):
        if part.strip() not in text:
            return f"{part.strip()[:40]!r}"
    for name in REASONING:
        if message.get(name, "").strip() not in text:
            return f"its {name}"
    return missing_calls(message, text)


def _leaves_out(index: int, role: str, what: str = "") -> str:
    of = f"{what} of " if what else ""
    return (
        f"is not written whole: the model's chat template leaves out {of}message {index} "
        f"(role {role!r}); allowed: roles, calls and contents that it writes"
    )


def _has_mark(message: Message) -> bool:
    """Whether its content can be replaced: not where there are calls alone."""
    return bool(message["content"] or not message.get("tool_calls"))


def _with_either_arguments(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    yield messages
    if not any(message.get("tool_calls") for message in messages):
        return
    written = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = function_of(call)
            text = json.dumps(function["arguments"], ensure_ascii=False)
            own = {**function, "arguments": text}
            calls.append({**call, "function": own} if "function" in call else own)
        written.append({**message, "tool_calls": calls} if calls else message)
    yield written


def _has_arguments(text: str, arguments: Mapping[str, Any] | str) -> bool:
    """Whether arguments are in a text as JSON, or name by name; not JSON in JSON, nor a repr."""
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
