"""mcore-rl samples: the trajectories of a run, in the terminal or as HTML."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.cli.options import Parser, write_option_file
from mcore_rl.config.checks import check_at_least, check_choice
from mcore_rl.config.errors import ConfigError

if TYPE_CHECKING:
    from mcore_rl.tools.samples.tables import Summary

_ABOUT = """\
Shows the trajectories that a run has kept: prompt, turns, tool calls and what answered them, which
tokens the policy chose, log-prob gaps, rewards and advantages. On a terminal they are in a pager
($PAGER, or less)."""
_SORTS = ("reward", "gap", "length")


def main(arguments: list[str]) -> None:
    options = build_parser().parse_args(arguments)
    if options.list and options.html:
        raise ConfigError("--list and --html exclude each other; allowed: one of them")
    if options.sort is not None:
        check_choice("--sort", options.sort, _SORTS)
    if options.num is not None:
        check_at_least("--num", options.num, 1)
    check_at_least("--mark-gap", options.mark_gap, 0)
    if options.html is not None and not options.html.absolute().parent.is_dir():
        raise ConfigError(f"--html={options.html}: there is no folder {options.html.parent}")
    from mcore_rl.tools.samples import output  # pyarrow and rich: not for a bad option
    from mcore_rl.tools.samples.page import TokenTexts, build_page, find_tokenizer
    from mcore_rl.tools.samples.tables import SORTS, SampleReader

    reader = SampleReader(options.run, options.evaluation)
    steps = reader.select_steps(options.step)
    summaries = [s for s in reader.read_summaries(steps) if _is_selected(s, options)]
    if not summaries:
        raise ConfigError(_explain_empty(options))
    if options.sort:
        summaries.sort(key=SORTS[options.sort], reverse=not options.reverse)
    elif options.reverse:
        summaries.reverse()
    summaries = summaries[: options.num]
    if options.list:
        with output.open_output() as console:
            output.print_list(console, summaries)
            if left_out := reader.count_left_out(steps):
                console.print(f"{left_out} samples of these steps are in no table: {_BOUNDS}")
        return
    run = Path(options.run)
    texts = TokenTexts(find_tokenizer(run, options.tokenizer))
    if options.html:
        page = build_page(summaries[0], texts, options.mark_gap, run)
        write_option_file(options.html, output.format_html(page), "--html")
        print(f"{options.html}: {page.title}")
        return
    pages = (build_page(summary, texts, options.mark_gap, run) for summary in summaries)
    first = next(pages)  # a fault shows before there is a pager
    with output.open_output() as console:
        output.print_page(console, first)
        for page in pages:
            output.print_page(console, page)


def _is_selected(summary: Summary, options: argparse.Namespace) -> bool:
    numbers = (options.group, summary.group), (options.trajectory, summary.trajectory)
    return all(choice is None or choice == number for choice, number in numbers)


def _explain_empty(options: argparse.Namespace) -> str:
    numbers = {"--group": options.group, "--trajectory": options.trajectory}
    given = " ".join(f"{name}={value}" for name, value in numbers.items() if value is not None)
    return (
        f"{given}: no trajectory of these steps; mcore-rl samples {options.run} --list shows them"
    )


def build_parser() -> Parser:
    parser = Parser(prog="mcore-rl samples", description=_ABOUT)
    add = parser.add_argument
    add("run", metavar="RUN", help="the output_dir of a run, also while it goes on")
    add("--step", default="", metavar="N", help="or 3-7, or all; default: the last one")
    add("--evaluation", default="", metavar="SET", help="samples of this held-out set instead")
    add("--group", type=int, metavar="G", help="trajectories of this prompt")
    add("--trajectory", type=int, metavar="T", help="those of this number in their group")
    about = "largest first; default: as they were generated"
    add("--sort", metavar="|".join(_SORTS), help=about)
    add("--reverse", action="store_true", help="the other way round")
    add("--num", type=int, metavar="N", help="the first N; default: all")
    add("--list", action="store_true", help="a line for each instead of its page")
    add("--html", type=Path, metavar="FILE", help="write the page of the first one as HTML")
    about = "mark tokens whose log-probs differ by so many nats; default: 0.1"
    add("--mark-gap", type=float, default=0.1, metavar="X", help=about)
    about = "tokenizer.json or a folder with it; default: that of the run"
    add("--tokenizer", type=Path, metavar="PATH", help=about)
    return parser


_BOUNDS = "sample_log.max_rows, sample_log.max_tokens"
