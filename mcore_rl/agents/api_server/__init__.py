"""The server of an agent that speaks OpenAI's API: requests, sessions, limits."""
