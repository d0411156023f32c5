"""What the loop `verifiers` is told of its environment."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.agents.process_environment import variable_names
from mcore_rl.config.checks import check_at_least, check_positive
from mcore_rl.config.errors import ConfigError


@dataclass(frozen=True)
class VerifiersSettings:
    environment: str  # as verifiers names it: an installed package, or one in `folders`
    args: str = ""  # verifiers' settings of it: a JSON object, or a .toml file with a table [env]
    interpreter: str = ".venv-verifiers/bin/python"  # launch/setup_env.sh verifiers makes it
    folders: str = ""  # with packages that are not installed; several have a : between them
    variables: str = ""  # more environment variables that it gets; commas between names
    start_timeout_s: float = 180.0  # for the process to load the environment
    answer_timeout_s: float = 120.0  # that its event loop may stand still
    max_restarts: int = 3  # of a process that has ended or hangs, of each server

    def __post_init__(self) -> None:
        if not self.environment:
            raise ConfigError("environment=''; allowed: a package with an environment")
        self.parsed_args()
        variable_names(self.variables)
        if not os.access(self.interpreter_path(), os.X_OK):
            raise ConfigError(
                f"interpreter={self.interpreter!r} is no program; "
                "`bash launch/setup_env.sh verifiers` makes .venv-verifiers/bin/python"
            )
        for folder in filter(None, self.folders.split(":")):
            if not Path(folder).is_dir():
                raise ConfigError(f"folders={self.folders!r}: there is no folder {folder!r}")
        for name in ("start_timeout_s", "answer_timeout_s"):
            check_positive(name, getattr(self, name))
        check_at_least("max_restarts", self.max_restarts, 0)

    def parsed_args(self) -> dict[str, Any]:
        """Raises ConfigError where they cannot be read."""
        allowed = "allowed: a JSON object, or a .toml file with a table [env]"
        try:
            if self.args.endswith(".toml"):
                found = tomllib.loads(Path(self.args).read_text(encoding="utf-8")).get("env")
            else:
                found = json.loads(self.args or "{}")
        except (OSError, ValueError) as error:
            raise ConfigError(f"args={self.args!r} cannot be read: {error}; {allowed}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"args={self.args!r}; {allowed}")
        return found

    def interpreter_path(self) -> str:
        return str(Path(self.interpreter).absolute())  # a link of an environment is not followed

    def python_path(self) -> str:
        return ":".join(str(Path(one).absolute()) for one in filter(None, self.folders.split(":")))
