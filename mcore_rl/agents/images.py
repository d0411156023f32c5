"""Chats with images: the codec that writes all tokens of an image, and images of tools and users.

A message has a placeholder in its content for each of its images, in their order.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_rl.agents.chat_template.codec import (
    ChatCodec,
    ChatMessage,
    ContextFullError,
    ParsedTurn,
    ToolSpec,
)
from mcore_rl.data.images import IMAGE, ImageError, ImageStore, ImageTokens, inspect_image


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
            images: Those of its prompt.
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


def encode_png(image: object) -> bytes:
    """Return the PNG file of an image of PIL."""
    file = io.BytesIO()
    image.save(file, "PNG")  # type: ignore[attr-defined]
    return file.getvalue()
