"""Packages built from the repository hold the linked folders, as files."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILD = "from setuptools import build_meta; import sys; print(build_meta.{hook}(sys.argv[1]))"
# In the place of csrc, which test_csrc.py compiles: a source that needs a header beside it.
SOURCES = {
    "module.cpp": """#include "parts/module.h"
PyMODINIT_FUNC PyInit__csrc() { return PyModule_Create(&module); }
""",
    "parts/module.h": """#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_csrc"};
""",
    "parts/kernel.cu": "not compiled here",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads, so that it leaves nothing behind in the tree."""
    copy = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("mcore_rl", "benchmarks", "configs", "examples", "models"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name, text in SOURCES.items():
        path = copy / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return copy


def build(hook: str, source: Path, target: Path) -> Path:
    result = subprocess.run(
        [sys.executable, "-c", BUILD.format(hook=hook), str(target)],
        cwd=source,
        env=os.environ | {"MCORE_RL_CUDA": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return target / result.stdout.splitlines()[-1]


def expected_files() -> set[str]:
    """Every module and every config of the tree, as it is imported; csrc as one compiled module."""
    files = {
        str(path.relative_to(ROOT))
        for pattern in (
            "mcore_rl/**/*.py",
            "mcore_rl/_csrc.pyi",
            "mcore_rl/models/published/*/*/config.json",
            "mcore_rl/planner/hardware/*.yaml",
            "mcore_rl/py.typed",
            "mcore_rl/tools/report/page.*",
        )
        for path in ROOT.glob(pattern)
    }
    files |= {
        f"mcore_rl/{path.relative_to(ROOT)}"
        for name in ("benchmarks", "configs", "examples", "models")
        for path in (ROOT / name).rglob("*.yaml" if name == "configs" else "*.py")
    }
    files.add(f"mcore_rl/_csrc{sysconfig.get_config_var('EXT_SUFFIX')}")
    return files


def test_the_wheel_holds_every_module_and_every_config(source: Path, tmp_path: Path) -> None:
    wheel = build("build_wheel", source, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        scripts = next(n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert b"mcore-rl = mcore_rl.cli.main:main" in archive.read(scripts)
    assert held == expected_files()
    assert {f"mcore_rl/{name}/__init__.py" for name in ("benchmarks", "examples", "models")} < held


@pytest.mark.job
def test_a_wheel_of_the_sdist_is_the_wheel_of_the_tree(source: Path, tmp_path: Path) -> None:
    sdist = build("build_sdist", source, tmp_path)
    shutil.unpack_archive(sdist, tmp_path)
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    csrc = unpacked / "csrc"
    assert {str(p.relative_to(csrc)) for p in csrc.rglob("*") if p.is_file()} == set(SOURCES)
    wheel = build("build_wheel", unpacked, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected_files()
