"""The one exception that bad settings raise."""


class ConfigError(ValueError):
    """A setting, file or checkpoint that cannot work; the message names it, its value and what is allowed."""
