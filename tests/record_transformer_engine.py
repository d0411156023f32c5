"""Writes down the part of Transformer Engine's Python that Megatron-core reaches for.

No test imports Transformer Engine, which needs a GPU. What its pinned release has under the names
that Megatron-core imports, and which parameters its callables take, stands in
tests/unit/engine/transformer_engine.json; test_signatures.py there compares Megatron-core's calls
with it. After another pin (launch/requirements/gpu.in), in an empty folder:

    pip download --no-deps --only-binary :all: transformer-engine-cu13==VERSION
    python -m zipfile -e transformer_engine_cu13-VERSION-*.whl .
    python tests/record_transformer_engine.py .
"""

import ast
import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

RECORD = Path(__file__).parent / "unit/engine/transformer_engine.json"
ROOT = "transformer_engine"
Parameters = list[str] | None  # None: no callable, or one whose parameters are not in its source


def list_megatron_files() -> Iterator[Path]:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    yield from sorted(Path(spec.origin).parent.rglob("*.py"))


def list_used_names(tree: ast.AST) -> set[tuple[str, str]]:
    """Return (module, name) of what a file imports from Transformer Engine or reads as te.x.y."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{ROOT}."):
            names |= {(str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).startswith("te.pytorch"):
            names.add((ROOT + ast.unparse(node.value).removeprefix("te"), node.attr))
    return names


class Source:
    """A package that is read and not imported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[Path, ast.Module] = {}

    def find(self, module: str, name: str, visited: tuple[str, ...] = ()) -> Parameters:
        """Return the parameters of a function or class. Raises KeyError if the module lacks it."""
        path = self._folder / module.replace(".", "/")
        files = [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
        if not files or module in visited:
            raise KeyError(name)
        package = module if files[0].name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(self._tree(files[0])):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return _list_class_parameters(node)
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return _list_parameters(node)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
                return None
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name) or alias.name == "*":
                        source_name = name if alias.name == "*" else alias.name
                        source = _resolve_source(node, package)
                        if (
                            alias.name != "*"
                            and source.partition(".")[0] != module.partition(".")[0]
                        ):
                            return None  # compiled, or of another package
                        with contextlib.suppress(KeyError):
                            return self.find(source, source_name, (*visited, module))
        if not (path / name).is_dir() and not (path / f"{name}.py").is_file():
            raise KeyError(name)
        return None

    def _tree(self, file: Path) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse(file.read_text())
        return self._trees[file]


def _resolve_source(node: ast.ImportFrom, package: str) -> str:
    """Return the module from which an import in `package` takes names."""
    parents = package.split(".")[: 1 - node.level or None] if node.level else []
    return ".".join([*parents, *filter(None, [node.module])])


def _list_class_parameters(node: ast.ClassDef) -> Parameters:
    functions = [child for child in node.body if isinstance(child, ast.FunctionDef)]
    return next((_list_parameters(f)[1:] for f in functions if f.name == "__init__"), None)


def _list_parameters(node: ast.FunctionDef) -> list[str]:
    given = node.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [*names, *(["**"] if given.kwarg else [])]


def main(folder: Path) -> None:
    [info] = folder.glob(f"{ROOT}_cu*.dist-info")
    source, modules = Source(folder), dict[str, dict[str, Parameters]]()
    for file in list_megatron_files():
        for module, name in sorted(list_used_names(ast.parse(file.read_text()))):
            with contextlib.suppress(KeyError):
                modules.setdefault(module, {})[name] = source.find(module, name)
    version = info.name.removesuffix(".dist-info").partition("-")[2]
    RECORD.write_text(
        json.dumps({"version": version, "modules": modules}, indent=1, sort_keys=True)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
