"""mcore-rl sft: supervised training on conversations."""

from __future__ import annotations

from mcore_rl.cli.train import command

COMMAND = command("sft")
main, build_parser = COMMAND.main, COMMAND.build_parser
