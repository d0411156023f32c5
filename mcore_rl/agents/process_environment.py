"""Environment variables of programs that agents start: few, and those that a setting names."""

from __future__ import annotations

import os
import re

from mcore_rl.config.errors import ConfigError

# A server has keys and tokens in its own, and a program may run what a policy has written.
INHERITED = (
    "CUDA_VISIBLE_DEVICES", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "SHELL",
    "TERM", "TMPDIR", "TZ", "USER",
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOOPBACK = "127.0.0.1,localhost"


def variable_names(variables: str) -> list[str]:
    """Return the names in the setting `variables`, which has commas between them.

    Raises:
        ConfigError: it has something else, or a variable that is not set.
    """
    names = [name.strip() for name in variables.split(",")] if variables else []
    for name in names:
        if not _NAME.fullmatch(name) or name not in os.environ:
            raise ConfigError(
                f"variables={variables!r}: {name!r} is not set; allowed: names of environment "
                "variables of this process, with commas between them"
            )
    return names


def process_environment(variables: str) -> dict[str, str]:
    """Return the INHERITED variables and those of `variables`, as far as they are set.

    No proxy stands between the program and its server. Raises as `variable_names`.
    """
    names = (*INHERITED, *variable_names(variables))
    environment = {name: os.environ[name] for name in names if name in os.environ}
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, (os.environ.get(name, ""), _LOOPBACK)))
    return environment
