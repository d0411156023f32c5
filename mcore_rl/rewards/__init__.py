"""Rewards of responses: built-in functions, judges, processes with limits, the manager of a run."""
