"""Which lane this machine is in, before any engine exists."""

from __future__ import annotations

import torch


def lane() -> str:
    """Where there is a GPU "cuda", else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"
