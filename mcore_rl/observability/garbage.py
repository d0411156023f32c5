"""What the garbage collector need not look at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def long_lived() -> Iterator[None]:
    """What is made inside stays: nothing of it is collected, or looked at again. A decorator, too.

    Importing torch, Megatron and vLLM makes a million objects. Looking for garbage among them takes
    a third of the time of the import, and the same again at each full collection. Of the time that
    the plan of a large model takes it is half.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
