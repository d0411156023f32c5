"""Samples a second of both trainers on a long-tailed workload, whose delays are modelled.

    python benchmarks/one_step_off.py [--steps 10]

The loops are those of a job; servers and actor sleep in place of what they would do, `SPEED_UP`
times shorter. A step is 64 prompts of 8 responses. Response lengths are log-normal, of median 1000
tokens and sigma 0.8, cut at 8192. Servers answer all at once, each response at 50 tokens a second.
The actor computes log-probs of 30,000 and trains on 10,000 tokens a second, and a push takes 5 s.

`sync` has the same devices for either role as `one_step_off`. `sync_shared` has all of them for
each: it trains twice as fast, and generates as fast as before, since the longest response decides.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.config.resolve import for_lane, resolve
from mcore_rl.config.schema import RLConfig, SampleTablesConfig
from mcore_rl.controller.stop_signals import StopSignals
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.jobs.loop import Loop
from mcore_rl.workers.checkpointer import Checkpointer
from mcore_rl.workers.evaluation import Evaluation
from mcore_rl.workers.sample_tables import SampleTables
from mcore_rl.workers.turns import Turns

SPEED_UP = 60.0
MEDIAN, SIGMA, LONGEST = 1000, 0.8, 8192
TOKENS_PER_S, LOG_PROBS_PER_S, TRAINED_PER_S, PUSH_S = 50, 30_000, 10_000, 5.0
ONE_FOR = 32  # a token of a batch here stands for so many, which keeps the loop's own work small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    found = {
        "sync": measured("sync", options.steps),
        "sync_shared": measured("sync", options.steps, devices=2.0),
        "one_step_off": measured("one_step_off", options.steps),
    }
    rate = {name: row["samples_per_s"] for name, row in found.items()}
    over = {f"over_{n}": round(rate["one_step_off"] / rate[n], 3) for n in ("sync", "sync_shared")}
    print(json.dumps({"steps": options.steps, **found, **over}, indent=1))


def measured(mode: str, num_steps: int, devices: float = 1.0) -> dict[str, float]:
    """Modelled seconds a step; the actor has `devices` times those of its own pool."""
    config = RLConfig()
    config.model.path = config.data.train_file = config.data.test_file = "modelled"
    config.placement.rollout, config.trainer.mode = "own", mode
    config.trainer.num_steps = num_steps
    resolve(config)
    config = for_lane(config, "cpu")
    rows: list[dict[str, float]] = []
    servers: Any = Servers()
    with ThreadPoolExecutor(1) as thread, tempfile.TemporaryDirectory() as folder:
        turns = Turns(config.placement, {"actor": Actor(devices)}, servers, servers)  # type: ignore[dict-item]
        data = PromptDataset([PromptRow([row], {}) for row in range(4096)])
        loop = Loop.of(config, turns, data, thread)
        own: tuple[Any, ...] = turns, loop.parts, dict, StopSignals(), 0
        silent, tokenizer = SampleTablesConfig(every=0, num_shown=0, tokens=False), None
        tables = SampleTables(Path(folder), tokenizer, silent)  # type: ignore[arg-type]
        evaluation = Evaluation(config, loop.rollout, {}, tables, lambda *_: None)
        started = time.perf_counter()
        loop.train(
            Checkpointer(config, Path(folder), *own),
            evaluation,
            tables,
            lambda step, metrics: rows.append(metrics),
        )
        wall_s = (time.perf_counter() - started) * SPEED_UP
    samples = num_steps * config.trainer.prompts_per_step * config.algorithm.group_size
    waited = {"trainer_waited_s": "time/generate_s", "servers_idle_s": "time/servers_idle_s"}
    mean = {
        name: round(SPEED_UP * float(np.mean([row[key] for row in rows])), 1)
        for name, key in waited.items()
        if key in rows[0]
    }
    return {
        "samples_per_s": round(samples / wall_s, 3),
        "step_s": round(wall_s / num_steps),
        **mean,
    }


class Servers:
    """Responses of lengths that the group ids decide, after the longest one's time."""

    def __init__(self) -> None:
        self.version = 0

    def generate(self, prompts: Batch, sampling: Any) -> list[tuple[Batch]]:
        groups = np.repeat(prompts.array("group_ids"), sampling.n)
        rng = np.random.default_rng(int(groups[0]))
        drawn = MEDIAN * np.exp(SIGMA * rng.standard_normal(len(groups)))
        lengths = np.minimum(drawn, LONGEST)
        time.sleep(float(lengths.max()) / TOKENS_PER_S / SPEED_UP)
        ids = Jagged.of((np.arange(1, 2 + int(n) // ONE_FOR) for n in lengths), np.int64)
        ones = np.ones(len(ids.values))
        columns = {
            "group_ids": groups,
            "prompt_ids": Jagged.of([[1]] * len(groups), np.int64),
            "response_ids": ids,
            "response_mask": ids.with_values(ones.astype(np.int8)),
            "rollout_log_probs": ids.with_values(-ones.astype(np.float32)),
            "weight_versions": ids.with_values(np.full(len(ids.values), self.version)),
            "rewards": rng.integers(0, 2, len(groups)).astype(np.float32),
            "reward_errors": np.array([""] * len(groups)),
            "finish_reasons": np.where(drawn < LONGEST, "stop", "length"),
        }
        return [(Batch(columns),)]

    def push(self, version: int) -> None:
        time.sleep(PUSH_S / SPEED_UP)
        self.version = version


class Actor:
    """A worker group that takes its time."""

    def __init__(self, devices: float) -> None:
        self._devices = devices

    def _take(self, batch: Batch, tokens_per_s: float) -> None:
        num_tokens = len(batch.jagged("response_ids").values) * ONE_FOR
        time.sleep(num_tokens / (tokens_per_s * self._devices) / SPEED_UP)

    def compute_log_probs(self, batch: Batch, *, temperature: float) -> Batch:
        self._take(batch, LOG_PROBS_PER_S)
        return batch.with_columns(log_probs=batch.jagged("rollout_log_probs"))

    def update(self, batch: Batch, *, temperature: float) -> list[dict[str, float]]:
        self._take(batch, TRAINED_PER_S)
        return [{"loss": 0.0}]


if __name__ == "__main__":
    main()
