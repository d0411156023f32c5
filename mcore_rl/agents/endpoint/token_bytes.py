"""The bytes of single tokens: with many tokenizers a token may be a part of a character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # of vocabularies with byte fallback
_SPACE = "\u2581"  # of those of SentencePiece


def token_bytes(tokenizer: Any, token_ids: Sequence[int]) -> list[bytes]:
    """Return the bytes of each token; those of all tokens together are the text in UTF-8.

    tokenizer: of transformers. An id without a token has none.
    """
    pieces = tokenizer.convert_ids_to_tokens([*token_ids])
    added = tokenizer.get_added_vocab()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_byte_level = backend is not None and "ByteLevel" in str(backend.decoder)
    return [
        b"" if piece is None
        else piece.encode() if piece in added
        else _of_byte_level(piece) if is_byte_level
        else bytes([int(byte[1], 16)]) if (byte := _BYTE.fullmatch(piece))
        else piece.replace(_SPACE, " ").encode()
        for piece in pieces
    ]  # fmt: skip


def _of_byte_level(piece: str) -> bytes:
    alphabet = _byte_alphabet()
    return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece)


@cache
def _byte_alphabet() -> dict[str, int]:
    """The characters that GPT-2's vocabulary, and most since, write bytes with."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
