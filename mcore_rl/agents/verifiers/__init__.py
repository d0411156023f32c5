"""Environments of the library verifiers, in an interpreter of their own."""
