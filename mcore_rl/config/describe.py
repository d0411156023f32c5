"""Descriptions of settings: default, comment, limits, and names that they had before."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from mcore_rl.config import schema
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.limits import OneOf, Range, list_limits, read_hints

# Settings of the default functions, by the key under which they are given. Those of others are
# beside the functions, and in docs/algorithms.md.
FUNCTION_SETTINGS: Mapping[str, Sequence[type]] = {
    "algorithm.advantage_settings": (schema.GRPOSettings,),
    "algorithm.loss_settings": (schema.PPOClipSettings,),
}

# Names that settings had before, by the same group. They work for one release, with a warning.
RENAMED: Mapping[str, str] = {
    "algorithm.kl_in": "algorithm.kl_placement",
    "algorithm.samples": "algorithm.filter",
    "samples": "sample_log",
    "trainer.asynchronous.over_issue": "trainer.asynchronous.oversampling",
}
_REFERENCE = re.compile(r"(?<!\\)\$\{([\w.]+)\}")  # to another setting, in a text


@dataclass
class SettingRenamer:
    """Replaces old names of settings by current ones, and records which were used.

    >>> SettingRenamer().rename_key("algorithm.samples.max_rounds")
    'algorithm.filter.max_rounds'
    """

    names: Mapping[str, str] = field(default_factory=lambda: RENAMED)
    used: dict[str, str] = field(default_factory=dict)  # old names that were found, current ones

    def rename_key(self, key: str) -> str:
        for old, new in self.names.items():
            if key == old or key.startswith(f"{old}."):
                self.used[old] = new
                return new + key.removeprefix(old)
        return key

    def rename_references(self, text: str) -> str:
        """Rename the settings that a text refers to, as in ${seed}."""
        return _REFERENCE.sub(lambda match: f"${{{self.rename_key(match[1])}}}", text)

    def rename_tree(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of nested settings under their current names.

        Raises:
            ConfigError: A setting is given under both names.
        """
        renamed = copy.deepcopy(dict(settings))
        for old, new in self.names.items():
            *outer, name = old.split(".")
            group: Any = renamed
            for part in outer:
                group = group.get(part) if isinstance(group, dict) else None
            if not isinstance(group, dict) or name not in group:
                continue
            new_name = new.rpartition(".")[2]
            if new_name in group:
                raise ConfigError(f"{old} is now called {new}, and both are given; allowed: {new}")
            group[new_name] = group.pop(name)
            self.used[old] = new
        return renamed


@dataclass(frozen=True, slots=True)
class Setting:
    key: str  # in full, such as actor.layout.tp
    kind: str  # its type without limits: "int | None"
    default: object
    meaning: str  # the comment of its field, and the allowed names where that lacks one
    choices: tuple[str, ...]  # empty for a setting that is no name from a list
    range: str = ""  # of a number: "at least 1"

    @property
    def is_mapping(self) -> bool:
        """Return whether it holds the settings of a function, which that function checks."""
        return self.kind.startswith("dict")


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """Settings of one dataclass."""

    key: str  # such as actor.layout; "" for the settings of the whole run
    about: str  # the docstring of the dataclass
    settings: tuple[Setting, ...]


def list_setting_groups(part: Any, key: str = "") -> Iterator[SettingGroup]:
    """Yield the groups of settings in an instance of a dataclass of settings, outer ones first."""
    kind = type(part)
    settings, inner, hints = [], [], read_hints(part.__class__)
    for entry in fields(part):
        value, name = getattr(part, entry.name), f"{key}.{entry.name}".lstrip(".")
        if is_dataclass(value):
            inner.append((value, name))
            continue
        limits = [*list_limits(hints[entry.name])]
        choices = tuple(n for limit in limits if isinstance(limit, OneOf) for n in limit.names if n)
        ranges = ", ".join(str(limit) for limit in limits if isinstance(limit, Range))
        base = next(base for base in kind.__mro__ if entry.name in base.__annotations__)
        comment = _read_comments(base.__module__)[base.__name__, entry.name]
        meaning = _add_choices(comment, choices)
        spelled = _spell_type(hints[entry.name])
        settings.append(Setting(name, spelled, value, meaning, choices, ranges))
    about = kind.__doc__ or ""
    if about.startswith(f"{kind.__name__}("):  # what dataclass writes where there is no docstring
        about = ""
    yield SettingGroup(key, inspect.cleandoc(about), tuple(settings))
    for value, name in inner:
        yield from list_setting_groups(value, name)
    for setting in settings:
        for function_settings in FUNCTION_SETTINGS.get(setting.key, ()):
            yield from list_setting_groups(function_settings(), setting.key)


def list_setting_names(schema: type) -> list[str]:
    """Return the full key of every setting, such as actor.layout.tp."""
    return [setting.key for group in list_setting_groups(schema()) for setting in group.settings]


def _add_choices(meaning: str, choices: Sequence[str]) -> str:
    """Return a comment with the allowed names, unless it has them all."""
    if all(word in meaning for word in choices):
        return meaning
    listed = f"one of: {', '.join(choices)}"
    return f"{meaning}; {listed}" if meaning else listed


def _spell_type(hint: Any) -> str:
    """Return a type as it is written without limits, such as "list[int] | None"."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _spell_type(parts[0])
    if origin in (Union, UnionType):
        return " | ".join(map(_spell_type, parts))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_spell_type, parts))}]"
    return "None" if hint is NoneType else str(hint.__name__)


@cache
def _read_comments(module: str) -> dict[tuple[str, str], str]:
    """Return the comments of fields, by class and field: on their lines or in lines above."""
    source = inspect.getsource(sys.modules[module])
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
    texts: dict[tuple[str, str], str] = {}
    for part in ast.parse(source).body:
        if not isinstance(part, ast.ClassDef):
            continue
        for node in part.body:
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            first = node.lineno
            while (above := comments.get(first - 1)) and above.line.lstrip().startswith("#"):
                first -= 1
            lines = range(first, (node.end_lineno or node.lineno) + 1)
            words = [comments[n].string.lstrip("# ") for n in lines if n in comments]
            texts[part.name, node.target.id] = " ".join(words)
    return texts


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting by its full name, such as "actor.layout.tp"."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value
