"""What commands have in common whose settings are key=value: help, printed settings, a dry run."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mcore_rl.cli import recipes
from mcore_rl.cli.options import Parser, closest, show
from mcore_rl.config.describe import Setting, SettingGroup, groups, setting_names
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.eval_schema import EvalConfig
from mcore_rl.config.schema import RLConfig
from mcore_rl.config.train_schema import DPOConfig, RMConfig, SFTConfig
from mcore_rl.observability.start import began

SCHEMAS: dict[str, type] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rm": RMConfig,
    "eval": EvalConfig,
}


@dataclass(frozen=True, slots=True)
class JobCommand:
    """`mcore-rl NAME`. What starts nothing imports none of the large libraries."""

    name: str
    examples: str
    hint: str  # for who gives no settings
    warnings: Callable[[Any], Iterator[str]]  # of settings
    dry_run: Callable[[Any, argparse.Namespace], None]
    run: Callable[[Any], None]
    has_recipes: bool = False  # built-in ones
    add_options: Callable[[Parser], None] = lambda parser: None

    def main(self, arguments: list[str]) -> None:
        flags = [argument for argument in arguments if argument.startswith("-")]
        words = [argument for argument in arguments if not argument.startswith("-")]
        parser, schema = self.build_parser(), SCHEMAS[self.name]
        _refuse_settings(flags, schema)
        options = parser.parse_args(flags)
        if options.help:
            show(self._help(parser, [word for word in words if "=" not in word]))
            return
        if self.has_recipes and options.list_recipes:
            show("\n".join(recipes.listing()))
            return
        from mcore_rl.cli.compose import as_recipe, compose_config  # imports Hydra

        config: Any = compose_config(schema, words)
        if options.print_config:
            line = shlex.join(["mcore-rl", self.name, *words])
            show(f"# {line}\n{as_recipe(config)}".rstrip())
            return
        if not words:
            raise ConfigError(f"no settings; {self.hint} mcore-rl {self.name} --help")
        for name in ("gpus_per_node", "num_nodes"):
            if not options.dry_run and getattr(options, name, None) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is an option of --dry-run")
        for warning in self.warnings(config):
            print(f"mcore-rl {self.name}: warning: {warning}", file=sys.stderr)
        if options.dry_run:
            self.dry_run(config, options)
        else:
            self.run(config)

    def build_parser(self) -> Parser:
        usage = f"mcore-rl {self.name} [recipe=NAME|PATH] [key=value ...] [OPTION]"
        parser = Parser(prog=f"mcore-rl {self.name}", usage=usage, add_help=False)
        add = parser.add_argument
        about = "help; with a group such as model, only that"
        add("-h", "--help", action="store_true", help=about)
        add("--dry-run", action="store_true", help="check all inputs, show roles and layouts")
        self.add_options(parser)
        add("--print-config", action="store_true", help="print all settings as YAML, a recipe")
        if self.has_recipes:
            add("--list-recipes", action="store_true", help="list the built-in recipes")
        return parser

    def _help(self, parser: Parser, topics: Sequence[str]) -> str:
        """The whole page, or of each topic (a group of settings, or one) its settings."""
        found = list(groups(SCHEMAS[self.name]()))
        if topics:
            return "\n".join(line for topic in topics for line in _topic(found, topic))
        parts = [parser.format_help().rstrip()]
        if self.has_recipes:
            lines = recipes.listing(indent=2)
            parts.append("\n".join(["recipes (or the path of your own):", *lines]))
        parts += [f"examples:\n{self.examples}", "settings and their defaults:"]
        return "\n\n".join([*parts, *("\n".join(_described(group)) for group in found)])


@contextmanager
def starting() -> Iterator[None]:
    """Says that a job starts, while its libraries are imported: that takes seconds."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0":
        yield  # rank 0 of torchrun's says it
        return
    from mcore_rl.observability.console import waiting  # rich: not for a completion

    with waiting("starting", since=began()):
        yield


def _refuse_settings(flags: Sequence[str], schema: type) -> None:
    known = setting_names(schema)
    for flag in flags:
        key = flag.lstrip("-").partition("=")[0]
        if key in known or key == "recipe":
            raise ConfigError(f"{flag}: settings have no dashes; use {key}=VALUE")


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
    yield from _wrapped(f"{setting.key}={json.dumps(setting.default)}", "  ")
    yield from _wrapped(setting.meaning, "      ")


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, 100)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
