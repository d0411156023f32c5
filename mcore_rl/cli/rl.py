"""mcore-rl rl: a run with settings from a recipe and key=value overrides; or its dry run."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from mcore_rl.cli import recipes
from mcore_rl.cli.options import Parser, closest, show
from mcore_rl.config.checks import at_least
from mcore_rl.config.describe import Setting, SettingGroup, groups, setting_names
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.config.warnings import warnings_of

_USAGE = "mcore-rl rl [recipe=NAME|PATH] [key=value ...] [OPTION]"
EXAMPLES = """\
  mcore-rl rl recipe=quickstart seed=7 trainer.num_steps=40
  mcore-rl rl recipe=mine.yaml --dry-run
  mcore-rl rl recipe=quickstart actor.layout.ep=1 --print-config > mine.yaml
  mcore-rl rl model.path=/models/Qwen3-0.6B data.train_file=train.parquet \\
      data.test_file=test.parquet actor.layout.tp=2 output_dir=outputs/mine
  mcore-rl rl --help actor.optimizer"""


def main(arguments: list[str]) -> None:
    flags = [argument for argument in arguments if argument.startswith("-")]
    words = [argument for argument in arguments if not argument.startswith("-")]
    parser = build_parser()
    _refuse_settings(flags)
    options = parser.parse_args(flags)
    if options.help:
        show(_help(parser, [word for word in words if "=" not in word]))
        return
    if options.list_recipes:
        show("\n".join(recipes.listing()))
        return
    from mcore_rl.cli.compose import as_recipe, compose_config  # imports Hydra

    config = compose_config(RLConfig, words)
    if options.print_config:
        show(f"# {shlex.join(['mcore-rl', 'rl', *words])}\n{as_recipe(config)}".rstrip())
        return
    if not words:
        raise ConfigError("no settings; try recipe=quickstart, or see mcore-rl rl --help")
    if options.gpus_per_node is not None:
        if not options.dry_run:
            raise ConfigError("--gpus-per-node is an option of --dry-run")
        at_least("--gpus-per-node", options.gpus_per_node, 1)
    for warning in warnings_of(config):
        print(f"mcore-rl rl: warning: {warning}", file=sys.stderr)
    if options.dry_run:
        from mcore_rl.jobs.dry_run import dry_run

        dry_run(config, gpus_per_node=options.gpus_per_node)
        return
    from mcore_rl.jobs import rl  # torch and Ray: bad settings should not wait for that

    rl.run(config)


def build_parser() -> Parser:
    parser = Parser(prog="mcore-rl rl", usage=_USAGE, add_help=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="help; with a group such as actor, only that")
    add("--dry-run", action="store_true", help="check all inputs, show roles and layouts")
    about = "with --dry-run: roles on such nodes, and what the weight sync moves, as in =8"
    add("--gpus-per-node", type=int, metavar="N", help=about)
    add("--print-config", action="store_true", help="print all settings as YAML, a valid recipe")
    add("--list-recipes", action="store_true", help="list the built-in recipes")
    return parser


def _refuse_settings(flags: Sequence[str]) -> None:
    known = setting_names(RLConfig)
    for flag in flags:
        key = flag.lstrip("-").partition("=")[0]
        if key in known or key == "recipe":
            raise ConfigError(f"{flag}: settings have no dashes; use {key}=VALUE")


def _help(parser: Parser, topics: Sequence[str]) -> str:
    """The whole page, or of each topic (a group of settings, or one) its settings."""
    found = list(groups(RLConfig()))
    if topics:
        return "\n".join(line for topic in topics for line in _topic(found, topic))
    recipe_lines = [f"  {line}" for line in recipes.listing()]
    parts = [
        parser.format_help().rstrip(),
        "\n".join(["recipes (or the path of your own):", *recipe_lines]),
        f"examples:\n{EXAMPLES}",
        "settings and their defaults:",
        *("\n".join(_described(group)) for group in found),
    ]
    return "\n\n".join(parts)


def _topic(found: Sequence[SettingGroup], topic: str) -> Iterator[str]:
    inside = [g for g in found if g.key == topic or g.key.startswith(f"{topic}.")]
    if inside:
        for group in inside:
            yield from (*_described(group), "")
        return
    settings = {s.key: s for group in found for s in group.settings}
    if topic not in settings:
        names = [*(group.key for group in found if group.key), *settings]
        hint = f"did you mean {' or '.join(closest(topic, names))}?"
        if not closest(topic, names):
            hint = f"allowed: {', '.join(name for name in names if '.' not in name)}"
        raise ConfigError(f"no setting and no group of settings is called {topic!r}; {hint}")
    yield from _lines(settings[topic])


def _described(group: SettingGroup) -> Iterator[str]:
    if group.about:
        yield from _wrapped(" ".join(group.about.split()), "  ")
    for setting in group.settings:
        yield from _lines(setting)


def _lines(setting: Setting) -> Iterator[str]:
    yield f"  {setting.key}={json.dumps(setting.default)}"
    yield from _wrapped(setting.meaning, "      ")


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, 100)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
