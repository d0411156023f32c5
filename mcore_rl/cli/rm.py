"""mcore-rl rm: training of a reward model on preference pairs."""

from __future__ import annotations

from mcore_rl.cli.train import command

COMMAND = command("rm")
main, build_parser = COMMAND.main, COMMAND.build_parser
