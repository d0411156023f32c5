"""How damage of a tensor shows: by its checksum where a file has one, else by its values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import parse_json_object

CRC32_KEY = "mcore_rl.crc32"  # of a safetensors file's __metadata__: JSON of 8 hex digits by name


def spell_checksums(crc32s: Mapping[str, int]) -> str:
    """CRC32s of tensors by name, as text whose length does not depend on them."""
    return json.dumps({name: f"{crc32:08x}" for name, crc32 in crc32s.items()})


def parse_checksums(text: str, where: str) -> dict[str, int]:
    """What spell_checksums wrote.

    Raises:
        ConfigError: it is something else; the message begins with `where`.
    """
    spelled = parse_json_object(text.encode(), f"{where}: {CRC32_KEY}")
    for name, digits in spelled.items():
        if not isinstance(digits, str) or not re.fullmatch("[0-9a-f]{8}", digits):
            raise ConfigError(f"{where}: {CRC32_KEY} of tensor {name} is {digits!r}, not a CRC32")
    return {name: int(digits, 16) for name, digits in spelled.items()}


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError if a value is NaN or infinite: no weight of a working model is.

    The smallest and the largest value tell, and aminmax runs at the speed of memory.
    """
    if not tensor.numel():
        return
    smallest, largest = torch.aminmax(tensor)
    if bool(torch.isfinite(smallest) & torch.isfinite(largest)):
        return
    index = tuple(torch.isfinite(tensor).logical_not_().nonzero()[0].tolist())
    raise ConfigError(f"tensor {name} is damaged: it holds {tensor[index].item()} at {list(index)}")
