"""mcore-rl convert: checkpoints between Hugging Face and Megatron, inspected and compared."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mcore_rl.cli.options import AXES, FAMILY, Parser, parse_layout
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.remote_paths import fetch_model

# Options that may name a model of a hub or at a URL, and their names in errors.
_MODELS = {"model": "--model", "reference": "--reference", "folder": "DIR", "a": "DIR", "b": "DIR"}


def main(arguments: list[str]) -> int:
    options = vars(build_parser().parse_args(arguments))
    command, family = options.pop("command"), options.pop("family")
    if "layout" in options:
        options["layout"] = parse_layout("--layout", options["layout"], Layout)
    if family and options.get("bridge"):
        raise ConfigError(f"--family with --bridge={options['bridge']}, which does not use it")
    from mcore_rl.models.base import use_family

    use_family(family, "--family")
    return _run(command, options)


def _run(command: str, options: dict[str, Any]) -> int:
    """Run a command; its module imports torch, so it is not imported for a wrong option."""
    for name, key in _MODELS.items():
        if options.get(name) is not None:
            options[name] = Path(fetch_model(key, options[name]))
    if command == "hf-to-mcore":
        from mcore_rl.jobs.convert.to_megatron import convert_folder

        convert_folder(**options)
    elif command == "mcore-to-hf":
        from mcore_rl.jobs.convert.to_hf import convert_checkpoint

        convert_checkpoint(**options)
    elif command == "inspect":
        from mcore_rl.jobs.convert.inspect import inspect_folder

        inspect_folder(options["folder"], is_json=options["json"])
    else:
        from mcore_rl.jobs.convert.verify import verify

        return 0 if verify(options["a"], options["b"], is_json=options["json"]) else 1
    return 0


def build_parser() -> Parser:
    parser = Parser(prog="mcore-rl convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    to_mcore = commands.add_parser("hf-to-mcore", help="Hugging Face to Megatron checkpoint")
    to_hf = commands.add_parser("mcore-to-hf", help="Megatron checkpoint to Hugging Face")
    inspect = commands.add_parser("inspect", help="show what a checkpoint folder contains")
    verify = commands.add_parser("verify", help="compare the weights of two folders")
    _add_model(to_mcore, "--model", "Hugging Face folder")
    add = to_mcore.add_argument
    add("--layout", default="", metavar="tp=2,ep=2", help=f"layout of the ranks: {AXES}")
    add("--dtype", metavar="float32|bfloat16", help="default: dtype of the weights")
    _add_folder(to_hf, "--checkpoint", "Megatron folder")
    _add_model(to_hf, "--reference", "Hugging Face folder of the same model", required=False)
    add = to_hf.add_argument
    add("--dtype", metavar="float32|bfloat16|fp8", help="default: dtype of the weights")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="default: 5GB")
    add("--lora", default="merge", metavar="merge|separate", help="default: merge")
    for command in (to_mcore, to_hf):
        _add_folder(command, "--output", "new or empty folder")
        command.add_argument("--workers", type=int, metavar="N", help="threads that convert")
        command.add_argument("--max-memory", metavar="SIZE", help="limit of the process")
        command.add_argument("--bridge", metavar="megatron-bridge", help="for other model families")
    inspect.add_argument("folder", metavar="DIR")
    verify.add_argument("a", metavar="DIR")
    verify.add_argument("b", metavar="DIR")
    for command in (to_mcore, to_hf, inspect, verify):
        command.add_argument("--family", default="", metavar="FILE:NAME", help=FAMILY)
    for command in (inspect, verify):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_model(
    parser: argparse.ArgumentParser, name: str, meaning: str, *, required: bool = True
) -> None:
    parser.add_argument(name, required=required, metavar="DIR", help=f"{meaning}, or hf:ORG/NAME")


def _add_folder(parser: argparse.ArgumentParser, name: str, meaning: str) -> None:
    parser.add_argument(name, type=Path, required=True, metavar="DIR", help=meaning)
