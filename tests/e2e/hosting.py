"""A process that outlives its vLLM servers, which it starts one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def hosting() -> Iterator[None]:
    """Undo what a server changes in the environment of its process."""
    with mock.patch.dict(os.environ):
        yield
