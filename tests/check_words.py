"""Refuse names and docstrings that are not written in the terms of the field.

    python tests/check_words.py PATH [PATH ...]

Names of functions, classes, parameters, variables and attributes:
- none is one of BANNED, underscores around it aside: these fit any value, so they say nothing;
- none has one of BANNED_PARTS between its underscores;
- no function begins with a word of NOT_VERBS.

Docstrings:
- none begins with a relative clause in place of a noun, or with a fragment ("Of ...", "As ...");
- outside of tests, which state what is proved, that of a public function or method says what it
  does, in the imperative. A property is described as an attribute would be.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

BANNED_PARTS = {
    "found", "told", "asked", "came", "said", "judged", "weighed", "tell", "pay", "kept", "near",
    "doubt", "doubts",
}  # fmt: skip
BANNED = BANNED_PARTS | {
    "here", "its", "others", "whole", "now", "at", "one", "mine", "own", "ones", "ours", "theirs",
}  # fmt: skip
NOT_VERBS = {
    "as", "at", "by", "for", "from", "in", "of", "on", "only", "out", "per", "so", "than", "under",
    "while",
}  # fmt: skip
RELATIVE = {
    "as", "of", "those", "what", "whatever", "where", "which", "who", "whose", "whether", "how",
    "when", "without",
}  # fmt: skip
NOT_IMPERATIVE = RELATIVE | {
    "a", "all", "an", "and", "another", "any", "as", "at", "both", "by", "each", "either", "every",
    "everything", "for", "from", "here", "if", "in", "it", "its", "like", "neither", "no", "none",
    "not", "nothing", "on", "one", "only", "other", "others", "some", "such", "that", "the",
    "their", "there", "these", "they", "this", "to", "two", "under", "why", "with", "without",
}  # fmt: skip
# They end in s, ed or ing and are imperatives all the same.
IMPERATIVES = {
    "access", "address", "assess", "bring", "compress", "discuss", "dismiss", "embed", "exceed",
    "express", "feed", "focus", "need", "pass", "press", "proceed", "process", "seed", "suppress",
}  # fmt: skip
HOOKS = {"on_broken_pipe", "on_step_end", "on_train_begin"}  # methods that a library names
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def list_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything that a module binds."""
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name


def is_banned(name: str) -> bool:
    """Return whether a name fits any value."""
    bare = name.strip("_").lower()
    return bare in BANNED or not BANNED_PARTS.isdisjoint(bare.split("_"))


def is_imperative(word: str) -> bool:
    """Return whether a sentence that begins with the word may be an order."""
    word = word.lower()
    if word in IMPERATIVES:
        return True
    if word in NOT_IMPERATIVE or word.endswith(("ed", "ing")):
        return False
    return not word.endswith("s") or word.endswith("ss")


def is_attribute(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is used as an attribute: a property, a fixture."""
    decorators = [
        part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
        for part in function.decorator_list
    ]
    return any(name.endswith("property") or name in ("setter", "fixture") for name in decorators)


def list_docstrings(tree: ast.Module, *, is_test: bool) -> Iterator[tuple[int, str]]:
    """Yield line and first line of each docstring that breaks a rule."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | _FUNCTIONS):
            continue
        first = (ast.get_docstring(node) or "").strip().partition("\n")[0]
        if not first:
            continue
        word = re.split(r"[^\w'-]", first.lstrip("(`*"), maxsplit=1)[0]
        is_order = isinstance(node, _FUNCTIONS) and not (
            is_test or node.name.startswith("_") or is_attribute(node)
        )
        if word.lower() in RELATIVE or (is_order and not is_imperative(word)):
            yield getattr(node, "lineno", 1), first


def list_complaints(path: Path) -> Iterator[str]:
    """Yield a line for each name and each docstring of a file that breaks a rule."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for line, name in sorted(set(list_names(tree))):
        if is_banned(name):
            yield f"{path}:{line}: the name {name!r}; allowed: a noun for what it holds"
    for node in ast.walk(tree):
        if not isinstance(node, _FUNCTIONS) or node.name in HOOKS:
            continue
        if node.name.strip("_").split("_")[0] in NOT_VERBS:
            yield f"{path}:{node.lineno}: the function {node.name!r}; allowed: a verb, its object"
    for line, first in list_docstrings(tree, is_test="tests" in path.parts):
        yield f"{path}:{line}: the docstring {first!r}; allowed: what it does, as an imperative"


def list_files(path: Path) -> list[Path]:
    """Return the Python files in a folder, or the file itself."""
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main(paths: list[str]) -> int:
    """Print all complaints; return 1 if there are any."""
    files = [file for path in paths for file in list_files(Path(path))]
    complaints = [complaint for file in files for complaint in list_complaints(file)]
    print("\n".join(complaints))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
