"""Compilers of kernels on nodes with GPUs: ninja and nvcc on the PATH, caches on a local disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller.reaper import PREFIX

TOOLS = "ninja", "nvcc"  # used by FlashInfer (vllm/utils/flashinfer.py:95)
_CONTROL = Path("/dev/nvidiactl")  # of NVIDIA's driver
_CUBINS = "FLASHINFER_CUBIN_DIR"
_TOOLKIT = Path("/usr/local/cuda")
# Variables that name the folder of a cache, with that folder's name here, and another variable of
# the user that decides it, too. By default caches are in the home folder, or in TMPDIR, which is
# removed with the job.
_CACHES = {
    "CUDA_CACHE_PATH": ("cuda", ""),
    "FLASHINFER_WORKSPACE_BASE": ("flashinfer", ""),
    "TORCHINDUCTOR_CACHE_DIR": ("inductor", ""),
    "TORCH_EXTENSIONS_DIR": ("torch_extensions", "XDG_CACHE_HOME"),
    "TRITON_CACHE_DIR": ("triton", "TRITON_HOME"),
    "VLLM_CACHE_ROOT": ("vllm", "XDG_CACHE_HOME"),
}


def is_gpu_node() -> bool:
    """Return whether this node has NVIDIA's driver, without importing torch."""
    return _CONTROL.exists()


def prepare_compilers() -> None:
    """Set the environment of this process and of its children, if the node has GPUs.

    Raises:
        ConfigError: The folder of the caches belongs to another user.
    """
    if is_gpu_node():
        os.environ |= build_compiler_environment(os.environ, make_cache_folder())


def build_compiler_environment(environ: Mapping[str, str], cache: Path) -> dict[str, str]:
    """Return the variables to change in `environ`: PATH, and folders of caches that it lacks.

    Programs on the PATH keep their precedence. Caches are not in a shared home folder: ranks would
    wait for each other's locks there, and read files that are incomplete.

    Args:
        cache: A folder on a disk of this node.
    """
    folders = [part for part in environ.get("PATH", "").split(os.pathsep) if part]
    missing = [tool for tool in TOOLS if shutil.which(tool, path=os.pathsep.join(folders)) is None]
    for tool in missing:
        candidates = (path for path in _list_tool_folders(environ) if (path / tool).is_file())
        folders += [str(path) for path in candidates][:1]
    changes = {"PATH": os.pathsep.join(folders)} if missing else {}
    for name, (folder, other) in _CACHES.items():
        if not environ.get(name) and not environ.get(other):
            changes[name] = str(cache / folder)
    # Kernels that were downloaded in advance, for nodes without a network.
    cubins = Path(environ.get("HOME", "/")) / ".cache/flashinfer/cubins"
    if "FLASHINFER_WORKSPACE_BASE" in changes and cubins.is_dir():
        changes |= {} if environ.get(_CUBINS) else {_CUBINS: str(cubins)}
    return changes


def _list_tool_folders(environ: Mapping[str, str]) -> list[Path]:
    """Return folders to search: toolkits, those named by variables first, then our environment.

    FlashInfer links with the lib64 beside nvcc, which the toolkit of the pinned packages lacks.
    """
    named = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    return [*(toolkit / "bin" for toolkit in (*named, _TOOLKIT)), Path(sys.prefix) / "bin"]


def make_cache_folder() -> Path:
    """Make and return this user's folder for the caches; it outlives jobs.

    Raises:
        ConfigError: It belongs to another user, or other users can write there.
    """
    parent = Path(tempfile.gettempdir())
    if parent.name.startswith(PREFIX):  # the folder of a job
        parent = parent.parent
    folder = parent / f"mcore-rl-caches-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    mode = status.st_mode
    if not stat.S_ISDIR(mode) or status.st_uid != os.getuid() or mode & 0o022:
        raise ConfigError(
            f"{folder} is {stat.filemode(mode)} of user {status.st_uid}, and compiled code is run "
            "from it; allowed: a folder that this user alone can write, or another TMPDIR"
        )
    return folder
