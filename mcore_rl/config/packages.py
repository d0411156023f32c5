"""Packages that only an extra of this project installs, and errors that name the extra.

Checks do not import a package: that takes seconds.
"""

from __future__ import annotations

import importlib.util

from mcore_rl.config.errors import ConfigError

_ENGINES = ("cpu", "gpu")
# By the name that is imported, as in pyproject.toml or required by what stands there.
EXTRAS = {
    **dict.fromkeys(("megatron", "vllm"), _ENGINES),
    **dict.fromkeys(
        ("fastapi", "jinja2", "pydantic", "ray", "renderers", "starlette", "tokenizers", "torch",
         "transformers", "uvicorn"),
        (*_ENGINES, "fsdp-only"),
    ),
}  # fmt: skip


def check_installed(setting: str, package: str, other: str) -> None:
    """Check that the package of a setting is installed.

    Args:
        setting: Setting and value, for the error: "actor.backend='megatron'".
        package: A key of EXTRAS; "" for none.
        other: Another value that is allowed, for the error.

    Raises:
        ConfigError: It is missing.
    """
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(f"{setting}: {describe_missing(package, other)}")


def describe_missing(package: str, *values: str) -> str:
    """Return the end of an error: the package, and the extras that have it.

    >>> describe_missing("vllm")
    "the package vllm is not installed; allowed: the extra 'cpu' or 'gpu' of mcore-rl"
    """
    extras = " or ".join(map(repr, EXTRAS[package]))
    allowed = ", or ".join((*values, f"the extra {extras} of mcore-rl"))
    return f"the package {package} is not installed; allowed: {allowed}"
