"""mcore-rl data: files to train on, from published data sets and from built-in tasks."""

from __future__ import annotations

import argparse
from pathlib import Path

from mcore_rl.cli.options import Parser
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.publishers import PUBLISHERS
from mcore_rl.observability.process import wrap_command

_ABOUT = """\
Makes a parquet file that mcore-rl trains on, of the files that a publisher
ships: parquet, JSONL (.jsonl or .jsonl.gz), a folder of save_to_disk of Hugging
Face's datasets, or, as MATH once, a folder of JSON files. Several inputs are
read one after the other. Nothing is downloaded, and no file is overwritten."""
# Named as their recipes, where a published data set has the name of the task; what each teaches,
# and the share of worked examples that its recipe has.
_TASKS = {
    "last_digit": ("arithmetic in steps", 0.35),
    "toy_calculator": ("calls of a calculator", 0.45),
    "toy_countdown": ("another try after a wrong one", 0.35),
    "toy_code": ("programs that are mended", 0.4),
    "pictures": ("colours in pictures", 0.35),
}
_TASK_EXAMPLES = [f"{name} --output {name} --seed 7" for name in _TASKS]
_VERIFIERS = "verifiers"
_VERIFIERS_EXAMPLE = (
    f"{_VERIFIERS} --environment sums-v1 --folders tests/e2e/verifiers_environments "
    "--output tasks.parquet"
)


def main(arguments: list[str]) -> None:
    options = build_parser().parse_args(arguments)
    from mcore_rl.jobs import make_data  # slow to import: not for a wrong option

    if options.name == _VERIFIERS:
        _make_verifiers(options)
    elif options.name in _TASKS:
        task = options.name.removeprefix("toy_")
        make_data.make_task(task, options.output, options.seed, options.worked_share)
    else:
        instruction = getattr(options, "instruction", None)
        make_data.make_published(options.name, options.input, options.output, instruction)


def build_parser() -> Parser:
    examples = [f"{name} {publisher.example}" for name, publisher in PUBLISHERS.items()]
    parser = Parser(
        prog="mcore-rl data",
        description=_ABOUT,
        epilog=_format_examples(*examples, *_TASK_EXAMPLES, _VERIFIERS_EXAMPLE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, publisher in PUBLISHERS.items():
        add = _add_subcommand(
            subparsers, name, publisher.about, f"{name} {publisher.example}"
        ).add_argument
        add("--input", type=Path, nargs="+", required=True, metavar="FILE", help="as published")
        add("--output", type=Path, required=True, metavar="FILE", help="a new file, NAME.parquet")
        if publisher.instruction is not None:
            about = f"added to a question; default: {publisher.instruction or 'none'}"
            add("--instruction", metavar="TEXT", help=about)
    for (name, (lesson, share)), example in zip(_TASKS.items(), _TASK_EXAMPLES, strict=True):
        _add_task(subparsers, name, lesson, share, example)
    _add_verifiers(subparsers)
    return parser


def _add_task(
    subparsers: argparse._SubParsersAction[Parser],
    name: str,
    lesson: str,
    share: float,
    example: str,
) -> None:
    about = f"a built-in task, {lesson}: its prompts, examples and untrained model"
    add = _add_subcommand(subparsers, name, about, example).add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="a new or empty folder")
    add("--seed", type=int, default=0, metavar="N", help="of order, examples and model; default: 0")
    about = f"share of examples that show their work, or go about it well; default: {share}"
    add("--worked-share", type=float, default=share, metavar="SHARE", help=about)


def _make_verifiers(options: argparse.Namespace) -> None:
    from mcore_rl.agents.verifiers.process import VerifiersSettings
    from mcore_rl.jobs.make_verifiers import TaskRange, make_verifiers

    names = "args", "folders", "interpreter", "variables"
    given = {name: getattr(options, name) for name in names}
    known = {name: value for name, value in given.items() if value is not None}
    try:
        settings = VerifiersSettings(environment=options.environment, **known)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from error
    make_verifiers(settings, TaskRange(options.skip, options.limit), options.output)


def _add_verifiers(subparsers: argparse._SubParsersAction[Parser]) -> None:
    about = "the tasks of an environment of verifiers 0.4, for agent.loop=verifiers"
    add = _add_subcommand(subparsers, _VERIFIERS, about, _VERIFIERS_EXAMPLE).add_argument
    add("--environment", required=True, metavar="NAME", help="as agent.settings.environment")
    add("--args", metavar="JSON|FILE.toml", help="as agent.settings.args; say here which split")
    add("--folders", metavar="DIR[:DIR]", help="as agent.settings.folders")
    add("--interpreter", metavar="FILE", help="as agent.settings.interpreter")
    add("--variables", metavar="NAME[,NAME]", help="as agent.settings.variables")
    add("--skip", type=int, default=0, metavar="N", help="tasks left out at the start; default: 0")
    add("--limit", type=int, metavar="N", help="at most so many tasks; default: all")
    add("--output", type=Path, required=True, metavar="FILE", help="a new file, NAME.parquet")


def _add_subcommand(
    subparsers: argparse._SubParsersAction[Parser], name: str, about: str, example: str
) -> Parser:
    return subparsers.add_parser(
        name,
        help=about,
        description=about,
        epilog=_format_examples(example),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _format_examples(*examples: str) -> str:
    commands = [wrap_command(["mcore-rl", "data", *text.split()], "  ") for text in examples]
    return "\n".join(["examples:", *(line for lines in commands for line in lines)])
