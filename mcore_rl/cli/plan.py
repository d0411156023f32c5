"""mcore-rl plan: the bytes of a weight sync, and simulated runs, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mcore_rl.cli import plan_simulate
from mcore_rl.cli.options import AXES, FAMILY, SERVED_AXES, Parser, parse_layout
from mcore_rl.config.schema import Layout
from mcore_rl.reshard.layout import GenerationLayout

_ABOUT = """\
Bytes that each generation rank receives, the lower bound, the busiest links, and the bytes that
gather-then-slice would move between the same layouts. Needs no weights."""


def main(arguments: list[str]) -> None:
    options = build_parser().parse_args(arguments)
    if options.command == "simulate":
        return plan_simulate.run(options)
    train = parse_layout("--train", options.train, Layout)
    generate = parse_layout("--generate", options.generate, GenerationLayout)
    from mcore_rl.jobs.remote_paths import fetch_model
    from mcore_rl.models.base import use_family
    from mcore_rl.tools import plan_reshard

    use_family(options.family, "--family")
    cluster = plan_reshard.Cluster(
        options.gpus_per_node, options.nic_gbps, options.nvlink_gbps, options.nodes
    )
    model = Path(fetch_model("--model", options.model, with_weights=False))
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


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="mcore-rl plan", description="Cost estimates, without a GPU.")
    what = parser.add_subparsers(dest="command", required=True, metavar="reshard|simulate")
    plan_simulate.add_options(what.add_parser("simulate", description=plan_simulate.ABOUT))
    add = what.add_parser("reshard", description=_ABOUT).add_argument
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
    return parser
