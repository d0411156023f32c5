"""Recipes, YAML files with the settings of a job: built-in ones by name, a user's by path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mcore_rl
from mcore_rl.cli.options import closest
from mcore_rl.config.checks import check_path
from mcore_rl.config.errors import ConfigError

RECIPES = Path(mcore_rl.__file__).parent / "configs" / "recipe"
_SUFFIXES = (".yaml", ".yml")


def names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def first_comment(path: Path) -> str:
    """What the first comment line of a recipe says; "" where there is none."""
    for line in path.read_text().splitlines():
        if line.startswith("#") and not line.startswith("# @"):
            return line.lstrip("# ")
    return ""


def listing() -> Iterator[str]:
    """A line a recipe: its name and its first comment line."""
    width = max(map(len, names()))
    for name in names():
        yield f"{name:{width}}  {first_comment(RECIPES / f'{name}.yaml')}"


def find(recipe: str, where: str, folder: Path) -> Path:
    """The file of a recipe: a name of ours, or a path, of which a relative one starts at `folder`.

    Raises:
        ConfigError: there is no such recipe or file; the message begins with `where`.
    """
    allowed = f"{', '.join(names())}, or the path of a YAML file"
    check_path(where, recipe)
    if "/" not in recipe and not recipe.endswith(_SUFFIXES):
        if recipe in names():
            return RECIPES / f"{recipe}.yaml"
        beside = [f"{recipe}{end}" for end in _SUFFIXES if (folder / f"{recipe}{end}").is_file()]
        close = beside or closest(recipe, names())
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{where}={recipe!r}; allowed: {allowed}{hint}")
    path = folder / Path(recipe).expanduser()
    if not path.is_file():
        is_what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{where}={recipe!r} {is_what}; allowed: {allowed}")
    return path
