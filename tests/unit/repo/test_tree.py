"""The tree keeps the project rules that no linter knows."""

import ast
import os
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mcore_rl.config.allowed import BACKENDS, SERVER_BACKENDS

ROOT = Path(__file__).resolve().parents[3]
LINKED = ("benchmarks", "configs", "examples", "models")  # into the package
SOURCES = ("mcore_rl", "benchmarks", "examples", "models", "tests")
PACKAGE_FOLDERS = {
    path.parent
    for source in ("mcore_rl", "benchmarks", "examples", "models")
    for path in (ROOT / source).rglob("*.py")
}


@pytest.mark.parametrize("name", LINKED)
def test_a_top_level_folder_is_linked_into_the_package(name: str) -> None:
    link = ROOT / "mcore_rl" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.is_dir()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize("name", LINKED)
def test_the_link_is_tracked_as_a_link(name: str) -> None:
    command = ["git", "-C", str(ROOT), "ls-files", "--stage", f"mcore_rl/{name}"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert listed.startswith("120000 ")


@pytest.mark.parametrize("forbidden", ["utils", "common", "misc", "helpers"])
def test_no_file_or_folder_has_a_name_that_says_nothing(forbidden: str) -> None:
    paths = [
        path
        for source in SOURCES
        for path in (ROOT / source).rglob("*")
        if path.stem in (forbidden, forbidden.rstrip("s"))
    ]
    assert paths == []


def test_every_package_folder_has_an_init() -> None:
    missing = {folder for folder in PACKAGE_FOLDERS if not (folder / "__init__.py").is_file()}
    assert missing == set()


def is_registry(init: Path) -> bool:
    """Return whether the file has only imports of the modules beside it, and their `__all__`."""
    parts = init.parent.relative_to(ROOT).parts
    package = ".".join(parts if parts[0] == "mcore_rl" else ("mcore_rl", *parts))
    modules = {path.stem for path in init.parent.glob("*.py")}

    def is_allowed(node: ast.stmt) -> bool:
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Assign(targets=[ast.Name(id="__all__")]):
                return True
            case ast.ImportFrom(module=module, names=names):
                return module == package and {alias.name for alias in names} <= modules
        return False

    return all(is_allowed(node) for node in ast.parse(init.read_text()).body)


def test_init_files_are_empty_or_fill_a_registry() -> None:
    # tests/unit/test_library.py tests the packages with public names.
    public = {ROOT / "mcore_rl", ROOT / "mcore_rl" / "testing"}
    inits = [folder / "__init__.py" for folder in PACKAGE_FOLDERS - public]
    assert [init for init in inits if not is_registry(init)] == []


def test_every_config_file_is_yaml_that_loads() -> None:
    paths = sorted((ROOT / "configs").rglob("*"))
    files = [path for path in paths if path.is_file()]
    assert [path for path in files if path.suffix != ".yaml"] == []
    for path in files:
        OmegaConf.load(path)


def test_a_public_class_name_has_one_meaning() -> None:
    files: dict[str, list[str]] = {}
    for source in ("mcore_rl", "models"):
        for path in (ROOT / source).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


def test_standard_output_has_one_console() -> None:
    """Each other one names its stream: see observability/console.py."""
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "mcore_rl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Console", "rich.print")
        if not any(keyword.arg in ("file", "stderr", "width") for keyword in node.keywords)
    ]
    assert calls == []


# Where a name becomes a backend; elsewhere a backend says of itself what differs.
REGISTRIES = ("mcore_rl/engine/base.py", "mcore_rl/inference/registry.py")


def list_backend_comparisons(source: str) -> list[int]:
    """Return the lines that compare a backend with anything but another one.

    That is an attribute `backend`, or a variable of that name beside the name of a backend.
    """

    def is_backend(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "backend"

    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, comparators=comparators):
                sides = [is_backend(side) for side in (left, *comparators)]
                is_variable = "backend" in [ast.unparse(side) for side in (left, *comparators)]
                texts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                is_named = is_variable and texts & {*BACKENDS, *SERVER_BACKENDS}
                if is_named or (any(sides) and not all(sides)):
                    lines.append(node.lineno)
            case ast.Match(subject=subject) if is_backend(subject):
                lines.append(node.lineno)
            case ast.Call(func=ast.Attribute(value=value)) if is_backend(value):
                if node.func.attr in ("startswith", "endswith", "__eq__"):
                    lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = config.backend\nif config.backend == 'fsdp': pass", [2]),
        ("x = 1 if FSDP != a.b.backend else 2", [1]),
        ("x = servers.backend not in ('vllm', 'sglang')", [1]),
        ("match engine.backend:\n    case 'fsdp': pass", [1]),
        ("x = engine.backend.startswith('fs')", [1]),
        ("backend = a.backend\nx = backend in ('vllm',)", [2]),
        ("x = backend == 'nccl', backend in SERVER_BACKENDS", []),
        ("x = a.backend == b.backend", []),
        ("x = {'vllm': 1}[servers.backend], f(a.backend, 'fsdp')", []),
    ],
)
def test_a_comparison_of_a_backend_is_noticed(source: str, lines: list[int]) -> None:
    assert list_backend_comparisons(source) == lines


def test_only_registries_compare_the_name_of_a_backend() -> None:
    comparisons = [
        f"{path.relative_to(ROOT)}:{line}"
        for source in ("mcore_rl", "benchmarks", "examples", "models")
        for path in (ROOT / source).rglob("*.py")
        if str(path.relative_to(ROOT)) not in REGISTRIES
        for line in list_backend_comparisons(path.read_text())
    ]
    assert comparisons == []


def test_every_load_by_transformers_refuses_code_of_the_folder() -> None:
    """transformers would ask on standard input, where `yes |` answers."""
    loads = {"from_pretrained", "from_config"}
    missing = []
    for source in ("mcore_rl", "benchmarks", "examples", "models"):
        for path in sorted((ROOT / source).rglob("*.py")):
            tree = ast.parse(path.read_text())
            refusing = {
                call.func
                for call in ast.walk(tree)
                if isinstance(call, ast.Call)
                and any(
                    keyword.arg == "trust_remote_code"
                    and isinstance(keyword.value, ast.Constant)
                    and keyword.value.value is False
                    for keyword in call.keywords
                )
            }
            missing += [
                f"{path.relative_to(ROOT)}:{node.lineno}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and node.attr in loads and node not in refusing
            ]
    assert missing == []
