"""Recipes, YAML files with the settings of a job: built-in ones by name, a user's by path."""

from __future__ import annotations

from collections.abc import Iterator
from glob import escape, glob
from pathlib import Path

import mcore_rl
from mcore_rl.cli.options import find_closest, wrap_descriptions
from mcore_rl.config.checks import check_path
from mcore_rl.config.errors import ConfigError

RECIPES = Path(mcore_rl.__file__).parent / "configs" / "recipe"
_SUFFIXES = (".yaml", ".yml")


def list_recipes() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_files(start: str) -> list[str]:
    """Return the YAML files, and folders with a slash behind, whose paths begin with `start`."""
    paths = sorted(glob(f"{escape(start)}*"))
    folders = [f"{path}/" for path in paths if Path(path).is_dir()]
    return folders + [path for path in paths if path.endswith(_SUFFIXES)]


def read_first_comment(path: Path) -> str:
    """Return the first comment of a recipe, up to the end of a sentence; "" if there is none."""
    words: list[str] = []
    for line in path.read_text().splitlines():
        if not line.startswith("#") or line.startswith("# @"):
            if words:
                break
            continue
        comment = line.lstrip("# ").split()
        words += comment
        if words and (not comment or words[-1].endswith(".")):
            break
    return " ".join(words)


def list_descriptions(indent: int = 0) -> Iterator[str]:
    """Yield the name of each recipe with its first comment."""
    return wrap_descriptions(
        {name: read_first_comment(RECIPES / f"{name}.yaml") for name in list_recipes()}, indent
    )


def suggest_recipe(word: str) -> str:
    """Return recipe=NAME or recipe=PATH where a word alone is meant for it; else empty."""
    if "/" in word or word.endswith(_SUFFIXES):
        return f"recipe={word}"
    beside = [f"{word}{end}" for end in _SUFFIXES if Path(f"{word}{end}").is_file()]
    close = [word] if word in list_recipes() else beside or find_closest(word, list_recipes())
    return f"recipe={close[0]}" if close else ""


def find_recipe(recipe: str, where: str, folder: Path) -> Path:
    """Return the file of a recipe: a built-in name, or a path, relative to `folder`.

    Raises:
        ConfigError: There is no such recipe or file; the message begins with `where`.
    """
    allowed = f"{', '.join(list_recipes())}, or the path of a YAML file"
    check_path(where, recipe)
    if "/" not in recipe and not recipe.endswith(_SUFFIXES):
        if recipe in list_recipes():
            return RECIPES / f"{recipe}.yaml"
        beside = [f"{recipe}{end}" for end in _SUFFIXES if (folder / f"{recipe}{end}").is_file()]
        close = beside or find_closest(recipe, list_recipes())
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{where}={recipe!r}; allowed: {allowed}{hint}")
    path = folder / Path(recipe).expanduser()
    if not path.is_file():
        is_what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{where}={recipe!r} {is_what}; allowed: {allowed}")
    return path
