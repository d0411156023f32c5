"""Garbage collection in the process of a command."""

from __future__ import annotations

import gc
import weakref

from mcore_rl.observability.process import exempt_objects_from_gc


class Linked:
    """An object in a cycle, which only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def test_objects_of_before_are_collected_after_the_loop_and_those_of_the_loop_inside():
    thresholds = gc.get_threshold()
    before = weakref.ref(Linked())
    assert before() is not None
    with exempt_objects_from_gc():
        inside = weakref.ref(Linked())
        gc.collect()
        assert before() is not None and inside() is None
        assert gc.get_threshold()[0] == 10 * thresholds[0]
    gc.collect()
    assert before() is None and gc.get_threshold() == thresholds
