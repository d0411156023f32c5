"""Digests of data: whether a run that goes on reads the rows that it began with."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any


class Digest:
    """A digest of values in their order, the same in every process."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, value: Any) -> None:
        """Add what JSON can hold; of other values what `_describe` says."""
        text = json.dumps(value, default=_describe, skipkeys=True)
        self._hash.update(text.encode())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _describe(value: Any) -> Any:
    """Describe a value of a user's own rows without its address, and a set in a fixed order."""
    if hasattr(value, "tolist"):  # arrays and tensors, whose texts leave elements out
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
