"""Compare steps of the quickstart with a simulation of them.

    python benchmarks/simulated_quickstart.py [--rounds 6] [--output FILE] [KEY=VALUE ...]

One job takes steps of a quarter, of all and of three quarters of the prompts of `recipe=quickstart`
in turns, so that other load on the machine meets all of them. Steps of a quarter and of three
quarters give the times and lengths of a simulation, as `mcore-rl plan calibrate recipe=quickstart`;
those of all prompts are what it predicts, and are not read for it. Compared are the order of phases
and calls of each role, and medians of seconds. All groups are trained on, as simulated rewards are
coin flips.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.options import write_option_file
from mcore_rl.config.schema import RLConfig
from mcore_rl.jobs import rl
from mcore_rl.tools.simulate.measure import (
    PARTS,
    SmallStepsTrainer,
    build_measured_config,
    list_events,
    measure_phases,
    read_steps,
    summarize_steps,
)
from mcore_rl.tools.simulate.run import open_simulation, prepare_config, simulate
from mcore_rl.tools.simulate.times import Workload, choose_tokens_per_entry

MODE = "mcore_rl.benchmarks.simulated_quickstart:InterleavedTrainer"
_NUM_SIMULATED = 3  # steps


class InterleavedTrainer(SmallStepsTrainer):
    """Takes steps of all prompts, too."""

    shares: ClassVar[Sequence[float]] = (0.25, 1.0, 0.75)


def compare(settings: Sequence[str], num_rounds: int) -> dict[str, Any]:
    """Run a job and simulate its full steps; return the seconds of both, by part."""
    sizes = len(InterleavedTrainer.shares)
    settings = ["recipe=quickstart", *settings]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        config = build_measured_config(
            [*settings, f"trainer.num_steps={sizes * (1 + num_rounds)}"], MODE, folder
        )
        rl.run(config)
        # The first of each size warms up.
        steps = [step for step in read_steps(folder) if step.step > sizes]
    full = [step for step in steps if InterleavedTrainer.get_share(step.step) == 1.0]
    measured = summarize_steps([step for step in steps if step not in full], config)
    simulated = prepare_config(
        compose_config(
            RLConfig,
            [*settings, "algorithm.filter.group_filter=", f"trainer.num_steps={_NUM_SIMULATED}"],
        )
    )
    workload = Workload(
        measured.times, measured.lengths, measured.prompt_tokens, choose_tokens_per_entry(simulated)
    )
    with open_simulation():
        run = simulate(simulated, workload)
    timelines = [record.timeline for record in run.steps]
    predicted = [measure_phases(timeline) for timeline in timelines]
    seconds = {
        part: {
            "run_s": median(step.seconds[part] for step in full),
            "simulated_s": median(phases[part] for phases in predicted),
        }
        for part in PARTS
    } | {
        "step": {
            "run_s": median(step.step_s for step in full),
            "simulated_s": median(sum(phases.values()) for phases in predicted),
        }
    }
    for row in seconds.values():
        row["simulated/run"] = row["simulated_s"] / row["run_s"]
    return {
        "machine": f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}",
        "settings": settings,
        "rounds": num_rounds,
        "seconds": seconds,
        "run_step_s": [step.step_s for step in full],
        "has_same_events": all(
            dict(step.events) == list_events(timeline) for step in full for timeline in timelines
        ),
        "events": list_events(timelines[-1]),
        "events_of_run": full[-1].events,
        "times": asdict(measured.times),
        "prompt_tokens": measured.prompt_tokens,
        "response_tokens": sum(measured.lengths.measured) / len(measured.lengths.measured),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=6, help="of steps of each size")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write JSON, too")
    options = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):  # what the job prints
        comparison = compare(options.settings, options.rounds)
    text = json.dumps(comparison, indent=1) + "\n"
    if options.output:
        write_option_file(options.output, text, "--output")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
