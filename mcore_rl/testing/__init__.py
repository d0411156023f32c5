"""Conformance checks of a user's own parts: each puts a class through its contract with one call.

    from mcore_rl.testing import check_tracker

    check_tracker(MyTracker, tmp_path)

A check runs the real part and raises AssertionError with a sentence on what is wrong and what the
contract says. The contracts are in docs/plugs.md. Modules are imported when a check is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_rl.testing.engine import check_engine
    from mcore_rl.testing.family import check_family
    from mcore_rl.testing.server import check_server
    from mcore_rl.testing.tracker import check_tracker
    from mcore_rl.testing.trainer import check_trainer
    from mcore_rl.testing.transport import check_transport

_MODULES = {
    "check_engine": "engine",
    "check_family": "family",
    "check_server": "server",
    "check_tracker": "tracker",
    "check_trainer": "trainer",
    "check_transport": "transport",
}

__all__ = [
    "check_engine",
    "check_family",
    "check_server",
    "check_tracker",
    "check_trainer",
    "check_transport",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mcore_rl.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mcore_rl.testing.{_MODULES[name]}"), name)
