"""Implementations of a setting, found by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from mcore_rl.config.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps the allowed values of one setting to what implements them; filled at import."""

    def __init__(self, setting: str) -> None:
        self.setting = setting  # its full key, for error messages
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds its target under `name`; a name taken twice is a ValueError."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.setting}: {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise ConfigError(
                f"{self.setting}={name!r} is unknown; allowed: {', '.join(self.names)}"
            ) from None

    @property
    def names(self) -> list[str]:
        return sorted(self._entries)
