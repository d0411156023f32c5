"""mcore-rl bench reshard: how long a weight sync takes on this machine, beside alternatives."""

from __future__ import annotations

import argparse
import json
import sys

from mcore_rl.cli.options import AXES, SERVED_AXES, Parser, parse_layout
from mcore_rl.config.checks import at_least, positive
from mcore_rl.config.schema import Layout
from mcore_rl.reshard.layout import GenerationLayout

_ABOUT = """\
Runs a bfloat16 model with random weights on ranks of this machine over gloo. Compares our exchange
into vLLM's layout with gather-then-slice, and into another Megatron layout with Megatron's own
resharding with its gloo copy service."""


def main(arguments: list[str]) -> None:
    options = build_parser().parse_args(arguments)
    for name in ("layers", "bucket_mib", "repetitions"):
        at_least(f"--{name.replace('_', '-')}", getattr(options, name), 1)
    positive("--timeout", options.timeout)
    layouts = (
        parse_layout("--train", options.train, Layout),
        parse_layout("--generate", options.generate, GenerationLayout),
        parse_layout("--target", options.target, Layout),
    )
    from mcore_rl.tools import bench_reshard

    sizes = options.layers, options.bucket_mib << 20, options.repetitions, options.timeout
    report = bench_reshard.bench_reshard(bench_reshard.Settings(*layouts, *sizes))
    if options.json:
        json.dump(report.as_json(), sys.stdout, indent=1)
        print()
    else:
        bench_reshard.show(report)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="mcore-rl bench", description="Benchmarks on this machine.")
    what = parser.add_subparsers(dest="command", required=True, metavar="reshard")
    add = what.add_parser("reshard", description=_ABOUT).add_argument
    add("--train", default="tp=2,pp=2,ep=2", metavar="tp=2,ep=2", help=AXES)
    add("--generate", default="tp=4,ep=4", metavar="tp=4", help=SERVED_AXES)
    add("--target", default="tp=4,ep=4", metavar="tp=4", help="layout for Megatron's resharding")
    add("--layers", type=int, default=6, help="57 MB each; default: 6, 408 MB in all")
    add("--bucket-mib", type=int, default=8, help="a rank stages two of them; default: 8")
    add("--repetitions", type=int, default=7, help="of each candidate; default: 7")
    add("--timeout", type=float, default=3600.0, help="seconds in total; default: 3600")
    add("--json", action="store_true", help="print one JSON object")
    return parser
