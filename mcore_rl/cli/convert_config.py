"""mcore-rl convert-config: settings of a run of verl or TRL as a recipe.

verl: a launch script, which is read and not run, a YAML of settings, or key=value, which may follow
a file. TRL: a GRPOConfig, as JSON or YAML, or a Python file that calls it with literals.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import shlex
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import mcore_rl.cli.algorithm_converters  # noqa: F401  (registers its functions)
from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.launch_scripts import read_script
from mcore_rl.cli.options import Parser, print_text
from mcore_rl.cli.other_names import VERL_GROUP, find_row
from mcore_rl.cli.value_converters import CONVERTERS, DEFAULTS, Case, Unconvertible
from mcore_rl.config.describe import list_setting_groups
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.regular_file import read_regular
from mcore_rl.config.rules import validate_rl
from mcore_rl.config.schema import RLConfig

_MAX_FILE_BYTES = 1 << 20
_YAML = (".yaml", ".yml", ".json")
_MEGATRON = re.compile(r"^(actor|critic|ref)\.megatron\.")


def main(arguments: list[str]) -> int:
    options = build_parser().parse_args(arguments)
    print_text(convert_config(options.framework, options.source).rstrip())
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="mcore-rl convert-config", description=__doc__)
    add = parser.add_argument
    add("framework", choices=("verl", "trl"), metavar="verl|trl")
    add("source", nargs="+", metavar="FILE|KEY=VALUE", help="settings to convert")
    return parser


def convert_config(framework: str, words: Sequence[str]) -> str:
    """Return a recipe, with what has no counterpart in comments at its top.

    Raises:
        ConfigError: A file cannot be read, or has no settings of the framework.
    """
    conversion = _Conversion(framework)
    given = conversion.read(words)
    conversion.convert(given)
    return conversion.format(shlex.join(["mcore-rl", "convert-config", framework, *words]))


class _Conversion:
    """Our settings in place of a framework's, and what somebody has to look at."""

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.settings: dict[str, Any] = {}
        self.dropped: dict[str, list[str]] = {}  # settings without a counterpart, by the reason
        self.remarks: dict[str, None] = {}  # in order, each once

    # Reading

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the settings that files and key=value give, by the names of the table."""
        given: dict[str, Any] = {}
        for word in words:
            if "=" in word and not Path(word).exists():
                given |= self._read_override(word)
            elif word.endswith(_YAML):
                given |= dict(_list_leaves(_read_yaml(word)))
            elif self.framework == "verl":
                given |= self._read_script(word)
            else:
                given |= self._read_python(word)
        given = {name.removeprefix(f"{VERL_GROUP}."): value for name, value in given.items()}
        if not any(find_row(self.framework, name) for name in given):
            names = "a setting of verl" if self.framework == "verl" else "a field of GRPOConfig"
            raise ConfigError(f"{' '.join(words)[:200]!r} has not one setting; allowed: {names}")
        if self.framework == "verl":
            engine = "megatron" if any(map(_MEGATRON.search, given)) else "fsdp"
            given.setdefault("actor.strategy", given.pop("model_engine", engine))
        return given

    def _read_override(self, word: str) -> dict[str, Any]:
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        key, _, text = word.lstrip("+").partition("=")
        try:
            override = OverridesParser.create().parse_override(f"{key}={text}")
        except HydraException:  # text that Hydra's grammar does not know
            return {key: text}
        value = override.value()
        return dict(_list_leaves({key: value}))

    def _read_script(self, file: str) -> dict[str, Any]:
        script = read_script(_read_text(file), file)
        self.remarks |= dict.fromkeys(script.remarks)
        given: dict[str, Any] = {}
        for word in script.arguments:
            if word.startswith("--config-name") and "megatron" in word:
                given["actor.strategy"] = "megatron"
            if "=" in word and not word.startswith(("-", "~")):
                given |= self._read_override(word)
        return given

    def _read_python(self, file: str) -> dict[str, Any]:
        """Return the literal arguments of the first call of a class named ...Config."""
        try:
            tree = ast.parse(_read_text(file))
        except SyntaxError as error:
            raise ConfigError(f"{file} is no Python: line {error.lineno}: {error.msg}") from error
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        named = (call for call in calls if ast.unparse(call.func).endswith("GRPOConfig"))
        if (call := next(named, None)) is None:
            raise ConfigError(f"{file} calls no GRPOConfig; allowed: a file that does")
        given: dict[str, Any] = {}
        for keyword in call.keywords:
            try:
                given[str(keyword.arg)] = ast.literal_eval(keyword.value)
            except ValueError:
                shown = f"{keyword.arg or '**'}={ast.unparse(keyword.value)}"
                self.remarks[f"{shown} is computed; set it yourself"] = None
        return given

    # Converting

    def convert(self, given: Mapping[str, Any]) -> None:
        """Convert the framework's defaults where they are not ours, then what is given."""
        defaults = DEFAULTS[self.framework]
        for name in defaults.keys() - given.keys():
            self._convert_setting(name, defaults[name], given, is_given=False)
        by_default = dict(self.settings)
        for name, value in given.items():
            self._convert_setting(name, value, given, is_given=True)
        schema = {s.key: s.default for g in list_setting_groups(RLConfig()) for s in g.settings}
        for key in by_default.keys() & schema.keys():
            if self.settings[key] == schema[key]:
                del self.settings[key]

    def _convert_setting(
        self, name: str, value: Any, given: Mapping[str, Any], *, is_given: bool
    ) -> None:
        row = find_row(self.framework, name)
        if (
            row is None
            or row.converter == "dropped"
            or not (row.our_names or row.converter != "same")
        ):
            reason = row.note if row else "not in docs/from_verl_and_trl.md"
            if is_given:
                self.dropped.setdefault(reason, []).append(f"{name}={value}")
            return
        remarks: list[str] = []
        case = Case(self.framework, name, value, row.our_names, given, remarks)
        try:
            self.settings |= CONVERTERS[row.converter](case)
        except Unconvertible as error:
            remarks.append(f"{name}={value}: {error}")
        except (TypeError, ValueError) as error:
            remarks.append(f"{name}={value} is of another kind than expected: {error}")
        self.remarks |= dict.fromkeys(remarks)

    # Printing

    def format(self, command: str) -> str:
        nested = _nest(self.settings)
        if problem := _find_problem(nested):
            self.remarks[problem] = None
        lines = [command]
        if self.remarks:
            lines += ["", "Look at:", *(f"- {remark}" for remark in self.remarks)]
        if self.dropped:
            lines += ["", "Without a counterpart:"]
            lines += [f"- {', '.join(names)}: {why}" for why, names in self.dropped.items()]
        comments = [
            part
            for line in lines
            for part in textwrap.wrap(line, 98, subsequent_indent="  ", break_on_hyphens=False)
            or [""]
        ]
        text: str = yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)
        return "".join(f"# {line}".rstrip() + "\n" for line in comments) + text


def _nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as a recipe has them, in the order of the schema."""
    groups = list(list_setting_groups(RLConfig()))
    order = {s.key: place for place, s in enumerate(s for g in groups for s in g.settings)}
    nested: dict[str, Any] = {}

    def find_place(key: str) -> int:
        return order[key] if key in order else find_place(key.rpartition(".")[0])  # of a mapping

    for key in sorted(settings, key=find_place):
        *path, name = key.split(".")
        group = nested
        for part in path:
            group = group.setdefault(part, {})
        group[name] = settings[key]
    return nested


def _find_problem(nested: Mapping[str, Any]) -> str:
    """Compose the recipe; return what a rule between its settings refuses, or "".

    Raises:
        ConfigError: A value that is no value of its setting.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(nested, allow_unicode=True))
        try:
            validate_rl(compose_config(RLConfig, [f"recipe={path}"]), needs_data=False)
        except ConfigError as error:
            return str(error).removeprefix(f"{path}: ")
    return ""


def _list_leaves(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of nested settings."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _list_leaves(value, f"{key}.")
        else:
            yield key, value


def _read_text(file: str) -> str:
    try:
        return read_regular(Path(file), _MAX_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"{file!r} cannot be read: {error.strerror or error}") from error


def _read_yaml(file: str) -> Mapping[str, Any]:
    try:
        # OmegaConf reads 1e-6 as a number, as verl and TRL do; PyYAML alone does not.
        settings = OmegaConf.to_container(OmegaConf.load(io.StringIO(_read_text(file))))
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{file} is not valid YAML: {reason}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} has no settings; allowed: key: value, one a line")
    return cast(Mapping[str, Any], settings)
