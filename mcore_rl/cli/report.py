"""mcore-rl report: what runs have measured, as one HTML page."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path

from mcore_rl.cli.options import Parser, write_option_file
from mcore_rl.config.checks import check_at_least, check_between
from mcore_rl.config.errors import ConfigError

_ABOUT = """\
Writes one HTML file with the plots, samples and settings of runs, side by side. It needs no network
and is smaller than 5 MB. With --live a server shows the page on this machine, and it follows the
runs."""
_PAGE = "report.html"


def main(arguments: list[str]) -> None:
    options = build_parser().parse_args(arguments)
    check_at_least("--samples", options.samples, 0)
    if options.port is not None:
        check_between("--port", options.port, 0, 65535)
    runs = [Path(run) for run in options.run]
    if options.trace is not None:
        _write_trace(runs, options)
        return
    if options.step is not None:
        raise ConfigError("--step is of --trace; allowed: both, or neither")
    from mcore_rl.tools.report.runs import read_runs

    if options.live:
        if options.output is not None:
            raise ConfigError("--live and --output exclude each other; allowed: one of them")
        from mcore_rl.tools.report.server import serve

        with suppress(KeyboardInterrupt):
            serve(runs, options.samples, options.port or 0, _print_address)
        return
    if options.port is not None:
        raise ConfigError("--port is of --live; allowed: both, or neither")
    path = options.output or runs[0] / _PAGE
    read = read_runs(runs)
    from mcore_rl.tools.report.page import build_page

    write_option_file(path, build_page(read, options.samples), "--output")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def _print_address(address: str) -> None:
    print(
        f"{address}\nCtrl-C ends it. From another machine: ssh -L PORT:127.0.0.1:PORT", flush=True
    )


def _write_trace(runs: list[Path], options: argparse.Namespace) -> None:
    if len(runs) != 1 or options.live or (options.output, options.port) != (None, None):
        raise ConfigError("--trace is of one RUN, without --live, --port and --output")
    from mcore_rl.observability.timeline import build_trace
    from mcore_rl.tools.report.runs import read_runs

    [run] = read_runs(runs)
    steps = [line for line in run.timeline if options.step in (None, line.step)]
    if not steps:
        known = sorted({line.step for line in run.timeline})
        hint = f"allowed: {', '.join(map(str, known))}" if known else "there is none"
        which = "" if options.step is None else f"--step={options.step}: "
        raise ConfigError(f"{which}{run.folder} has no timeline of it; {hint}")
    write_option_file(options.trace, json.dumps(build_trace(steps)), "--trace")
    print(f"{options.trace}: {len(steps)} steps; open it in ui.perfetto.dev or chrome://tracing")


def build_parser() -> Parser:
    parser = Parser(prog="mcore-rl report", description=_ABOUT)
    add = parser.add_argument
    add("run", metavar="RUN", nargs="+", help="the output_dir of a run, also while it goes on")
    add("--output", type=Path, metavar="FILE", help="default: report.html in the first RUN")
    about = "most samples of each run; fewer where the page would be larger than 5 MB; default: 64"
    add("--samples", type=int, default=64, metavar="N", help=about)
    add("--live", action="store_true", help="serve the page on 127.0.0.1; Ctrl-C ends it")
    add("--port", type=int, metavar="N", help="of --live; default: a free one")
    about = "write the timeline of steps for Perfetto (Trace Event Format) instead"
    add("--trace", type=Path, metavar="FILE", help=about)
    add("--step", type=int, metavar="N", help="of --trace; default: all that are recorded")
    return parser
