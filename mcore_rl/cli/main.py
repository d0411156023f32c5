"""The `mcore-rl` command: one subcommand a job."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from mcore_rl.config.errors import ConfigError

_COMMANDS = {"rl": "reinforcement learning: mcore-rl rl recipe=quickstart [key=value ...]"}


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in _COMMANDS:
        wanted = arguments and arguments[0] not in ("-h", "--help")
        lines = [f"unknown command {arguments[0]!r}"] if wanted else []
        lines += ["usage: mcore-rl COMMAND ...", *(f"  {n:10} {h}" for n, h in _COMMANDS.items())]
        print("\n".join(lines), file=sys.stderr if wanted else sys.stdout)
        return 2 if wanted else 0
    command: Callable[[list[str]], None] = importlib.import_module(
        f"mcore_rl.cli.{arguments[0]}"
    ).main
    try:
        command(arguments[1:])
    except ConfigError as error:
        print(f"mcore-rl {arguments[0]}: {error}", file=sys.stderr)
        return 2
    return 0
