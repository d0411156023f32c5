"""The commands that run a job: mcore-rl rl, sft, dpo, rm and eval, with settings as key=value."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mcore_rl.cli import recipes
from mcore_rl.cli.options import Parser, print_text
from mcore_rl.config.checks import check_at_least, find_closest
from mcore_rl.config.describe import (
    Setting,
    SettingGroup,
    SettingRenamer,
    list_setting_groups,
    list_setting_names,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import list_warnings
from mcore_rl.config.rules_train import list_train_warnings
from mcore_rl.config.schema import (
    DPOConfig,
    EvalConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
    TrainConfig,
)
from mcore_rl.observability.process import exempt_imports_from_gc, get_start_time

SCHEMAS: dict[str, type] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rm": RMConfig,
    "eval": EvalConfig,
}
# Where the names of a setting are registered, by the last two parts of its key. Importing one of
# these modules imports torch.
_REGISTRIES: Mapping[str, tuple[str, str]] = {
    "algorithm.advantage": ("mcore_rl.algorithms.advantages", "ADVANTAGES"),
    "algorithm.kl_estimator": ("mcore_rl.algorithms.kl", "KL_ESTIMATORS"),
    "algorithm.loss": ("mcore_rl.algorithms.losses", "LOSSES"),
    "algorithm.loss_aggregation": ("mcore_rl.algorithms.aggregation", "AGGREGATIONS"),
    "curriculum.name": ("mcore_rl.algorithms.sample_choice", "CURRICULA"),
    "filter.group_filter": ("mcore_rl.algorithms.sample_choice", "GROUP_FILTERS"),
    "filter.keep_by": ("mcore_rl.algorithms.sample_choice", "CHOICES"),
    "loss": ("mcore_rl.algorithms.preference", "PREFERENCE_LOSSES"),
    "replay.priority": ("mcore_rl.algorithms.sample_choice", "PRIORITIES"),
    "reward.name": ("mcore_rl.rewards.registry", "get_registry"),
}
_RL_EXAMPLES = """\
  mcore-rl rl recipe=quickstart seed=7 trainer.num_steps=40
  mcore-rl rl recipe=mine.yaml --dry-run
  mcore-rl rl recipe=quickstart actor.layout.ep=1 --print-config > mine.yaml
  mcore-rl rl model.path=/models/Qwen3-0.6B data.train_file=train.parquet \\
      data.test_file=test.parquet actor.layout.tp=2 output_dir=outputs/mine
  mcore-rl rl --help actor.optimizer"""
_TRAIN_EXAMPLES = """\
  mcore-rl {0} model.path=/models/Qwen3-0.6B data.train_file=train.jsonl \\
      output_dir=outputs/mine
  mcore-rl {0} recipe=mine.yaml --dry-run
  mcore-rl {0} recipe=mine.yaml trainer.save_every=100 resume=auto
  torchrun --nproc-per-node 2 --no-python \\
      mcore-rl {0} recipe=mine.yaml engine.layout.dp=2
  mcore-rl {0} --help data"""
_EVAL_EXAMPLES = """\
  mcore-rl eval model.path=/models/Qwen3-0.6B data.sets.math=math.parquet \\
      reward.name=math rollout.n=16 output_dir=outputs/math
  mcore-rl eval model.path=outputs/mine data.sets.math=math.parquet \\
      data.sets.aime=aime.jsonl reward.name=math rollout.num_servers=8
  mcore-rl eval recipe=mine.yaml rollout.temperature=0 --dry-run
  mcore-rl eval --help scoring"""


@dataclass(frozen=True, slots=True)
class JobCommand:
    """`mcore-rl NAME`. Unless a job starts, none of the large libraries is imported."""

    name: str
    examples: str
    hint: str  # shown where no settings are given
    list_warnings: Callable[[Any], Iterator[str]]  # of settings
    dry_run: Callable[[Any, argparse.Namespace], None]
    run: Callable[[Any], None]
    has_recipes: bool = False  # built-in ones
    add_options: Callable[[Parser], None] = lambda parser: None

    def main(self, arguments: list[str]) -> None:
        parser, schema = self.build_parser(), SCHEMAS[self.name]
        _refuse_dashes(arguments, schema)
        options = parser.parse_args(arguments)
        words = options.settings
        if options.help:
            print_text(self._format_help(parser, [word for word in words if "=" not in word]))
            return
        if self.has_recipes and options.list_recipes:
            print_text("\n".join(recipes.list_descriptions()))
            return
        with exempt_imports_from_gc():
            from mcore_rl.cli.compose import compose_config, format_recipe  # imports Hydra

            config: Any = compose_config(schema, words)
        if options.print_config:
            line = shlex.join(["mcore-rl", self.name, *words])
            print_text(f"# {line}\n{format_recipe(config)}".rstrip())
            return
        if not words:
            raise ConfigError(f"no settings; {self.hint} mcore-rl {self.name} --help")
        for name in ("gpus_per_node", "num_nodes", "hardware", "ignore_memory"):
            if not options.dry_run and getattr(options, name, None) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is an option of --dry-run")
        for warning in self.list_warnings(config):
            print(f"mcore-rl {self.name}: warning: {warning}", file=sys.stderr)
        with exempt_imports_from_gc():
            from mcore_rl.jobs.early_checks import check_early  # imports pyarrow

            check_early(config, needs_data=not options.dry_run)
        if options.dry_run:
            self.dry_run(config, options)
        else:
            self.run(config)

    def build_parser(self) -> Parser:
        usage = f"mcore-rl {self.name} [recipe=NAME|PATH] [key=value ...] [OPTION]"
        parser = Parser(prog=f"mcore-rl {self.name}", usage=usage, add_help=False)
        add = parser.add_argument
        add("settings", nargs="*", help=argparse.SUPPRESS)
        about = "help; with a group such as model, only that"
        add("-h", "--help", action="store_true", help=about)
        add("--dry-run", action="store_true", help="check all inputs, show roles and layouts")
        self.add_options(parser)
        add("--print-config", action="store_true", help="print all settings as YAML, a recipe")
        if self.has_recipes:
            add("--list-recipes", action="store_true", help="list the built-in recipes")
        return parser

    def _format_help(self, parser: Parser, topics: Sequence[str]) -> str:
        """Return the whole page, or the settings of each topic: a group of settings, or one."""
        groups = list(list_setting_groups(SCHEMAS[self.name]()))
        if topics:
            return "\n".join(line for topic in topics for line in _describe_topic(groups, topic))
        parts = [parser.format_help().rstrip()]
        if self.has_recipes:
            lines = recipes.list_descriptions(indent=2)
            parts.append("\n".join(["recipes (or the path of your own):", *lines]))
        parts += [f"examples:\n{self.examples}", "settings and their defaults:"]
        return "\n\n".join([*parts, *("\n".join(_describe_group(group)) for group in groups)])


@contextmanager
def report_start() -> Iterator[None]:
    """Show that a job starts while its libraries are imported, which takes seconds."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0":
        with exempt_imports_from_gc():
            yield  # rank 0 of torchrun's shows it
        return
    from mcore_rl.observability.console import show_waiting  # rich: not for a completion

    with show_waiting("starting", since=get_start_time()), exempt_imports_from_gc():
        yield


def list_choices(setting: Setting) -> Sequence[str]:
    """Return the names that a setting may have. Import the registry that has them, if any."""
    if setting.kind == "bool":
        return ("true", "false")
    place = _REGISTRIES.get(".".join(setting.key.split(".")[-2:]))
    if place is None:
        return setting.choices
    module, name = place
    registry = getattr(importlib.import_module(module), name)
    names: list[str] = (registry() if callable(registry) else registry).names
    return names


def _refuse_dashes(arguments: Sequence[str], schema: type) -> None:
    known = list_setting_names(schema)
    for flag in (argument for argument in arguments if argument.startswith("-")):
        key = flag.lstrip("-").partition("=")[0]
        if key in known or key == "recipe":
            raise ConfigError(f"{flag}: settings have no dashes; use {key}=VALUE")


def _describe_topic(groups: Sequence[SettingGroup], topic: str) -> Iterator[str]:
    topic = SettingRenamer().rename_key(topic)
    inside = [g for g in groups if g.key == topic or g.key.startswith(f"{topic}.")]
    if inside:
        for group in inside:
            yield from (*_describe_group(group), "")
        return
    settings = {setting.key: setting for group in groups for setting in group.settings}
    if topic not in settings:
        names = [*(group.key for group in groups if group.key), *settings]
        hint = f"did you mean {' or '.join(find_closest(topic, names))}?"
        if not find_closest(topic, names):
            hint = f"allowed: {', '.join(name for name in names if '.' not in name)}"
        raise ConfigError(f"no setting and no group of settings is called {topic!r}; {hint}")
    setting = settings[topic]
    yield from _describe_setting(setting)
    if (names := [*list_choices(setting)]) and not setting.choices and setting.kind != "bool":
        yield from _wrap(f"one of: {', '.join(names)}, or an import path", "      ")


def _describe_group(group: SettingGroup) -> Iterator[str]:
    if group.about:
        yield from _wrap(" ".join(group.about.split()), "  ")
    for setting in group.settings:
        yield from _describe_setting(setting)


def _describe_setting(setting: Setting) -> Iterator[str]:
    yield from _wrap(f"{setting.key}={json.dumps(setting.default)}", "  ")
    allowed = f" ({setting.range})" if setting.range else ""
    yield from _wrap(f"{setting.meaning}{allowed}", "      ")


def _wrap(text: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, 100)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)


def _add_memory_options(parser: Parser) -> None:
    about = "with --dry-run: roles on such nodes and, of rl, what a weight sync moves"
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help=about)
    about = "with --gpus-per-node: how many nodes there are; prints which stay idle"
    parser.add_argument("--num-nodes", type=int, metavar="N", help=about)
    about = "with --dry-run: GPUs to fit, a name, file or gigabytes; of a cluster h100 by default"
    parser.add_argument("--hardware", metavar="h100", help=about)
    about = "with --dry-run: go on if the memory of a GPU does not suffice"
    parser.add_argument("--ignore-memory", action="store_true", default=None, help=about)


def _dry_run(config: RLConfig | TrainConfig, options: argparse.Namespace) -> None:
    if options.gpus_per_node is not None:
        check_at_least("--gpus-per-node", options.gpus_per_node, 1)
    if options.num_nodes is not None:
        check_at_least("--num-nodes", options.num_nodes, 1)
    from mcore_rl.planner import dry_run

    cluster = {
        "gpus_per_node": options.gpus_per_node,
        "num_nodes": options.num_nodes,
        "hardware": options.hardware,
        "ignores_memory": bool(options.ignore_memory),
    }
    if isinstance(config, RLConfig):
        dry_run.dry_run(config, **cluster)
    else:
        dry_run.dry_run_supervised(config, **cluster)


def _run_rl(config: RLConfig) -> None:
    with report_start():
        from mcore_rl.jobs import rl  # torch and Ray: bad settings should not wait for that

    rl.run(config)


def _run_train(config: TrainConfig) -> None:
    with report_start():
        from mcore_rl.jobs import supervised

    supervised.run(config)


def _dry_run_eval(config: EvalConfig, options: argparse.Namespace) -> None:
    from mcore_rl.planner.dry_run import dry_run_evaluation

    dry_run_evaluation(config)


def _run_eval(config: EvalConfig) -> None:
    with report_start():
        from mcore_rl.jobs import evaluate

    evaluate.run(config)


JOB_COMMANDS: dict[str, JobCommand] = {
    "rl": JobCommand(
        name="rl",
        examples=_RL_EXAMPLES,
        hint="try recipe=quickstart, or see",
        list_warnings=list_warnings,
        dry_run=_dry_run,
        run=_run_rl,
        has_recipes=True,
        add_options=_add_memory_options,
    ),
    "eval": JobCommand(
        name="eval",
        examples=_EVAL_EXAMPLES,
        hint="see",
        list_warnings=lambda config: iter(()),
        dry_run=_dry_run_eval,
        run=_run_eval,
    ),
}
for _name in ("sft", "dpo", "rm"):
    JOB_COMMANDS[_name] = JobCommand(
        name=_name,
        examples=_TRAIN_EXAMPLES.format(_name),
        hint="see",
        list_warnings=list_train_warnings,
        dry_run=_dry_run,
        run=_run_train,
        add_options=_add_memory_options,
    )
