"""mcore-rl bench: weights and batches moved between processes of this machine."""

from __future__ import annotations

import argparse
import json
import sys

from mcore_rl.cli.options import AXES, SERVED_AXES, Parser, parse_layout
from mcore_rl.config.checks import check_at_least, check_positive
from mcore_rl.config.schema import Layout
from mcore_rl.reshard.layout import GenerationLayout

_RESHARD = """\
Runs a bfloat16 model with random weights on ranks of this machine over gloo. Compares our exchange
into vLLM's layout with gather-then-slice, and into another Megatron layout with Megatron's own
resharding with its gloo copy service."""
_DATA_PLANE = """\
Times a batch from the ranks of one worker group to those of another, which write a column that goes
back: by reference, by value through the driver, with bare Ray and, where it can be imported, with
TransferQueue. Then looks at memory before and after many small steps."""


def main(arguments: list[str]) -> None:
    """Run the benchmark that the arguments name, and print its results."""
    options = build_parser().parse_args(arguments)
    commands = {"reshard": _bench_reshard, "data-plane": _bench_data_plane}
    commands[options.command](options)


def _bench_reshard(options: argparse.Namespace) -> None:
    for name in ("layers", "bucket_mib", "repetitions"):
        check_at_least(f"--{name.replace('_', '-')}", getattr(options, name), 1)
    check_positive("--timeout", options.timeout)
    layouts = (
        parse_layout("--train", options.train, Layout),
        parse_layout("--generate", options.generate, GenerationLayout),
        parse_layout("--target", options.target, Layout),
    )
    from mcore_rl.benchmarks import reshard

    sizes = options.layers, options.bucket_mib << 20, options.repetitions, options.timeout
    report = reshard.bench_reshard(reshard.ReshardSettings(*layouts, *sizes))
    if options.json:
        _print_json(report.to_json())
    else:
        reshard.print_report(report)


def _bench_data_plane(options: argparse.Namespace) -> None:
    sizes = ("ranks", "samples", "tokens", "repetitions", "steps", "small_samples")
    for name in sizes:
        check_at_least(f"--{name.replace('_', '-')}", getattr(options, name), 1)
    from mcore_rl.benchmarks import data_plane

    given = {name: getattr(options, name) for name in sizes}
    settings = data_plane.DataPlaneSettings(**given)
    report = data_plane.bench_data_plane(settings)
    if options.json:
        _print_json(report.to_json())
    else:
        data_plane.print_report(report)


def _print_json(report: object) -> None:
    json.dump(report, sys.stdout, indent=1)
    print()


def build_parser() -> Parser:
    parser = Parser(prog="mcore-rl bench", description="Benchmarks on this machine.")
    benchmarks = parser.add_subparsers(dest="command", required=True, metavar="reshard|data-plane")
    add = benchmarks.add_parser("reshard", description=_RESHARD).add_argument
    add("--train", default="tp=2,pp=2,ep=2", metavar="tp=2,ep=2", help=AXES)
    add("--generate", default="tp=4,ep=4", metavar="tp=4", help=SERVED_AXES)
    add("--target", default="tp=4,ep=4", metavar="tp=4", help="layout for Megatron's resharding")
    add("--layers", type=int, default=6, help="57 MB each; default: 6, 408 MB in all")
    add("--bucket-mib", type=int, default=8, help="a rank stages two of them; default: 8")
    add("--repetitions", type=int, default=7, help="of each candidate; default: 7")
    add("--timeout", type=float, default=3600.0, help="seconds in total; default: 3600")
    add("--json", action="store_true", help="print one JSON object")
    add = benchmarks.add_parser("data-plane", description=_DATA_PLANE).add_argument
    add("--ranks", type=int, default=1, help="of either group; default: 1")
    add("--samples", type=int, default=512, help="default: 512")
    add("--tokens", type=int, default=3900, help="a response, on average; default: 3900, 75 MB")
    add("--repetitions", type=int, default=11, help="of each candidate; default: 11")
    add("--steps", type=int, default=5000, help="small ones; default: 5000")
    add("--small-samples", type=int, default=64, help="of a small step; default: 64")
    add("--json", action="store_true", help="print one JSON object")
    return parser
