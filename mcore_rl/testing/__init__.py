"""Conformance suites: a class of one's own is put through its contract with one call.

Each raises AssertionError with a sentence of what is wrong and what the contract says. They run the
real part on a small model: from a test of one's own, or from a notebook.
"""

from mcore_rl.testing.engine import check_engine

__all__ = ["check_engine"]
