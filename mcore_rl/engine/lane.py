"""Which lane this machine is in, before any engine is."""

from __future__ import annotations

import torch


def lane() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"
