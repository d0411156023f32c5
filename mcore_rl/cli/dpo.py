"""mcore-rl dpo: training on preference pairs."""

from __future__ import annotations

from mcore_rl.cli.train import command

COMMAND = command("dpo")
main, build_parser = COMMAND.main, COMMAND.build_parser
