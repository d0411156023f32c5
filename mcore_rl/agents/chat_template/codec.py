"""Chats as token ids over many turns: messages, the contract of a codec, the checked codec, images.

The tokens of a turn are made once. What the policy sampled is never rendered again: the next prompt
is the last prompt, the sampled tokens, and the tokens that the chat template puts after them.

A message has a placeholder in its content for each of its images, in their order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal, Protocol, get_args

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.image_files import ImageError, inspect_image
from mcore_rl.data.images import IMAGE, ImageStore, ImageTokens

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
Role = Literal["system", "user", "assistant", "tool"]
CallStatus = Literal["ok", "malformed", "unclosed", "unnamed", "unknown_tool"]
MAX_DEPTH = 100  # nesting of lists and objects in the arguments of a call
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# By the status of a call in the package renderers.
_CALL_STATUS: Mapping[str, CallStatus] = {
    "ok": "ok",
    "unclosed_block": "unclosed",
    "missing_name": "unnamed",
    "unknown_tool": "unknown_tool",
    "invalid_json": "malformed",
    "malformed_structure": "malformed",
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A valid call of a tool, as a message of the assistant has it."""

    name: str
    arguments: Mapping[str, JsonValue]
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a chat."""

    role: Role
    content: str = ""
    reasoning: str = ""  # assistant only
    tool_calls: tuple[ToolCall, ...] = ()  # assistant only
    tool_call_id: str = ""  # tool only: the call that this message answers
    name: str = ""  # tool only
    # Digests of images in the run's ImageStore, each with a placeholder in `content`; new ones are
    # files, with "<image>" (ImageCodec.add_images).
    images: tuple[str | bytes, ...] = ()

    def to_dict(self) -> dict[str, JsonValue]:
        """Return the message in OpenAI's form for chat templates: arguments are objects."""
        message: dict[str, JsonValue] = {"role": self.role, "content": self.content}
        if self.images:
            message["images"] = [i if isinstance(i, str) else "" for i in self.images]
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
            if self.name:
                message["name"] = self.name
        return message


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the chat template describes it to the model."""

    name: str
    description: str
    parameters: Mapping[str, JsonValue]  # JSON schema of the arguments

    def to_dict(self) -> dict[str, JsonValue]:
        """Return the tool in OpenAI's form."""
        function: dict[str, JsonValue] = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """An attempt to call a tool, valid or not."""

    status: CallStatus
    name: str  # empty if the attempt has none
    arguments: Mapping[str, JsonValue]  # empty unless `status` is "ok"
    text: str  # as sampled
    span: tuple[int, int] | None  # tokens of the completion, [start, end)
    id: str = ""  # empty if the format has none


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A completion in parts, for tools, rewards and logs. Prompts are never rendered from it."""

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    reasoning_closed: bool = True  # False if the completion ends inside its reasoning

    def to_message(self) -> ChatMessage:
        """Return the turn as a message, with its valid calls."""
        calls = tuple(ToolCall(c.name, c.arguments, c.id) for c in self.calls if c.status == "ok")
        return ChatMessage("assistant", self.content, self.reasoning, calls)


class ContextFullError(RuntimeError):
    """The context has no room for another token of the policy."""


class ChatTokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that codecs use."""

    @property
    def eos_token_id(self) -> int | None: ...

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, JsonValue]], **options: Any
    ) -> str: ...


class ChatCodec(Protocol):
    """Writes prompts as token ids, and reads completions."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn of the assistant."""

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Render a prompt, up to the start of the assistant's turn.

        Raises:
            ConfigError: The codec refuses tools or calls; see `ValidatedChatTemplate`.
            ContextFullError: The text is far longer than the context.
        """

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """Return the next prompt: prompt_ids + completion_ids + the tokens that follow them.

        A completion that was cut off lacks the token that ends a turn; that token is then the first
        to follow.

        Args:
            new_messages: Messages since the completion, of tools, the user or the system.

        Returns:
            None if the template would rewrite earlier tokens. Then `render` begins a new sample.

        Raises:
            ConfigError, ContextFullError: As `render`.
        """

    def parse(
        self,
        completion_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        """Split a completion into content, reasoning and calls.

        Args:
            tools: Give the types of arguments if the format of calls has none.
            prompt_ids: The prompt of the completion; with some templates it opens the reasoning.
        """


class NamedCodec(ChatCodec, Protocol):
    """A codec before it is compared with the chat template."""

    @property
    def name(self) -> str: ...

    @property
    def tool_refusal(self) -> str:
        """The reason why it cannot write the template's tools; empty if it can."""


@dataclass(frozen=True, slots=True)
class TemplateRenderer:
    """Renders by a tokenizer's chat template, with values for the template's own variables."""

    tokenizer: ChatTokenizer
    options: Mapping[str, JsonValue]

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
        *,
        generate: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation; raise ContextFullError as `encode`."""
        text = self.tokenizer.apply_chat_template(
            [self.write_message(message) for message in messages],
            tools=[tool.to_dict() for tool in tools] or None,
            add_generation_prompt=generate,
            tokenize=False,
            **self.options,
        )
        return encode(self.tokenizer, text, max_tokens)

    def write_message(self, message: ChatMessage) -> dict[str, JsonValue]:
        """Return a message as the template reads it."""
        return message.to_dict()

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, with special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class ValidatedChatTemplate:
    """A codec that agrees with the chat template; `validation.validate_codec` makes it.

    Attributes:
        codec: Writes what follows a turn, and reads turns.
        template: Renders whole prompts.
        max_tokens: Limit of a prompt. A text with many more is refused before all of it is
            tokenised.
        tool_refusal: The reason why tools are refused; empty if they work.
        parallel_refusal: The reason why several calls in a turn are refused; empty if they work.
        extends_users: Whether a user's message continues the sample after a turn without
            reasoning. Otherwise each message of a user begins a new sample.
    """

    codec: NamedCodec
    template: TemplateRenderer
    max_tokens: int | None
    tool_refusal: str
    parallel_refusal: str
    extends_users: bool

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def options(self) -> Mapping[str, JsonValue]:
        """Values of the template's own variables."""
        return self.template.options

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.codec.stop_ids

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Render a prompt by the chat template; see `ChatCodec.render`."""
        calls = max((len(message.tool_calls) for message in messages), default=0)
        self._check_tools(tools, calls)
        return self.template.render(messages, tools, max_tokens=self.max_tokens)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """Return the next prompt, or None; see `ChatCodec.extend`."""
        self._check_tools(tools, sum(message.role == "tool" for message in new_messages))
        if self.max_tokens is not None:
            text = "".join(message.content for message in new_messages)
            check_length(self.template.tokenizer, text, self.max_tokens)
        done = [*prompt_ids, *completion_ids]
        prompt = self.codec.extend(prompt_ids, completion_ids, new_messages, tools)
        return prompt if prompt is not None and prompt[: len(done)] == done else None

    def parse(
        self,
        completion_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        """Parse a completion; if the codec's parser raises, all of it is a malformed call.

        Without tools it is content then, since there is nothing to call.
        """
        try:
            return self.codec.parse(completion_ids, tools, prompt_ids)
        except Exception:  # noqa: BLE001 (parsers raise anything on the policy's text)
            text_ids = [*takewhile(lambda token: token not in self.stop_ids, completion_ids)]
        text = self.template.decode(text_ids)
        if not tools:
            return ParsedTurn(text, "", ())
        call = ParsedCall("malformed", "", {}, text, (0, len(text_ids)))
        return ParsedTurn("", "", (call,))

    def _check_tools(self, tools: Sequence[ToolSpec], num_calls: int) -> None:
        if (tools or num_calls) and self.tool_refusal:
            raise ConfigError(f"the codec {self.name} has no tools: {self.tool_refusal}")
        if num_calls > 1 and self.parallel_refusal:
            raise ConfigError(
                f"the codec {self.name} takes one tool call a turn, not {num_calls}: "
                f"{self.parallel_refusal}"
            )


def encode(tokenizer: ChatTokenizer, text: str, max_tokens: int | None = None) -> list[int]:
    """Return the tokens of a text, without special tokens around it.

    Raises:
        ContextFullError: It is certain to have more than `max_tokens`. Only about twice as many are
            tokenised to find out.
    """
    if max_tokens is not None:
        check_length(tokenizer, text, max_tokens)
    return tokenizer.encode(text, add_special_tokens=False)


def check_length(tokenizer: ChatTokenizer, text: str, max_tokens: int) -> None:
    """Raise ContextFullError for a text that is certain to have more than `max_tokens` tokens.

    The text is tokenised in pieces until they have twice as many: a cut through a word adds a few
    tokens. A text of up to four characters for each token of the limit is not tokenised.
    """
    piece_chars, num_tokens = max(4 * max_tokens, 4096), 0
    if len(text) <= piece_chars:
        return
    for start in range(0, len(text), piece_chars):
        piece = text[start : start + piece_chars]
        num_tokens += len(tokenizer.encode(piece, add_special_tokens=False))
        if num_tokens > 2 * max_tokens:
            raise ContextFullError(f"more than {max_tokens} of {max_tokens} tokens are used")


def convert_response(response: Any, tools: Sequence[ToolSpec]) -> ParsedTurn:
    """Convert a `renderers.ParsedResponse` to a ParsedTurn.

    A call is "ok" if it has arguments by name that JSON can write.
    """
    names = {tool.name for tool in tools}
    calls = []
    for call in response.tool_calls:
        status = _CALL_STATUS[str(call.status)]
        arguments = call.arguments
        is_named = isinstance(arguments, dict) and isinstance(call.name, str)
        if status == "ok" and not (is_named and _is_writable(arguments)):
            status = "malformed"
        if status == "ok" and names and call.name not in names:
            status = "unknown_tool"
        calls.append(
            ParsedCall(
                status=status,
                name=replace_surrogates(str(call.name or "")),
                arguments=arguments if status == "ok" else {},
                text=call.raw,
                span=call.token_span,
                id=call.id or "",
            )
        )
    return ParsedTurn(
        content=response.content,
        reasoning=response.reasoning_content or "",
        calls=tuple(calls),
        reasoning_closed=response.reasoning_complete is not False,
    )


def _is_writable(arguments: dict[str, Any]) -> bool:
    """Return whether values nest at most MAX_DEPTH deep, without NaN, infinity or huge integers.

    Deeper ones end in a RecursionError in a template or a tool.
    """
    containers: list[Any] = [arguments]
    for _ in range(MAX_DEPTH):
        values = (v.values() if isinstance(v, dict) else v for v in containers)
        containers = [v for inner in values for v in inner if isinstance(v, dict | list)]
    try:
        json.dumps(None if containers else arguments, allow_nan=False)
    except ValueError:
        return False
    return not containers


@dataclass(frozen=True, slots=True)
class ImageCodec:
    """A `ChatCodec` for a model that takes images.

    Args:
        codec: Writes and reads the text.
        max_images: Limit of a prompt.
        max_pixels: Limit of an image.
    """

    codec: ChatCodec
    tokens: ImageTokens
    store: ImageStore
    max_images: int
    max_pixels: int

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.codec.stop_ids

    def add_images(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Store the new images of messages, which are files, and write their placeholders.

        Raises:
            ImageError: an image cannot be used, or a content has another number of IMAGE than the
                message has new images.
        """
        return [self._add(message) for message in messages]

    def _add(self, message: ChatMessage) -> ChatMessage:
        if not any(isinstance(image, bytes) for image in message.images):
            return message
        content, num = message.content, len(message.images)
        if IMAGE not in content:
            content = IMAGE * num + content
        if content.count(IMAGE) != num:
            raise ImageError(
                f"a message of the role {message.role!r} has {content.count(IMAGE)} {IMAGE} for "
                f"{num} images; allowed: one for each, or none"
            )
        digests = [self.add_file(i) if isinstance(i, bytes) else i for i in message.images]
        content = content.replace(IMAGE, self.tokens.placeholder)
        return replace(message, content=content, images=tuple(digests))

    def add_file(self, content: bytes) -> str:
        """Store an image file; return its digest.

        Raises:
            ImageError: it is none that can be used.
        """
        image = inspect_image(content, self.max_pixels)
        self.tokens.count(image.size)
        return self.store.add(image)

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Render a prompt with all tokens of its images; see `ChatCodec.render`.

        Raises:
            ImageError: its text has another number of image tokens than it has images.
        """
        return self._expand(self.codec.render(messages, tools), messages)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """Return the next prompt, or None; see `ChatCodec.extend`. Raises as `render`, too."""
        prompt = self.codec.extend(prompt_ids, completion_ids, new_messages, tools)
        if prompt is None:
            return None
        length = len(prompt_ids) + len(completion_ids)
        return prompt[:length] + self._expand(prompt[length:], new_messages)

    def parse(
        self,
        completion_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        """Split a completion into its parts; see `ChatCodec.parse`."""
        return self.codec.parse(completion_ids, tools, prompt_ids)

    def _expand(self, ids: Sequence[int], messages: Sequence[ChatMessage]) -> list[int]:
        digests = list_images(messages)
        files = map(self.store.read, digests)
        sizes = [inspect_image(file, self.max_pixels).size for file in files]
        return self.tokens.expand(ids, sizes)

    def check_limits(self, images: Sequence[str], sampled: Sequence[int] = ()) -> None:
        """Check that a turn may follow.

        Args:
            images: Digests of the images in the turn's prompt.
            sampled: The turn before.

        Raises:
            ContextFullError: There are too many images, or the turn before has a token that stands
                for one.
        """
        if wrong := self.tokens.special_ids & {*sampled}:
            raise ContextFullError(f"the turn before has tokens for images: {sorted(wrong)}")
        if len(images) > self.max_images:
            raise ContextFullError(
                f"{len(images)} images are more than rollout.max_images={self.max_images}"
            )


def list_images(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """Return the digests of the images of messages, in the order of the text."""
    return tuple(i for message in messages for i in message.images if isinstance(i, str))


def parse_messages(rows: Sequence[Mapping[str, Any]]) -> tuple[ChatMessage, ...]:
    """Convert messages in OpenAI's form, as data rows have them; their content has to be text.

    Raises:
        ConfigError: A message has another role or content, or a tool call that cannot be read.
    """
    return tuple(_parse_message(row, number) for number, row in enumerate(rows))


def _parse_message(row: Mapping[str, Any], number: int) -> ChatMessage:
    if row.get("role") not in get_args(Role):
        raise ConfigError(
            f"message {number} has the role {row.get('role')!r}; allowed: "
            f"{', '.join(get_args(Role))}"
        )
    content = row.get("content") or ""
    if not isinstance(content, str):
        raise ConfigError(
            f"message {number} has content of {type(content).__name__}; allowed: text"
        )
    return ChatMessage(
        role=row["role"],
        content=content,
        reasoning=row.get("reasoning_content") or "",
        tool_calls=tuple(_parse_call(call, number) for call in row.get("tool_calls") or ()),
        tool_call_id=row.get("tool_call_id") or "",
        name=row.get("name") or "",
        images=tuple(row.get("images") or ()),
    )


def _parse_call(call: Mapping[str, Any], number: int) -> ToolCall:
    try:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments.strip() or "null")
        if arguments is None:  # clients write none so, or leave the field out
            arguments = {}
        if not isinstance(arguments, Mapping):
            raise TypeError("arguments have to be an object")
        return ToolCall(function["name"], dict(arguments), call.get("id") or "")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"message {number} has a tool call {call!r}: {error!r}") from error


def replace_surrogates(text: str) -> str:
    """Replace each lone surrogate by U+FFFD: JSON may have one, no tokenizer takes it.

    >>> replace_surrogates("in x\\ud800") == "in x\\ufffd"
    True
    """
    return _SURROGATE.sub("\ufffd", text)


def replace_message_surrogates(message: ChatMessage) -> ChatMessage:
    """Replace lone surrogates in all parts of a message that a chat template shows."""
    calls = tuple(
        ToolCall(
            replace_surrogates(call.name),
            _replace_in_values(call.arguments),
            replace_surrogates(call.id),
        )
        for call in message.tool_calls
    )
    return replace(
        message,
        content=replace_surrogates(message.content),
        reasoning=replace_surrogates(message.reasoning),
        tool_calls=calls,
        tool_call_id=replace_surrogates(message.tool_call_id),
        name=replace_surrogates(message.name),
    )


def _replace_in_values(values: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return {replace_surrogates(name): _replace_in_value(value) for name, value in values.items()}


def _replace_in_value(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [_replace_in_value(item) for item in value]
    return _replace_in_values(value) if isinstance(value, Mapping) else value
