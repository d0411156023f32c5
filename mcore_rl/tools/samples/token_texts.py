"""Token ids as text, piece by piece, and text that can do nothing to whoever looks at it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.sample_tables import SAMPLES, TOKENIZER

_INCOMPLETE = "\ufffd"  # what bytes are decoded as that are no whole character
_MOST_TOKENS = 8  # of a character, with room: of four bytes each


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens [start, end) and their text: one token, or those that share a character."""

    text: str
    start: int
    end: int


class TokenTexts:
    """The tokenizer of a run, or another one."""

    def __init__(self, path: Path) -> None:
        """`path` is a tokenizer.json. Raises ConfigError."""
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error
        self._added = set(self._tokenizer.get_added_tokens_decoder())

    def pieces(self, ids: Sequence[int]) -> Iterator[Piece]:
        """All of the tokens, in order. Bytes that make no character are U+FFFD."""
        # Text is what the tokens from `start` add to those from `before`: some decoders treat the
        # first token of a text in a way of its own.
        before = start = 0
        for end, token in enumerate(ids, 1):
            if token in self._added or self._tokenizer.id_to_token(token) is None:
                if start < end - 1:
                    yield Piece(self._new_text(ids, before, start, end - 1), start, end - 1)
                text = self._tokenizer.id_to_token(token)
                yield Piece(f"[token {token}]" if text is None else text, end - 1, end)
                before, start = end - 1, end
                continue
            text = self._new_text(ids, before, start, end)
            if text.endswith(_INCOMPLETE) and end - start < _MOST_TOKENS:
                continue
            yield Piece(text, start, end)
            before, start = start, end
        if start < len(ids):
            yield Piece(self._new_text(ids, before, start, len(ids)), start, len(ids))

    def _new_text(self, ids: Sequence[int], before: int, start: int, end: int) -> str:
        known, found = (self._decoded(ids[before:to]) for to in (start, end))
        if not found.startswith(known):  # of bytes that are no character if taken together
            return self._decoded(ids[start:end])
        return found[len(known) :]

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def tokenizer_path(run: Path, given: Path | None) -> Path:
    """The tokenizer.json of a run, or what was given: the file, or a folder with it.

    Raises:
        ConfigError: there is none.
    """
    if given is None:
        path = run / SAMPLES / TOKENIZER
        hint = "; allowed: --tokenizer with the folder of the model"
    else:
        path, hint = (given / TOKENIZER if given.is_dir() else given), ""
    if not path.is_file():
        raise ConfigError(f"there is no tokenizer at {path}{hint}")
    return path
