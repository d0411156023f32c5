"""Settings from YAML, recipes and overrides, as a typed config; no DictConfig leaves."""

from __future__ import annotations

import re
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

from mcore_rl.cli import recipes
from mcore_rl.cli.options import closest
from mcore_rl.cli.other_names import find_our_settings
from mcore_rl.config.checks import shorten
from mcore_rl.config.describe import Setting, groups
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import TimeoutsConfig

T = TypeVar("T")
Settings = Mapping[str, Setting]  # by key
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
_FEW = 12  # names that are listed in one message

# The time of day in a setting: ${now:%H%M}. One config sees one time.
OmegaConf.register_new_resolver(
    "now", lambda form: time.strftime(form), use_cache=True, replace=True
)


def _start_s(path: str) -> float:
    """What a model's start may take: the default, and 5 s for each GB that every server reads."""
    try:
        files = [f for f in Path(path).glob("*.safetensors") if f.is_file()] if path else []
        return TimeoutsConfig.start_s + sum(f.stat().st_size for f in files) * 5 // 10**9
    except (OSError, ValueError):  # the check of model.path says what is wrong with it
        return TimeoutsConfig.start_s


# What timeouts.start_s is unless a recipe or an override sets it: ${start_s:FOLDER}.
OmegaConf.register_new_resolver("start_s", _start_s, replace=True)


def compose_config(schema: type[T], arguments: Sequence[str]) -> T:
    """The defaults, changed by a recipe (recipe=NAME or PATH), then by the other key=value.

    Raises:
        ConfigError: an unknown key, recipe or value, or a file that cannot be read.
    """
    settings = {s.key: s for group in groups(schema()) for s in group.settings}
    overrides = [_split(argument, settings) for argument in arguments]
    config = OmegaConf.structured(schema)
    if {"timeouts.start_s", "model.path"} <= {*settings}:
        config.timeouts.start_s = "${start_s:${model.path}}"
    chosen = [text for key, text in overrides if key == _RECIPE]
    if len(chosen) > 1:
        raise ConfigError(f"recipe is given {len(chosen)} times: {', '.join(chosen)}")
    for recipe in chosen:
        _change(config, recipes.find(_unquoted(recipe), _RECIPE, Path()), settings)
    for key, text in overrides:
        if key != _RECIPE:
            setting = _setting(key, settings)
            _set(config, setting, _parsed(setting, text), "")
    found = _checked(config)
    assert isinstance(found, schema)
    return found


def as_recipe(config: Any) -> str:
    """YAML of every setting; as a recipe it gives the same config."""
    escaped = _escaped(asdict(config))
    return OmegaConf.to_yaml(OmegaConf.create(escaped))


def _escaped(value: Any) -> Any:
    """The same, with texts that read like interpolations kept from being one."""
    if isinstance(value, dict):
        return {key: _escaped(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_escaped(entry) for entry in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _split(argument: str, settings: Settings) -> tuple[str, str]:
    """(key, text) of key=text."""
    key, equals, text = argument.partition("=")
    if key.startswith(("+", "~")):
        raise ConfigError(f"{argument}: settings cannot be added or removed; use key=value")
    if not equals:
        hint = f"{key}=VALUE" if key in settings else recipes.suggest_recipe(key)
        if not hint:
            raise ConfigError(f"{argument!r} is no key=value; {unknown(key, list(settings))}")
        raise ConfigError(f"{argument!r} is no key=value; did you mean {hint}?")
    if key != key.strip():
        raise ConfigError(f"{argument!r}: no blanks around the '='")
    if key != _RECIPE and not _is_known(key, settings):
        raise ConfigError(unknown(key, list(settings)))
    return key, text


def _is_known(key: str, settings: Settings) -> bool:
    """Those of a function outside the package are known to that function only."""
    mapping = settings.get(key.rpartition(".")[0])
    if key in settings or (mapping is not None and mapping.is_mapping):
        return True
    return any(s.kind == _TERMS and key.startswith(f"{name}.") for name, s in settings.items())


def _setting(key: str, settings: Settings) -> Setting:
    mapping = settings.get(key.rpartition(".")[0])
    kind = "str" if mapping is not None and mapping.kind == "dict[str, str]" else "Any"
    return settings.get(key) or Setting(key, kind, None, "", ())


def _unquoted(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else text


def _set(config: DictConfig, setting: Setting, value: object, where: str) -> None:
    try:
        OmegaConf.update(config, setting.key, value, merge=False)
    except OmegaConfBaseException as error:
        raise _refused(setting, value, where) from error


def _parsed(setting: Setting, text: str) -> object:
    """A text as it is, without quotes around it; another value by Hydra's grammar.

    A setting of a function may be either. It is a text where the grammar knows no value, as of
    think,answer or accuracy,format=0.5.
    """
    if setting.kind == "str":
        return _unquoted(text)
    may_be_text = setting.kind == "Any" and not text.startswith(("[", "{", "'", '"'))
    try:
        parsed = OverridesParser.create().parse_override(f"{setting.key}={text}")
    except HydraException as error:
        if may_be_text:
            return text
        raise _refused(setting, text) from error
    if parsed.is_sweep_override():
        if may_be_text:
            return text
        raise _refused(setting, text)
    value: object = parsed.value()
    return value


def _refused(setting: Setting, value: object, where: str = "") -> ConfigError:
    kind, _, empty = setting.kind.partition(" | ")
    allowed = _KINDS.get(kind, kind) + (", null" if empty else "")
    if isinstance(setting.default, list):
        allowed = f"a list such as [{','.join(setting.default) or _LISTS[setting.kind]}]"
    return ConfigError(f"{where}{setting.key}={shorten(value, 200)}; allowed: {allowed}")


def _checked(config: DictConfig, where: str = "") -> object:
    """The config as a dataclass, its interpolations resolved."""
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        key, message = error.full_key, str(error).partition("\n")[0]
        raise ConfigError(f"{where}{key}: {message}") from error


def _change(
    config: DictConfig, path: Path, settings: Settings, above: tuple[Path, ...] = ()
) -> None:
    """What a recipe changes, after the recipe that it starts from."""
    path = path.resolve()
    if path in above:
        raise ConfigError(f"{above[-1]}: {_RECIPE}: {path} starts from this file itself")
    changes = _load(path)
    base = changes.pop(_RECIPE, None)
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: {_RECIPE}={base!r}; allowed: a name or a path")
        found = recipes.find(base, f"{path}: {_RECIPE}", path.parent)
        _change(config, found, settings, (*above, path))
    for key in _check_replaced(changes.pop(_REPLACE, []), settings, f"{path}: {_REPLACE}"):
        _set(config, settings[key], {}, f"{path}: ")
    for key, value in _leaves(changes, settings, f"{path}: "):
        _set(config, _setting(key, settings), value, f"{path}: ")
    _checked(config, f"{path}: ")


def _check_replaced(keys: object, settings: Settings, where: str) -> list[str]:
    """The mappings that a recipe gives anew, in place of adding to those of its base."""
    mappings = [name for name, setting in settings.items() if setting.is_mapping]
    if not isinstance(keys, list) or (wrong := [key for key in keys if key not in mappings]):
        shown = wrong[0] if isinstance(keys, list) else keys
        close = closest(str(shown), mappings) or mappings[:_FEW]
        raise ConfigError(f"{where}={shown!r}; allowed: a list of mappings such as {close[0]}")
    return keys


def _leaves(
    changes: Mapping[Any, Any], known: Settings, where: str, prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """(full key, value) of each setting in nested ones, which must all be known."""
    for name, value in changes.items():
        key = f"{prefix}{name}"
        is_group = any(other.startswith(f"{key}.") for other in known)
        if key in known and known[key].is_mapping:  # an empty one clears it
            is_group = isinstance(value, dict) and bool(value)
        if is_group and "." not in str(name) and (value is None or isinstance(value, dict)):
            yield from _leaves(value or {}, known, where, f"{key}.")
        elif not _is_known(key, known):
            whole = key if prefix else _find_first_key(key, value)
            raise ConfigError(f"{where}{unknown(whole, list(known))}")
        elif "." in str(name):
            nested = ": {".join(str(name).split("."))
            raise ConfigError(
                f"{where}{key} as one key; allowed: nested, as in {nested}: "
                f"{value}{'}' * str(name).count('.')}"
            )
        else:
            yield key, value


def _find_first_key(key: str, value: object) -> str:
    """The whole key of the first setting in a group that is not ours, as of another framework."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _load(path: Path) -> dict[Any, Any]:
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path} is not valid YAML{at}: {error.problem}") from error
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path}: {error.full_key}: {reason}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    except OSError as error:
        reason = error.strerror or "it must contain settings, not a single value"
        raise ConfigError(f"{path} cannot be read: {reason}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is a list; allowed: settings, one a line as key: value")
    if not all(isinstance(key, str) and _KEY.fullmatch(key) for key in found):
        # Not one of them is shown: it may be any file, and its contents a secret.
        raise ConfigError(f"{path} is no recipe; allowed: settings, one a line as key: value")
    return found


def unknown(key: str, known: Sequence[str]) -> str:
    """Why a key is no setting, with those that it may have been meant for."""
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        listed = ", ".join(inside[:_FEW]) + (", ..." if len(inside) > _FEW else "")
        return f"{key} is a group of settings; set one of: {listed}"
    framework, ours = find_our_settings(key, known)
    if framework:
        hint = (
            f"did you mean {' or '.join(ours)}?" if ours else "docs/from_verl_and_trl.md has ours"
        )
        return f"unknown setting {key!r}, which is {framework}'s; {hint}"
    leaf = key.rpartition(".")[2]
    ends: dict[str, list[str]] = {}
    for name in known:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    close = ends.get(leaf) or closest(key, known)
    close = close or [name for end in closest(leaf, ends) for name in ends[end]][:3]
    if "." in key:  # the whole key says more than its end
        close = closest(key, known) or close
    hint = f"did you mean {' or '.join(close)}?" if close else "--help lists them all"
    return f"unknown setting {key!r}; {hint}"
