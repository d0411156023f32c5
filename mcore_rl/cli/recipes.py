"""Recipes, YAML files with the settings of a job: built-in ones by name, a user's by path."""

from __future__ import annotations

from collections.abc import Iterator
from glob import escape, glob
from pathlib import Path

import mcore_rl
from mcore_rl.cli.options import closest, wrap_descriptions
from mcore_rl.config.checks import check_path
from mcore_rl.config.errors import ConfigError

RECIPES = Path(mcore_rl.__file__).parent / "configs" / "recipe"
_SUFFIXES = (".yaml", ".yml")


def names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_files(start: str) -> list[str]:
    """Return the YAML files, and folders with a slash behind, whose paths begin with `start`."""
    paths = sorted(glob(f"{escape(start)}*"))
    folders = [f"{path}/" for path in paths if Path(path).is_dir()]
    return folders + [path for path in paths if path.endswith(_SUFFIXES)]


def first_comment(path: Path) -> str:
    """What the first comment of a recipe says, up to the end of a sentence; "" if there is none."""
    words: list[str] = []
    for line in path.read_text().splitlines():
        if not line.startswith("#") or line.startswith("# @"):
            if words:
                break
            continue
        own = line.lstrip("# ").split()
        words += own
        if words and (not own or words[-1].endswith(".")):
            break
    return " ".join(words)


def listing(indent: int = 0) -> Iterator[str]:
    """The name of each recipe, and what its first comment says."""
    return wrap_descriptions(
        {name: first_comment(RECIPES / f"{name}.yaml") for name in names()}, indent
    )


def suggest_recipe(word: str) -> str:
    """Return recipe=NAME or recipe=PATH where a word alone is meant for it; else empty."""
    if "/" in word or word.endswith(_SUFFIXES):
        return f"recipe={word}"
    beside = [f"{word}{end}" for end in _SUFFIXES if Path(f"{word}{end}").is_file()]
    close = [word] if word in names() else beside or closest(word, names())
    return f"recipe={close[0]}" if close else ""


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
