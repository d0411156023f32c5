"""Conformance suites: put a part of your own through the rules of its contract, with one call."""

from mcore_rl.testing.server import check_server
from mcore_rl.testing.transport import check_transport

__all__ = ["check_server", "check_transport"]
