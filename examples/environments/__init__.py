"""Environments of toy tasks, by name in agent.environment."""
