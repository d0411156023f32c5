"""Responses of agents: turns, chat templates, tools, environments, an OpenAI-compatible server."""
