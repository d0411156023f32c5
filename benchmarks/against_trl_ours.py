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
        "model.dtype": "float32",
        "data.train_file": settings["data"],
        "data.max_prompt_tokens": settings["max_prompt_tokens"],
        "reward.name": "substring",
        "reward.settings": "{whole_words: false}",
        # More steps than are run: the last one would have the evaluation after training.
        "trainer.num_steps": settings["steps"] + 1,
        "trainer.prompts_per_step": settings["prompts"],
        "algorithm.group_size": settings["group_size"],
        "algorithm.num_mini_batches": settings["optimizer_steps"],
        "algorithm.filter.group_filter": "''",
        "actor.layout.tp": 1,
        "actor.layout.ep": 1,
        "actor.threads_per_rank": settings["threads"],
        "rollout.cores": f"'{_list_cores(settings['threads'])}'",
        "rollout.max_response_tokens": settings["response_tokens"],
        "rollout.kv_cache_bytes": settings["kv_cache_bytes"],
    }
    overrides = [f"{key}={value}" for key, value in fixed.items()]
    config = compose_config(RLConfig, [*overrides, *settings["overrides"]])
    from mcore_rl.jobs import output, rl

    progress = output.RunOutput.progress

    @contextlib.contextmanager
    def pause_before_steps(self: output.RunOutput, *args: Any) -> Iterator[Any]:
        with progress(self, *args) as record_metrics:
            _report_and_wait({"versions": list_versions()})

            def record_and_wait(step: int, metrics: dict[str, float]) -> None:
                record_metrics(step, metrics)
                _report_and_wait(_select_metrics(metrics))

            yield record_and_wait

    with mock.patch.object(output.RunOutput, "progress", pause_before_steps):
        rl.run(config)


def _list_cores(num: int) -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:num]))


def _select_metrics(metrics: dict[str, float]) -> dict[str, float]:
    times = {k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/")}
    averages = {name: metrics[name] for name in ("reward", "response_tokens")}
    return {name: round(value, 4) for name, value in (times | averages).items()}


def _report_and_wait(report: dict[str, Any]) -> None:
    """Print a report and wait for permission to go on."""
    print(json.dumps(report), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
