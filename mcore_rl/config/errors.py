"""Exceptions that mean the same in every room."""


class ConfigError(ValueError):
    """A setting, file or checkpoint that cannot work: named, with its value and what is allowed."""


class PeerError(RuntimeError):
    """Another rank or server did not do its part; when it tells why, that is the cause."""


class StateError(RuntimeError):
    """A call that the state of an engine or a server does not allow, and which it does."""
