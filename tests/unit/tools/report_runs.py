"""Runs as the project's own writers leave them, for tests of `mcore-rl report`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.config.schema import DPOConfig, EvalConfig, RLConfig, RMConfig, SFTConfig
from mcore_rl.jobs.output import write_json
from mcore_rl.observability.expert_load import ExpertLoad, ExpertLoadWriter
from mcore_rl.observability.metrics import MetricsLogger
from mcore_rl.observability.timeline import StepTimeline, TimelineWriter, TimeSpan
from mcore_rl.observability.trackers import TrackedRun
from tests.unit.tools.sample_runs import ASSISTANT, END, START, sample, trained, written

# A response that would run if the page read it as HTML.
PLANTED = (
    "</script><script>window.planted = 1</script><img src=x onerror='window.planted = 2'>"
    "<a href='javascript:window.planted = 3'>"
)
_STEP_S = 4.0
_CONFIGS = {"rl": RLConfig, "sft": SFTConfig, "dpo": DPOConfig, "rm": RMConfig, "eval": EvalConfig}


def build_rl_metrics(step: int) -> dict[str, float]:
    """Return metrics of a step, of every plot."""
    metrics = {
        "reward": 0.3 + 0.1 * step, "reward/format": 0.9, f"reward/{PLANTED}": 0.1 * step,
        "response_tokens": 20.0 + step, "response_tokens_max": 40.0, "truncated": 0.01,
        "samples/age": 1.0, "samples/groups": 8.0, "samples/passed": 0.5,
        "max_logprob_gap": 1e-4, "mean_logprob_gap": 1e-6, "mismatch/kl": 1e-8,
        "actor/approx_kl": 1e-3, "actor/reference_kl": 2e-3, "actor/entropy": 1.0 / step,
        "actor/clipped": 0.001 * step, "actor/loss": -0.1, "actor/grad_norm": 1.5,
        "actor/lr": 1e-5, "actor/moe/max_expert_load": 1.5, "actor/moe/min_expert_load": 0.5,
        "actor/moe/max_expert_load/layer_0": 1.2, "actor/moe/max_expert_load/layer_1": 1.5,
        "tokens_per_s": 1000.0, "time/generate_s": 2.0, "time/update_s": 1.0,
        "time/weight_sync_s": 0.25, "time/servers_idle_s": 1.25, "memory/peak_bytes": 1e9,
        "driver/cpu_s": 0.1,
    }  # fmt: skip
    if step % 2 == 0:
        metrics |= {"eval/test/accuracy": 0.5, "eval/test/accuracy_stderr": 0.125}
    return metrics


def build_timeline(step: int) -> StepTimeline:
    """Return a step in which servers generate for 2 s and the actor trains for 1 s."""
    start_s = 1000.0 + _STEP_S * step
    return StepTimeline(
        "training",
        step,
        [
            TimeSpan("driver", "generate", start_s, start_s + 2.0),
            TimeSpan("rollout", "collect", start_s, start_s + 1.75),
            TimeSpan("driver", "update", start_s + 2.0, start_s + 3.0),
            TimeSpan("actor", "update", start_s + 2.125, start_s + 3.0),
        ],
    )


def write_rl_run(folder: Path, num_steps: int = 3, **settings: Any) -> Path:
    """Write a run of reinforcement learning that has ended, with samples of each step."""
    for step in range(1, num_steps + 1):
        write_samples(folder, step)
    write_run(folder, "rl", [build_rl_metrics(step) for step in range(1, num_steps + 1)])
    config = asdict(RLConfig())
    config["trainer"]["num_steps"] = num_steps
    write_json(folder / "config.json", config | settings)
    writer = TimelineWriter(folder)
    for step in range(1, num_steps + 1):
        writer.write(build_timeline(step))
    loads = ExpertLoadWriter(folder)
    for step in range(1, num_steps + 1):
        loads.write(ExpertLoad(step, "actor", [0, 2], [[3, 1, 0, 4], [2, 2, 2, 2]]))
    scores = {"accuracy": 0.25, "accuracy_stderr": 0.03}
    summary = {"evaluation": {"before": {"test": scores}}, "wall_s": 12.0}
    write_json(folder / "summary.json", summary)
    return folder


def write_samples(folder: Path, step: int) -> None:
    """Write two samples of a step; the first has a gap of 0.5 nats at its second token."""
    samples = [
        sample(
            f"{START}user\n2+{number}?{END}\n{ASSISTANT}",
            ("turn", f"{text}{END}"),
            group_id=number,
            reward=float(number),
            reward_parts={"format": 0.5},
            fields={"answer": "4"},
        )
        for number, text in enumerate((PLANTED, "is 4"))
    ]
    written(folder, step, trained(samples, {(0, 1): 0.5}))


def write_run(folder: Path, kind: str, rows: list[dict[str, float]]) -> Path:
    """Write settings and metrics of a run of any command."""
    folder.mkdir(parents=True, exist_ok=True)
    with MetricsLogger(TrackedRun(folder, "", {}), trackers=()) as logger:
        for step, row in enumerate(rows, 1):
            logger.write(step, row)
    write_json(folder / "config.json", asdict(_CONFIGS[kind]()))
    return folder


def write_eval_run(folder: Path) -> Path:
    """Write an evaluation of a set with two responses."""
    write_run(folder, "eval", [])
    (folder / "metrics.jsonl").unlink()
    write_json(folder / "config.json", asdict(EvalConfig()) | {"evaluated": {"model": "m"}})
    metrics = {"prompts": 1, "pass@1": {"mean": 0.5, "standard_error": 0.25}}
    write_json(folder / "summary.json", {"sets": {"math": metrics}, "wall_s": 3.0})
    columns = {
        "row": [0, 0], "number": [0, 1], "prompt": ["2+2?", "2+2?"], "response": ["4", PLANTED],
        "answer": ["4", "4"], "reward": [1.0, 0.0], "correct": [True, False],
        "finish_reason": ["stop", "stop"], "response_tokens": [1, 9], "reward_error": ["", ""],
    }  # fmt: skip
    (folder / "samples").mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "samples" / "math.parquet")
    return folder
