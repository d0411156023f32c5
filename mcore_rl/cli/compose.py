"""Hydra at the edge: YAML, recipes and overrides become a typed config; no DictConfig leaves."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

import mcore_rl
from mcore_rl.config.errors import ConfigError

T = TypeVar("T")
CONFIGS = Path(mcore_rl.__file__).parent / "configs"
_GROUPS = ("recipe",)


def compose_config(name: str, schema: type[T], overrides: Sequence[str]) -> T:
    """The config `name` (configs/<name>.yaml) with Hydra overrides, as an instance of `schema`.

    Raises:
        ConfigError: an unknown key, recipe or value, or an override that does not parse.
    """
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)
    try:
        _check_keys(overrides, schema)
        with initialize_config_dir(str(CONFIGS.resolve()), version_base="1.3"):
            config = OmegaConf.to_object(compose(name, overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, schema)) from error
    if not isinstance(config, schema):
        raise TypeError(f"configs/{name}.yaml does not inherit {name}_schema")
    return config


def setting_names(schema: type, prefix: str = "") -> list[str]:
    """The full key of every setting, such as actor.layout.tp."""
    found: list[str] = []
    for entry in fields(schema):  # type: ignore[arg-type]
        default = entry.default_factory() if callable(entry.default_factory) else entry.default
        key = prefix + entry.name
        found += setting_names(type(default), f"{key}.") if is_dataclass(default) else [key]
    return found


def _check_keys(overrides: Sequence[str], schema: type) -> None:
    known = setting_names(schema)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if override.is_add() or override.is_delete():
            raise ConfigError(
                f"{override.input_line}: settings are neither added nor removed; use key=value"
            )
        if key in _GROUPS:
            _check_choice(key, override.value())
        elif key not in known:
            raise ConfigError(_unknown(key, known))


def _check_choice(group: str, choice: object) -> None:
    allowed = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    if choice not in allowed:
        raise ConfigError(f"{group}={choice}; allowed: {', '.join(allowed)}")


def _unknown(key: str, known: Sequence[str]) -> str:
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        return f"{key} is a group of settings; set one of: {', '.join(inside)}"
    leaf = key.rpartition(".")[2]
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.7)
    close = close or [name for name in known if name.rpartition(".")[2] == leaf]
    if close:
        return f"unknown setting {key!r}; did you mean {' or '.join(close)}?"
    return f"unknown setting {key!r}; allowed: {', '.join(known)}"


def _explain(error: BaseException, schema: type) -> str:
    """One line of the innermost cause, with the closest keys when YAML names an unknown one."""
    while error.__cause__ is not None:
        error = error.__cause__
    key = getattr(error, "full_key", None)
    if isinstance(error, ConfigKeyError) and key:
        return _unknown(key, setting_names(schema))
    message = " ".join(str(error).split("\n")[0].split())
    return f"{key}: {message}" if key else " ".join(str(error).split())
