"""mcore-rl rl: a run with settings from a recipe and key=value overrides; or its dry run."""

from __future__ import annotations

import argparse

from mcore_rl.cli.job import JobCommand, starting
from mcore_rl.cli.options import Parser
from mcore_rl.config.checks import at_least
from mcore_rl.config.schema import RLConfig
from mcore_rl.config.warnings import warnings_of

EXAMPLES = """\
  mcore-rl rl recipe=quickstart seed=7 trainer.num_steps=40
  mcore-rl rl recipe=mine.yaml --dry-run
  mcore-rl rl recipe=quickstart actor.layout.ep=1 --print-config > mine.yaml
  mcore-rl rl model.path=/models/Qwen3-0.6B data.train_file=train.parquet \\
      data.test_file=test.parquet actor.layout.tp=2 output_dir=outputs/mine
  mcore-rl rl --help actor.optimizer"""


def _options(parser: Parser) -> None:
    about = "with --dry-run: roles on such nodes, and what the weight sync moves, as in =8"
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help=about)
    about = "with --gpus-per-node: how many nodes there are; which stay idle is told"
    parser.add_argument("--num-nodes", type=int, metavar="N", help=about)


def _dry_run(config: RLConfig, options: argparse.Namespace) -> None:
    if options.gpus_per_node is not None:
        at_least("--gpus-per-node", options.gpus_per_node, 1)
    if options.num_nodes is not None:
        at_least("--num-nodes", options.num_nodes, 1)
    from mcore_rl.jobs.dry_run import dry_run

    dry_run(config, gpus_per_node=options.gpus_per_node, num_nodes=options.num_nodes)


def _run(config: RLConfig) -> None:
    with starting():
        from mcore_rl.jobs import rl  # torch and Ray: bad settings should not wait for that

    rl.run(config)


COMMAND = JobCommand(
    name="rl",
    examples=EXAMPLES,
    hint="try recipe=quickstart, or see",
    warnings=warnings_of,
    dry_run=_dry_run,
    run=_run,
    has_recipes=True,
    add_options=_options,
)
main, build_parser = COMMAND.main, COMMAND.build_parser
