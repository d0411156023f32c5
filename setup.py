"""Builds mcore_rl. What it is and needs is in pyproject.toml; here stands what must be compiled."""

from setuptools import setup

setup()
