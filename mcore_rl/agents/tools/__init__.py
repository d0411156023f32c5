"""Tools of an agent: the contract, built-in ones, MCP servers."""
