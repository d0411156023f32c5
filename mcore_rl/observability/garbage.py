"""Objects that the garbage collector may skip."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No collections inside: for what makes many objects and no cycles. A decorator, too.

    Looking for garbage takes half of the time in which the plan of a large model is made.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def long_lived() -> Iterator[None]:
    """What is made inside stays: nothing of it is collected, or looked at again.

    Importing torch, Megatron and vLLM makes a million objects. Looking for garbage among them takes
    a third of the time of the import, and the same again at each full collection.
    """
    with uncollected():
        try:
            yield
        finally:
            gc.freeze()


def leave_garbage_at_exit() -> None:
    """As this process ends, look for none: an interpreter that has imported vLLM takes 2 s for it.

    What is registered with `atexit` later still runs before.
    """
    atexit.register(gc.freeze)
