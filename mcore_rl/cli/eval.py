"""mcore-rl eval: pass@k, mean@k and majority@k of a checkpoint on data sets."""

from __future__ import annotations

import argparse

from mcore_rl.cli.job import JobCommand, starting
from mcore_rl.config.eval_schema import EvalConfig

EXAMPLES = """\
  mcore-rl eval model.path=/models/Qwen3-0.6B data.sets.math=math.parquet \\
      reward.name=math rollout.n=16 output_dir=outputs/math
  mcore-rl eval model.path=outputs/mine data.sets.math=math.parquet \\
      data.sets.aime=aime.jsonl reward.name=math rollout.num_servers=8
  mcore-rl eval recipe=mine.yaml rollout.temperature=0 --dry-run
  mcore-rl eval --help scoring"""


def _dry_run(config: EvalConfig, options: argparse.Namespace) -> None:
    from mcore_rl.jobs.evaluate import dry_run

    dry_run(config)


def _run(config: EvalConfig) -> None:
    with starting():
        from mcore_rl.jobs import evaluate  # torch and Ray: bad settings should not wait for that

    evaluate.run(config)


COMMAND = JobCommand(
    name="eval",
    examples=EXAMPLES,
    hint="see",
    warnings=lambda config: iter(()),
    dry_run=_dry_run,
    run=_run,
)
main, build_parser = COMMAND.main, COMMAND.build_parser
