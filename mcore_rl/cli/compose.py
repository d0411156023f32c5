"""Settings from recipes (YAML) and overrides, as a typed config. No DictConfig leaves this file."""

from __future__ import annotations

import copy
import functools
import io
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mcore_rl.cli.other_names import find_our_settings
from mcore_rl.cli.recipes import RECIPES, SUFFIXES, list_recipes
from mcore_rl.config.checks import check_path, find_closest, shorten
from mcore_rl.config.describe import (
    RENAMED,
    Setting,
    SettingRenamer,
    list_setting_groups,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.regular_file import read_regular
from mcore_rl.config.schema import TimeoutsConfig

T = TypeVar("T")
_RECIPE = "recipe"  # the one key that is no setting
_REPLACE = "replace"  # in a recipe only: mappings of its base that it does not add to
_TERMS = "dict[str, dict[str, Any]]"  # reward.terms, which contains settings of functions
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true, false",
    "str": "text, in which ${...} is looked up",
    "dict[str, str]": "texts by name, as in {name: text}",
    "dict[str, Any]": "settings of a function, as in {name: value}",
    "Any": "a value; for a term of reward.terms {} or {name: ..., weight: ..., settings: ...}",
    _TERMS: "terms by name, as in {math: {weight: 1.0}}",
}
_LISTS = {
    "list[str]": "a,b",
    "list[float]": "1,2.5",
    "list[int]": "1,8",
}  # entries of a list that is empty by default
_KEY = re.compile(r"[A-Za-z_][\w.]{0,99}")  # what stands before the colon of a setting
_MAX_RECIPE_BYTES = 1 << 20
_FEW = 12  # names that are listed in one message

# The time of day in a setting: ${now:%H%M}. One config sees one time.
OmegaConf.register_new_resolver(
    "now", lambda form: time.strftime(form), use_cache=True, replace=True
)


def _compute_start_s(path: str) -> float:
    """Return the default timeouts.start_s of a model: 600 s, and 5 s for each GB of its files."""
    try:
        files = [f for f in Path(path).glob("*.safetensors") if f.is_file()] if path else []
        return TimeoutsConfig.start_s + sum(f.stat().st_size for f in files) * 5 // 10**9
    except (OSError, ValueError):  # the check of model.path says what is wrong with it
        return TimeoutsConfig.start_s


# Default of timeouts.start_s: ${start_s:FOLDER}.
OmegaConf.register_new_resolver("start_s", _compute_start_s, replace=True)


def compose_config(schema: type[T], arguments: Sequence[str]) -> T:
    """Return the defaults, changed by a recipe (recipe=NAME or PATH), then by the other key=value.

    Warn once for each setting that is given under an old name.

    Raises:
        ConfigError: an unknown key, recipe or value, or a file that cannot be read.
    """
    composer = _Composer(schema)
    overrides = [composer.split_override(argument) for argument in arguments]
    recipe_names = [text for key, text in overrides if key == _RECIPE]
    if len(recipe_names) > 1:
        raise ConfigError(f"recipe is given {len(recipe_names)} times: {', '.join(recipe_names)}")
    for name in recipe_names:
        composer.apply_recipe(find_recipe(_unquote(name), _RECIPE, Path()))
    for key, text in overrides:
        if key != _RECIPE:
            composer.apply_override(key, text)
    config = composer.build()
    assert isinstance(config, schema)
    for old, new in composer.renamer.used.items():
        print(
            f"mcore-rl: warning: {old} is now called {new}; the next release refuses the old name",
            file=sys.stderr,
        )
    return config


def compose_recorded(schema: type[T], settings: Mapping[str, Any], where: str = "") -> T:
    """Return the config of settings as values, as a run has recorded them or Python has set them.

    ${...} in texts is not looked up.

    Raises:
        ConfigError: an unknown key, or a value that cannot be; the message begins with `where`.
    """
    composer = _Composer(schema)
    composer.apply_changes(_escape_texts(settings), f"{where}: " if where else "")
    config = composer.build()
    assert isinstance(config, schema)
    return config


def format_recipe(config: Any) -> str:
    """Return YAML of every setting; as a recipe it gives the same config."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape_texts(asdict(config))))


def _escape_texts(value: Any) -> Any:
    """Escape texts that read like interpolations, inside a value."""
    if isinstance(value, Mapping):
        return {key: _escape_texts(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_escape_texts(entry) for entry in value]
    # Backslashes before ${ are escaped, too: an even number of them would leave it as it is.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


@functools.cache
def _get_defaults(schema: type) -> DictConfig:
    """Return the config of a schema, which takes ten times as long to make as to copy."""
    defaults: DictConfig = OmegaConf.structured(schema)
    return defaults


class _Composer:
    """A config while recipes and overrides change it."""

    def __init__(self, schema: type) -> None:
        groups = [*list_setting_groups(schema())]
        self.settings = {setting.key: setting for group in groups for setting in group.settings}
        names = {group.key for group in groups} | self.settings.keys()
        self.config = copy.deepcopy(_get_defaults(schema))
        self.renamer = SettingRenamer({old: new for old, new in RENAMED.items() if new in names})
        if {"timeouts.start_s", "model.path"} <= {*self.settings}:
            self.config.timeouts.start_s = "${start_s:${model.path}}"

    def split_override(self, argument: str) -> tuple[str, str]:
        """Return key and text of key=text; refuse an unknown key."""
        key, equals, text = argument.partition("=")
        if key.startswith(("+", "~")):
            raise ConfigError(f"{argument}: settings cannot be added or removed; use key=value")
        if not equals:
            hint = f"{key}=VALUE" if key in self.settings else suggest_recipe(key)
            if not hint:
                raise ConfigError(
                    f"{argument!r} is no key=value; {explain_unknown(key, list(self.settings))}"
                )
            raise ConfigError(f"{argument!r} is no key=value; did you mean {hint}?")
        if key != key.strip():
            raise ConfigError(f"{argument!r}: no blanks around the '='")
        key = self.renamer.rename_key(key)
        if key != _RECIPE and not self._is_known(key):
            raise ConfigError(explain_unknown(key, list(self.settings)))
        return key, text

    def apply_override(self, key: str, text: str) -> None:
        setting = self._get_setting(key)
        text = self.renamer.rename_references(text)
        self._set_value(key, _parse_value(setting, text), "")

    def apply_recipe(self, path: Path, users: tuple[Path, ...] = ()) -> None:
        """Apply a recipe, after the one that it starts from. `users` start from this one."""
        path = path.resolve()
        if path in users:
            raise ConfigError(f"{users[-1]}: {_RECIPE}: {path} starts from this file itself")
        where = f"{path}: "
        changes = self._rename(_read_yaml(path), where)
        base = changes.pop(_RECIPE, None)
        if base is not None:
            if not isinstance(base, str):
                raise ConfigError(f"{where}{_RECIPE}={base!r}; allowed: a name or a path")
            self.apply_recipe(find_recipe(base, f"{where}{_RECIPE}", path.parent), (*users, path))
        for key in self._check_replaced(changes.pop(_REPLACE, []), f"{where}{_REPLACE}"):
            self._set_value(key, {}, where)
        self._set_values(changes, where)

    def apply_changes(self, changes: Mapping[Any, Any], where: str) -> None:
        """Apply nested settings that start from the defaults."""
        self._set_values(self._rename(changes, where), where)

    def _rename(self, changes: Mapping[Any, Any], where: str) -> dict[Any, Any]:
        try:
            return self.renamer.rename_tree(changes)
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from error

    def _set_values(self, changes: Mapping[Any, Any], where: str) -> None:
        for key, value in self._list_leaves(changes, where):
            if isinstance(value, str):
                value = self.renamer.rename_references(value)
            self._set_value(key, value, where)
        self.build(where)

    def build(self, where: str = "") -> object:
        """Return the config as a dataclass, its interpolations resolved."""
        try:
            return OmegaConf.to_object(self.config)
        except OmegaConfBaseException as error:
            key, message = error.full_key, str(error).partition("\n")[0]
            raise ConfigError(f"{where}{key}: {message}") from error

    def _is_known(self, key: str) -> bool:
        """Return whether a key is a setting, or may be: a function knows its own settings."""
        mapping = self.settings.get(key.rpartition(".")[0])
        if key in self.settings or (mapping is not None and mapping.is_mapping):
            return True
        terms = (name for name, setting in self.settings.items() if setting.kind == _TERMS)
        return any(key.startswith(f"{name}.") for name in terms)

    def _get_setting(self, key: str) -> Setting:
        mapping = self.settings.get(key.rpartition(".")[0])
        kind = "str" if mapping is not None and mapping.kind == "dict[str, str]" else "Any"
        return self.settings.get(key) or Setting(key, kind, None, "", ())

    def _set_value(self, key: str, value: object, where: str) -> None:
        try:
            OmegaConf.update(self.config, key, value, merge=False)
        except OmegaConfBaseException as error:
            raise _refuse_value(self._get_setting(key), value, where) from error

    def _check_replaced(self, keys: object, where: str) -> list[str]:
        """Return the mappings that a recipe gives anew, in place of adding to those of its base."""
        mappings = [name for name, setting in self.settings.items() if setting.is_mapping]
        if isinstance(keys, list):
            keys = [self.renamer.rename_key(key) if isinstance(key, str) else key for key in keys]
        if not isinstance(keys, list) or (wrong := [key for key in keys if key not in mappings]):
            shown = wrong[0] if isinstance(keys, list) else keys
            close = find_closest(str(shown), mappings) or mappings[:_FEW]
            raise ConfigError(f"{where}={shown!r}; allowed: a list of mappings such as {close[0]}")
        return keys

    def _list_leaves(
        self, changes: Mapping[Any, Any], where: str, prefix: str = ""
    ) -> Iterator[tuple[str, object]]:
        """Yield full key and value of each setting in nested ones, which must all be known."""
        for name, value in changes.items():
            key = f"{prefix}{name}"
            is_group = any(other.startswith(f"{key}.") for other in self.settings)
            if key in self.settings and self.settings[key].is_mapping:  # an empty one clears it
                is_group = isinstance(value, dict) and bool(value)
            if is_group and "." not in str(name) and (value is None or isinstance(value, dict)):
                yield from self._list_leaves(value or {}, where, f"{key}.")
            elif not self._is_known(key):
                full_key = key if prefix else _find_first_key(key, value)
                raise ConfigError(f"{where}{explain_unknown(full_key, list(self.settings))}")
            elif "." in str(name):
                nested = ": {".join(str(name).split("."))
                raise ConfigError(
                    f"{where}{key} as one key; allowed: nested, as in {nested}: "
                    f"{value}{'}' * str(name).count('.')}"
                )
            else:
                yield key, value


def suggest_recipe(word: str) -> str:
    """Return recipe=NAME or recipe=PATH where a word alone is meant for it; else empty."""
    if "/" in word or word.endswith(SUFFIXES):
        return f"recipe={word}"
    beside = [f"{word}{end}" for end in SUFFIXES if Path(f"{word}{end}").is_file()]
    close = [word] if word in list_recipes() else beside or find_closest(word, list_recipes())
    return f"recipe={close[0]}" if close else ""


def find_recipe(recipe: str, where: str, folder: Path) -> Path:
    """Return the file of a recipe: a built-in name, or a path, relative to `folder`.

    Raises:
        ConfigError: There is no such recipe or file; the message begins with `where`.
    """
    allowed = f"{', '.join(list_recipes())}, or the path of a YAML file"
    check_path(where, recipe)
    if "/" not in recipe and not recipe.endswith(SUFFIXES):
        if recipe in list_recipes():
            return RECIPES / f"{recipe}.yaml"
        beside = [f"{recipe}{end}" for end in SUFFIXES if (folder / f"{recipe}{end}").is_file()]
        close = beside or find_closest(recipe, list_recipes())
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{where}={recipe!r}; allowed: {allowed}{hint}")
    path = folder / Path(recipe).expanduser()
    if not path.is_file():
        is_what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{where}={recipe!r} {is_what}; allowed: {allowed}")
    return path


def _unquote(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else text


def _parse_value(setting: Setting, text: str) -> object:
    """Return the value of an override: a text as it is, another value by Hydra's grammar.

    A setting of a function may be either. It is a text where the grammar knows no value, as of
    think,answer or accuracy,format=0.5.
    """
    if setting.kind == "str":
        return _unquote(text)
    may_be_text = setting.kind == "Any" and not text.startswith(("[", "{", "'", '"'))
    try:
        override = OverridesParser.create().parse_override(f"{setting.key}={text}")
    except HydraException as error:
        if may_be_text:
            return text
        raise _refuse_value(setting, text) from error
    if override.is_sweep_override():
        if may_be_text:
            return text
        raise _refuse_value(setting, text)
    value: object = override.value()
    return value


def _refuse_value(setting: Setting, value: object, where: str = "") -> ConfigError:
    kind, _, empty = setting.kind.partition(" | ")
    allowed = _KINDS.get(kind, kind) + (", null" if empty else "")
    if isinstance(setting.default, list):
        allowed = f"a list such as [{','.join(map(str, setting.default)) or _LISTS[setting.kind]}]"
    return ConfigError(f"{where}{setting.key}={shorten(value, 200)}; allowed: {allowed}")


def _find_first_key(key: str, value: object) -> str:
    """Return the full key of the first setting in an unknown group, as of another framework."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        file = io.BytesIO(read_regular(path, _MAX_RECIPE_BYTES))
        changes = OmegaConf.to_container(OmegaConf.load(file))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path} is not valid YAML{place}: {error.problem}") from error
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path}: {error.full_key}: {reason}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    except OSError as error:
        reason = error.strerror or "it must contain settings, not a single value"
        raise ConfigError(f"{path} cannot be read: {reason}") from error
    if not isinstance(changes, dict):
        raise ConfigError(f"{path} is a list; allowed: settings, one a line as key: value")
    if not all(isinstance(key, str) and _KEY.fullmatch(key) for key in changes):
        # No key is shown: it may be any file, and its contents a secret.
        raise ConfigError(f"{path} is no recipe; allowed: settings, one a line as key: value")
    return changes


def explain_unknown(key: str, known: Sequence[str]) -> str:
    """Return why a key is no setting, with the settings that are similar."""
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        listed = ", ".join(inside[:_FEW]) + (", ..." if len(inside) > _FEW else "")
        return f"{key} is a group of settings; set one of: {listed}"
    framework, equivalents = find_our_settings(key, known)
    if framework:
        hint = (
            f"did you mean {' or '.join(equivalents)}?"
            if equivalents
            else "docs/from_verl_and_trl.md has ours"
        )
        return f"unknown setting {key!r}, which is {framework}'s; {hint}"
    leaf = key.rpartition(".")[2]
    ends: dict[str, list[str]] = {}
    for name in known:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    close = ends.get(leaf) or find_closest(key, known)
    close = close or [name for end in find_closest(leaf, ends) for name in ends[end]][:3]
    if "." in key:  # the whole key says more than its end
        close = find_closest(key, known) or close
    hint = f"did you mean {' or '.join(close)}?" if close else "--help lists them all"
    return f"unknown setting {key!r}; {hint}"
