"""The seam between a trainer that has new weights and the servers that must run them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class WeightTransport(Protocol):
    """The trainer's end of a route for weights; each route has its own receiving end.

    `StreamSender` sends every tensor whole. It stays as the oracle of routes that move only what a
    server's rank lacks.
    """

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Hand a complete set of weights to every receiver; raise if one did not get all of it."""

    def close(self) -> None:
        """Free the ports and memory of the route; safe to call twice."""
