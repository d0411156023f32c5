"""mcore-rl bench: weights and batches moved on this machine, and loops on a modelled one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

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
_ASYNC = """\
Runs the loops of trainer.mode on a long-tailed workload: sync, one_step_off and fully_async on a
pool of devices for the servers and one for the trainer, and sync and fully_async on all of these
devices by turns. The loops are those of a job. Servers and actor are modelled, and so is time:
responses have log-normal lengths, of median 1000 tokens and sigma 0.8, cut at 8192; a pool of
servers generates 512 of them at a time, at 50 tokens a second each; a pool of trainers finds
log-probs of 30,000 and trains on 10,000 tokens a second; a push takes 5 s. By turns both have twice
that, and servers fill the KV cache of unfinished responses again at 200,000 tokens a second. A step
is 64 prompts of 8 responses."""


def main(arguments: list[str]) -> None:
    """Run the benchmark that the arguments name, and print its results."""
    options = build_parser().parse_args(arguments)
    commands = {"reshard": _bench_reshard, "data-plane": _bench_data_plane, "async": _bench_async}
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


def _bench_async(options: argparse.Namespace) -> None:
    check_at_least("--steps", options.steps, 1)
    check_at_least("--staleness", options.staleness, 0)
    from mcore_rl.benchmarks import async_loops

    settings = async_loops.WorkloadSettings(options.steps, options.staleness)
    results = async_loops.bench_async(settings)
    if options.picture:
        async_loops.write_timeline(options.picture, results, options.picture_s)
    if options.json:
        _print_json(async_loops.build_json(settings, results))
    else:
        async_loops.print_results(settings, results)


def _print_json(report: object) -> None:
    json.dump(report, sys.stdout, indent=1)
    print()


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="mcore-rl bench", description="Benchmarks on this machine.")
    benchmarks = parser.add_subparsers(
        dest="command", required=True, metavar="reshard|data-plane|async"
    )
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
    add = benchmarks.add_parser("async", description=_ASYNC).add_argument
    add("--steps", type=int, default=20, help="of each loop; default: 20")
    add("--staleness", type=int, default=2, help="of fully_async; default: 2")
    add("--picture", type=Path, metavar="FILE.svg", help="what was done when, as a picture")
    add("--picture-s", type=float, default=1500.0, help="its modelled seconds; default: 1500")
    add("--json", action="store_true", help="print one JSON object")
    return parser
