"""The one exception that bad settings raise."""


class ConfigError(ValueError):
    """A setting, file or checkpoint that cannot work: named, with its value and what is allowed."""
