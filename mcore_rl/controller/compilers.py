"""What compiles kernels on a node with GPUs: ninja and nvcc on the PATH, caches on a local disk."""

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

TOOLS = "ninja", "nvcc"  # that FlashInfer compiles with (vllm/utils/flashinfer.py:95)
_CONTROL = Path("/dev/nvidiactl")  # of NVIDIA's driver
_CUBINS = "FLASHINFER_CUBIN_DIR"
_TOOLKIT = Path("/usr/local/cuda")
# The cache that each variable places, and another variable of the user that places it, too. By
# default they are in the home folder, or in TMPDIR, which ends with the job.
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
    """On a node with GPUs, set the environment of this process and of those that it starts.

    Raises:
        ConfigError: the folder of the caches belongs to somebody else.
    """
    if is_gpu_node():
        environment = compiler_environment(os.environ, local_cache())
        os.environ |= environment


def compiler_environment(environ: Mapping[str, str], cache: Path) -> dict[str, str]:
    """Return the variables of `environ` that change: PATH, and the caches that it does not place.

    Programs that are on the PATH stay those that are called. Many ranks that share a home folder
    would wait for each other's locks there, and read what others have half written.

    Args:
        cache: A folder on a disk of this node.
    """
    folders = [part for part in environ.get("PATH", "").split(os.pathsep) if part]
    missing = [tool for tool in TOOLS if shutil.which(tool, path=os.pathsep.join(folders)) is None]
    for tool in missing:
        places = (folder for folder in _tool_folders(environ) if (folder / tool).is_file())
        folders += [str(folder) for folder in places][:1]
    changes = {"PATH": os.pathsep.join(folders)} if missing else {}
    for name, (folder, other) in _CACHES.items():
        if not environ.get(name) and not environ.get(other):
            changes[name] = str(cache / folder)
    # Kernels that were downloaded in advance, for nodes that cannot.
    cubins = Path(environ.get("HOME", "/")) / ".cache/flashinfer/cubins"
    if "FLASHINFER_WORKSPACE_BASE" in changes and cubins.is_dir():
        changes |= {} if environ.get(_CUBINS) else {_CUBINS: str(cubins)}
    return changes


def _tool_folders(environ: Mapping[str, str]) -> list[Path]:
    """Return where the tools may be: in a toolkit, first the one that is named; in our environment.

    FlashInfer links with the lib64 beside nvcc, which the toolkit of the pinned packages lacks.
    """
    named = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    return [*(toolkit / "bin" for toolkit in (*named, _TOOLKIT)), Path(sys.prefix) / "bin"]


def local_cache() -> Path:
    """Make and return this user's folder for the caches; it outlives jobs.

    Raises:
        ConfigError: it belongs to somebody else, or others can write there.
    """
    place = Path(tempfile.gettempdir())
    if place.name.startswith(PREFIX):  # the folder of a job
        place = place.parent
    folder = place / f"mcore-rl-caches-{os.getuid()}"
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
