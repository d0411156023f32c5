"""mcore-rl plan simulate: a run of each loop with ranks that only take the predicted time."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.config.checks import check_at_least, check_choice
from mcore_rl.config.errors import ConfigError

if TYPE_CHECKING:
    from mcore_rl.tools.simulate.times import ResponseLengths, StepTimes

ABOUT = """\
Runs the loops of a job with simulated training ranks and servers: what each step takes, where time
is lost, staleness, queues, and CPU seconds of the driver. Needs no model, data or GPU. Controller,
data plane, server pool, sample buffer and loops are those of a job: docs/simulate.md."""
TRAINERS = ("sync", "one_step_off", "fully_async")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("settings", nargs="*", metavar="recipe=NAME|PATH|KEY=VALUE", help="as of mcore-rl rl")
    about = "loops to compare; default: all three, each with its default staleness"
    add("--trainers", nargs="+", default=list(TRAINERS), metavar="sync", help=about)
    add("--times", type=Path, metavar="FILE.yaml", help="seconds of each part, as StepTimes")
    about = "predict them for h100, h200, ... or a .yaml file; needs model.path"
    add("--hardware", metavar="NAME", help=about)
    about = "lognormal:MEDIAN:SIGMA, or a file with a number of tokens a line"
    add("--lengths", default="lognormal:1000:0.8", metavar="SPEC", help=about)
    add("--prompt-tokens", type=int, default=512, metavar="N", help="default: 512")
    add("--failures", type=float, default=0.0, metavar="X", help="of a server an hour; default: 0")
    add("--picture", type=Path, metavar="FILE.png", help="what was done when, as a picture")
    add("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Simulate the loops, print what they did, and return the exit status."""
    from mcore_rl.cli.compose import compose_config  # imports Hydra
    from mcore_rl.config.schema import RLConfig
    from mcore_rl.tools.simulate import report
    from mcore_rl.tools.simulate.run import open_simulation, prepare_config, simulate
    from mcore_rl.tools.simulate.times import (
        ResponseLengths,
        StepTimes,
        Workload,
        choose_tokens_per_entry,
    )

    check_at_least("--prompt-tokens", options.prompt_tokens, 1)
    check_at_least("--failures", options.failures, 0)
    for mode in options.trainers:
        check_choice("--trainers", mode, TRAINERS)
    if options.picture and not options.picture.parent.is_dir():  # known before minutes of work
        raise ConfigError(f"--picture={str(options.picture)!r}: its folder does not exist")
    if options.times and options.hardware:
        raise ConfigError("--times with --hardware, which predicts them; allowed: one")
    times = StepTimes.load(options.times) if options.times else StepTimes()
    lengths = ResponseLengths.parse(options.lengths)
    configs, times_of_mode = {}, {}
    for mode in options.trainers:
        settings = [*options.settings, f"trainer.mode={mode}"]
        configs[mode] = prepare_config(compose_config(RLConfig, settings))
        times_of_mode[mode] = _predict(options, settings, lengths) if options.hardware else times
    runs = {}
    with open_simulation():
        for mode, config in configs.items():
            workload = Workload(
                times_of_mode[mode], lengths, options.prompt_tokens,
                choose_tokens_per_entry(config), options.failures, config.seed,
            )  # fmt: skip
            runs[mode] = simulate(config, workload)
    if options.picture:
        report.plot_runs(options.picture, runs)
    if options.json:
        json.dump({mode: run.summarize() for mode, run in runs.items()}, sys.stdout, indent=1)
        print()
    else:
        report.print_runs(runs)
    return 0


def _predict(
    options: argparse.Namespace, settings: list[str], lengths: ResponseLengths
) -> StepTimes:
    from mcore_rl.cli.compose import compose_config
    from mcore_rl.cli.plan_time import count_sync_bytes, prepare_job
    from mcore_rl.config.schema import RLConfig
    from mcore_rl.planner.hardware import load_hardware
    from mcore_rl.tools.simulate.times import predict_times

    config = compose_config(RLConfig, settings)
    hardware = load_hardware(options.hardware)
    with prepare_job(config, hardware) as (prepared, model):
        assert isinstance(prepared, RLConfig)
        sync_bytes = count_sync_bytes(prepared, model, hardware)
        return predict_times(prepared, model, hardware, lengths, options.prompt_tokens, sync_bytes)
