"""This framework's side of against_trl.py: `mcore-rl rl` with a pause before each step."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from mcore_rl.cli.compose import compose_config
from mcore_rl.config.schema import RLConfig
from mcore_rl.observability.process import list_versions


def main(settings: dict[str, Any]) -> None:
    fixed = {
        "recipe": "quickstart",
        "output_dir": settings["output"],
        "seed": settings["seed"],
        "task.name": "''",
        "warm_start.num_steps": 0,
        "warm_start.train_file": "''",
        "model.path": settings["checkpoint"],
        "data.train_file": settings["data"],
        "data.test_file": settings["test_data"],
        "trainer.num_steps": settings["steps"],
        "trainer.prompts_per_step": settings["prompts"],
        "trainer.eval_samples": 1,
        "algorithm.group_size": settings["group_size"],
        "algorithm.num_mini_batches": settings["optimizer_steps"],
        "algorithm.filter.group_filter": "''",
        "actor.layout.tp": 1,
        "actor.layout.ep": 1,
        "actor.threads_per_rank": settings["threads"],
        "rollout.cores": f"'{_cores(settings['threads'])}'",
    }
    overrides = [f"{key}={value}" for key, value in fixed.items()]
    config = compose_config(RLConfig, [*overrides, *settings["overrides"]])
    from mcore_rl.jobs import output, rl

    progress = output.RunOutput.progress

    @contextlib.contextmanager
    def by_turns(self: output.RunOutput, *args: Any) -> Iterator[Any]:
        with progress(self, *args) as report:
            _tell({"versions": list_versions()})

            def report_and_wait(step: int, metrics: dict[str, float]) -> None:
                report(step, metrics)
                _tell(_described(metrics))

            yield report_and_wait

    with mock.patch.object(output.RunOutput, "progress", by_turns):
        rl.run(config)


def _cores(num: int) -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:num]))


def _described(metrics: dict[str, float]) -> dict[str, float]:
    times = {k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/")}
    others = {name: metrics[name] for name in ("reward", "response_tokens")}
    return {name: round(value, 4) for name, value in (times | others).items()}


def _tell(what: dict[str, Any]) -> None:
    """Says it and waits for the next turn."""
    print(json.dumps(what), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
