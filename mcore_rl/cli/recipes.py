"""The built-in recipes, YAML files with the settings of a job: names and descriptions."""

from __future__ import annotations

from collections.abc import Iterator
from glob import escape, glob
from pathlib import Path

import mcore_rl
from mcore_rl.cli.options import wrap_descriptions

RECIPES = Path(mcore_rl.__file__).parent / "configs" / "recipe"
SUFFIXES = (".yaml", ".yml")


def list_recipes() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_files(start: str) -> list[str]:
    """Return the YAML files, and folders with a slash behind, whose paths begin with `start`."""
    paths = sorted(glob(f"{escape(start)}*"))
    folders = [f"{path}/" for path in paths if Path(path).is_dir()]
    return folders + [path for path in paths if path.endswith(SUFFIXES)]


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
