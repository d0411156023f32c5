"""Proof that a stream carried a complete set of weights, and nothing else.

Engines that load by name skip what did not come and ignore what they do not know; both are silent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

Shapes = Mapping[str, tuple[int, ...]]


def verified(
    tensors: Iterable[tuple[str, torch.Tensor]], expected: Shapes
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass on `tensors`; raise ValueError at the first one unknown, doubled or of another shape.

    Raises at the end when some did not come.
    """
    missing = dict(expected)
    for name, tensor in tensors:
        if name not in expected:
            raise ValueError(f"{name}: the checkpoint has no such tensor")
        if missing.pop(name, None) is None:
            raise ValueError(f"{name}: came twice")
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"{name}: shape {list(tensor.shape)}, the checkpoint has {list(expected[name])}"
            )
        yield name, tensor
    if missing:
        names = sorted(missing)
        raise ValueError(f"{len(names)} tensors did not come: {', '.join(names[:5])}")
