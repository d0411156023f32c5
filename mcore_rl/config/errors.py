"""Exceptions that all packages use."""


class ConfigError(ValueError):
    """A setting, file or checkpoint that cannot work: named, with its value and what is allowed."""


class PeerError(RuntimeError):
    """Another rank or server failed or is silent; if it reports why, that is the cause."""


class DiedError(RuntimeError):
    """A process that a worker needs has died, such as its engine: the worker has to be replaced."""


class StateError(RuntimeError):
    """A call that the state of an engine or a server does not allow; says which state allows it."""


def describe_error(error: BaseException, max_characters: int | None = None) -> str:
    """Return type and message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:max_characters]
