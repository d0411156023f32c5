"""Which tensors make a complete set of weights, and the proof that a stream carried just those.

Engines that load by name skip what did not come and ignore what they do not know; both are silent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from mcore_rl.config.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]


def checkpoint_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Hugging Face checkpoint, read from the file headers."""
    index = Path(folder, "model.safetensors.index.json")
    if index.is_file():
        files = sorted(
            {Path(folder, f) for f in json.loads(index.read_text())["weight_map"].values()}
        )
    else:
        files = [Path(folder, "model.safetensors")]
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"model.path {folder}: no {file.name}; a safetensors checkpoint is needed"
            )
        with safe_open(str(file), framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


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
