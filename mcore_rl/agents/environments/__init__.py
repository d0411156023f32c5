"""Environments: the contract, and the built-in ones."""
