"""How a process that outlives its vLLM servers has them: one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def hosting() -> Iterator[None]:
    """What a server changes in the environment of its process is undone."""
    with mock.patch.dict(os.environ):
        yield
