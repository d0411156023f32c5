"""What mcore-rl sft, dpo and rm have in common: jobs/supervised.py with other settings."""

from __future__ import annotations

import argparse

from mcore_rl.cli.job import JobCommand, starting
from mcore_rl.config.train_schema import TrainConfig
from mcore_rl.config.warnings import warnings_of_training

_EXAMPLES = """\
  mcore-rl {0} model.path=/models/Qwen3-0.6B data.train_file=train.jsonl \\
      output_dir=outputs/mine
  mcore-rl {0} recipe=mine.yaml --dry-run
  mcore-rl {0} recipe=mine.yaml trainer.save_every=100 resume=auto
  torchrun --nproc-per-node 2 --no-python \\
      mcore-rl {0} recipe=mine.yaml engine.layout.dp=2
  mcore-rl {0} --help data"""


def command(name: str) -> JobCommand:
    return JobCommand(
        name=name,
        examples=_EXAMPLES.format(name),
        hint="see",
        warnings=warnings_of_training,
        dry_run=_dry_run,
        run=_run,
    )


def _dry_run(config: TrainConfig, options: argparse.Namespace) -> None:
    from mcore_rl.jobs.dry_run import dry_run_supervised

    dry_run_supervised(config)


def _run(config: TrainConfig) -> None:
    with starting():
        from mcore_rl.jobs import supervised  # torch and Ray: bad settings should not wait for that

    supervised.run(config)
