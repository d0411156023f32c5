"""Compilers and their caches for ranks on nodes with GPUs; no GPU."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller import compilers
from mcore_rl.controller.compilers import (
    build_compiler_environment,
    make_cache_folder,
    prepare_compilers,
)
from mcore_rl.controller.worker_process import Reply, WorkerProcess

CACHES = {
    "CUDA_CACHE_PATH", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT",
}  # fmt: skip


def program(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def toolkit(tmp_path, monkeypatch) -> Path:
    """The node's toolkit; the environment of Python has ninja."""
    program(tmp_path / "venv/bin", "ninja")
    program(tmp_path / "cuda/bin", "nvcc")
    monkeypatch.setattr(compilers, "_TOOLKIT", tmp_path / "cuda")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    return tmp_path / "cuda"


def test_a_rank_finds_ninja_and_nvcc_after_all_that_was_on_its_path(toolkit, tmp_path):
    empty = tmp_path / "bin"
    empty.mkdir()
    path = build_compiler_environment({"PATH": str(empty)}, tmp_path)["PATH"]
    assert path == f"{empty}:{tmp_path}/venv/bin:{toolkit}/bin"
    assert shutil.which("ninja", path=path) and shutil.which("nvcc", path=path)


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_that_is_named_comes_before_the_nodes(toolkit, tmp_path, variable):
    named = program(tmp_path / "own/bin", "nvcc")
    path = build_compiler_environment({"PATH": "", variable: str(named.parent)}, tmp_path)["PATH"]
    assert path == f"{tmp_path}/venv/bin:{named}"


def test_tools_on_the_path_stay_those_that_are_called(toolkit, tmp_path):
    tools = program(program(tmp_path / "own", "nvcc"), "ninja")
    assert "PATH" not in build_compiler_environment({"PATH": str(tools)}, tmp_path)


def test_tools_that_are_nowhere_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(compilers, "_TOOLKIT", tmp_path / "cuda")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert build_compiler_environment({"PATH": "/nowhere"}, tmp_path)["PATH"] == "/nowhere"


def test_each_compiler_has_a_cache_of_its_own_on_the_node(toolkit, tmp_path):
    caches = {n: v for n, v in build_compiler_environment({}, tmp_path).items() if n != "PATH"}
    assert caches.keys() == CACHES and len({*caches.values()}) == len(CACHES)
    assert {Path(folder).parent for folder in caches.values()} == {tmp_path}


@pytest.mark.parametrize(
    ("variable", "placed"),
    [
        *((name, {name}) for name in sorted(CACHES)),
        ("TRITON_HOME", {"TRITON_CACHE_DIR"}),
        ("XDG_CACHE_HOME", {"TORCH_EXTENSIONS_DIR", "VLLM_CACHE_ROOT"}),
    ],
)
def test_a_cache_that_the_user_has_placed_stays_there(toolkit, tmp_path, variable, placed):
    assert CACHES - build_compiler_environment({variable: "/mine"}, tmp_path).keys() == placed


def test_kernels_that_were_downloaded_in_advance_are_used(toolkit, tmp_path):
    cubins = tmp_path / ".cache/flashinfer/cubins"
    cubins.mkdir(parents=True)
    home = {"HOME": str(tmp_path)}
    assert build_compiler_environment(home, tmp_path)["FLASHINFER_CUBIN_DIR"] == str(cubins)
    for variables in ({"FLASHINFER_CUBIN_DIR": "/mine"}, {"FLASHINFER_WORKSPACE_BASE": "/mine"}):
        assert "FLASHINFER_CUBIN_DIR" not in build_compiler_environment(home | variables, tmp_path)


def test_the_caches_outlive_the_job_whose_folder_is_the_temporary_one(tmp_path, monkeypatch):
    job = tmp_path / "mcr_x1"
    job.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(job))
    folder = make_cache_folder()
    assert folder == make_cache_folder() == tmp_path / f"mcore-rl-caches-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["file", "link", "open to all"])
def test_a_cache_that_others_could_write_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"mcore-rl-caches-{os.getuid()}"
    if kind == "file":
        folder.touch()
    elif kind == "link":
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"caches-\d+ is .*; allowed: a folder that this user"):
        make_cache_folder()


class Worker:
    """Keeps the environment in which it was built."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_worker_is_built_in_that_environment_on_a_node_with_gpus(
    toolkit, tmp_path, monkeypatch, has_gpu
):
    import cloudpickle

    from mcore_rl.parallel.rendezvous import RendezvousEndpoint

    control = tmp_path / "nvidiactl"
    if has_gpu:
        control.touch()
    monkeypatch.setattr(compilers, "_CONTROL", control)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {"PATH": "/bin", "TRITON_CACHE_DIR": "/mine"}
    monkeypatch.setattr("os.environ", dict(before))
    meeting = RendezvousEndpoint("127.0.0.1", 1, "token")
    rank = WorkerProcess("rollout", 0)
    reply = rank.build(Reply(meeting), cloudpickle.dumps((Worker, (), {})), {})
    assert reply.failure is None
    environment = rank._worker.environment
    assert (
        ("VLLM_CACHE_ROOT" in environment) == (f"{toolkit}/bin" in environment["PATH"]) == has_gpu
    )
    assert environment["TRITON_CACHE_DIR"] == "/mine"


def test_a_process_without_a_gpu_makes_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(compilers, "_CONTROL", tmp_path / "nvidiactl")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = dict(os.environ)
    prepare_compilers()
    assert dict(os.environ) == before and not list(tmp_path.iterdir())
