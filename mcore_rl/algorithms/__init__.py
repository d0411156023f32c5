"""Advantages, losses and corrections: pure functions of named arrays."""
