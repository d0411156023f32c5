"""What a user may ask of a conversion, read from the text of the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mcore_rl.config.checks import at_least
from mcore_rl.config.errors import ConfigError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True, slots=True)
class Resources:
    """What a command may use. None leaves the choice to it."""

    workers: int | None = None  # processes that convert
    max_memory_bytes: int | None = None  # of all processes together

    def __post_init__(self) -> None:
        if self.workers is not None:
            at_least("--workers", self.workers, 1)


def parse_bytes(option: str, text: str) -> int:
    """A size such as "5GB" or "512MiB" in bytes; `option` names it in messages.

    >>> parse_bytes("--max-memory", "1.5GB")
    1500000000

    Raises:
        ConfigError: it is no size, or not above 0.
    """
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{option}={text!r}; allowed: a size such as 500MB, 5GB or 8GiB")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    at_least(option, size, 1)
    return size


def format_bytes(size: float) -> str:
    """
    >>> format_bytes(1536 << 20)
    '1.61 GB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1000
    return f"{size:.3g} TB"
