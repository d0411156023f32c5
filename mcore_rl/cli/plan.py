"""mcore-rl plan: what a run moves, whether it fits and how long it takes, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.cli import plan_simulate, plan_time
from mcore_rl.cli.options import AXES, FAMILY, SERVED_AXES, Parser, parse_layout
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.reshard.layout import GenerationLayout

_ABOUT_RESHARD = """\
Bytes that each generation rank receives, the lower bound, the busiest links, and the bytes that
gather-then-slice would move between the same layouts. Needs no weights."""
_ABOUT_MEMORY = """\
Memory of each rank of a job, by kind and by moment of a step, and of hosts. With --hardware:
whether it fits, and settings that make it fit; the exit status is 1 if it does not. Needs the
model's config.json alone. Takes the settings of mcore-rl rl, or of --job."""


@dataclass(frozen=True, slots=True)
class PlanCommand:
    """`mcore-rl plan NAME`."""

    about: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: list[str]) -> int:
    options = build_parser().parse_args(arguments)
    return PLAN_COMMANDS[options.command].run(options)


def build_parser() -> Parser:
    parser = Parser(prog="mcore-rl plan", description="Plans of a run, without a GPU.")
    names = "|".join(PLAN_COMMANDS)
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)
    for name, command in PLAN_COMMANDS.items():
        command.add_options(commands.add_parser(name, description=command.about))
    return parser


class _OldName(argparse.Action):
    """An option under the name that it had in the last release."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        new_name = f"--{self.dest.replace('_', '-')}"
        print(f"{option_string} is now {new_name}", file=sys.stderr)
        setattr(namespace, self.dest, values)


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    plan_time.add_job_options(parser)
    add("--hardware", metavar="h100", help="name, file, or gigabytes of a GPU; prints a verdict")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="default: 8")
    about = "tokens of the fullest rank's experts over the mean; default: 1.5"
    add("--imbalance", type=float, default=1.5, metavar="X", help=about)
    about = "sequences of a server at once; default: those of a step"
    add("--concurrency", type=int, default=0, metavar="N", help=about)
    add("--length", type=int, default=0, metavar="N", help="their tokens; default: the longest")
    about = "cuda or cpu; default: the device of --hardware, or cuda"
    add("--device-type", metavar="cuda", help=about)
    add("--lane", dest="device_type", action=_OldName, help=argparse.SUPPRESS)
    add("--json", action="store_true", help="print one JSON object")


def _plan_memory(options: argparse.Namespace) -> int:
    from mcore_rl.config.checks import check_choice
    from mcore_rl.inference.registry import check_server_settings
    from mcore_rl.planner.hardware import DEVICES
    from mcore_rl.planner.memory import Conditions, MemoryLimit
    from mcore_rl.planner.report import build_memory_json, print_memory, print_verdict

    device = None if options.hardware is None else MemoryLimit.parse(options.hardware)
    device_type = options.device_type or (device.device_type if device else "cuda")
    check_choice("--device-type", device_type, DEVICES)
    if device is not None and device_type != device.device_type:
        raise ConfigError(
            f"--device-type={device_type!r}: the device of --hardware={options.hardware!r} is "
            f"{device.device_type!r}; allowed: that, or no --device-type"
        )
    conditions = Conditions(
        device_type,
        options.imbalance,
        options.concurrency,
        options.length,
        options.gpus_per_node,
    )
    config = plan_time.compose_job(options)
    from mcore_rl.planner.memory_check import check_memory, prepare_plan

    with prepare_plan(config, device_type) as (prepared, model):
        # CUDA graphs are planned by rollout.engine.
        if isinstance(prepared, RLConfig) and prepared.rollout.engine:
            check_server_settings(prepared.rollout, device=device_type)
        check = check_memory(prepared, model, conditions, device)
    if options.json:
        report = build_memory_json(check.plan, conditions, device, check.fixes)
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        if device is not None:
            print_verdict(check.plan, device, check.fixes)
        print_memory(check.plan, conditions)
    return 0 if check.fits else 1


def _add_reshard_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder, hf:ORG/NAME, or a config.json")
    add("--mode", default="colocated", help="colocated (the default) or disaggregated")
    add("--train", required=True, metavar="tp=2,ep=8", help=AXES)
    add("--generate", required=True, metavar="tp=8", help=SERVED_AXES)
    add("--quantization", metavar="fp8_block", help="as rollout.quantization; default: bfloat16")
    add("--family", default="", metavar="FILE:NAME", help=FAMILY)
    add("--nodes", type=int, help="default: as many as the ranks need")
    add("--gpus-per-node", type=int, default=8)
    add("--nic-gbps", type=float, default=400.0, help="gigabits per second of a GPU; default: 400")
    add("--nvlink-gbps", type=float, default=3600.0, help="the same inside a node; default: 3600")
    add("--plot", type=Path, metavar="PNG", help="heatmap of the traffic between ranks")
    add("--json", action="store_true", help="print one JSON object")


def _plan_reshard(options: argparse.Namespace) -> int:
    train = parse_layout("--train", options.train, Layout)
    generate = parse_layout("--generate", options.generate, GenerationLayout)
    from mcore_rl.jobs.remote_paths import fetch_model
    from mcore_rl.models.base import scope_family
    from mcore_rl.tools import plan_reshard

    cluster = plan_reshard.Cluster(
        options.gpus_per_node, options.nic_gbps, options.nvlink_gbps, options.nodes
    )
    model = Path(fetch_model("--model", options.model, with_weights=False))
    with scope_family(options.family, "--family"):
        report, traffic = plan_reshard.plan_reshard(
            model, options.mode, train, generate, cluster, quantization=options.quantization
        )
    if options.plot:
        from mcore_rl.observability.plots import plot_traffic

        plot_traffic(options.plot, traffic)
    if options.json:
        json.dump(report.to_json(), sys.stdout, indent=1)
        print()
    else:
        plan_reshard.print_report(report)
    return 0


PLAN_COMMANDS = {
    "reshard": PlanCommand(_ABOUT_RESHARD, _add_reshard_options, _plan_reshard),
    "memory": PlanCommand(_ABOUT_MEMORY, _add_memory_options, _plan_memory),
    "step": PlanCommand(plan_time.ABOUT_STEP, plan_time.add_step_options, plan_time.run_step),
    "layout": PlanCommand(
        plan_time.ABOUT_LAYOUT, plan_time.add_layout_options, plan_time.run_layout
    ),
    "calibrate": PlanCommand(
        plan_time.ABOUT_CALIBRATE, plan_time.add_calibrate_options, plan_time.run_calibrate
    ),
    "simulate": PlanCommand(plan_simulate.ABOUT, plan_simulate.add_options, plan_simulate.run),
}
