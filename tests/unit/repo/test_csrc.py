"""csrc builds: with CUDA and without, and a failure is one."""

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from tests.nightly import nightly
from tests.pages import select_commands

ROOT = Path(__file__).resolve().parents[3]
NVCC = shutil.which("nvcc")
KERNEL = re.compile(r"Function properties for (\w+)\n\s*(\d+) bytes stack frame, (.*)")


def build(root: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py in `root`, into `folder`."""
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "objects")]
    variables = {
        k: v for k, v in os.environ.items() if not k.startswith(("MCORE_RL_", "CUDA_HOME"))
    }
    return subprocess.run(
        command, cwd=root, env=variables | environment, capture_output=True, text=True, check=False
    )


def a_copy(folder: Path, *sources: str) -> Path:
    """Copy what setup.py reads, with these sources only."""
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "mcore_rl").mkdir()
    for source in sources:
        path = folder / "csrc" / source
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "csrc" / source, path)
    return folder


def test_the_bindings_are_short() -> None:
    assert len((ROOT / "csrc" / "bindings.cpp").read_text().splitlines()) < 40


def test_no_torch_is_compiled_in() -> None:
    paths = [
        path
        for path in (ROOT / "csrc").rglob("*")
        if path.is_file() and re.search(r"#include\s*[<\"](torch|ATen|c10)/", path.read_text())
    ]
    assert paths == []


def test_a_failed_compile_ends_the_build_with_the_compilers_message(tmp_path: Path) -> None:
    root = a_copy(tmp_path / "root", "no_cuda.cpp", "cuda.h")  # without the headers it names
    result = build(root, tmp_path, MCORE_RL_CUDA="0")
    assert result.returncode != 0
    assert "reshard/box.h: No such file" in result.stderr


def test_requested_cuda_that_is_missing_is_an_error(tmp_path: Path) -> None:
    root = a_copy(tmp_path / "root", "no_cuda.cpp")
    result = build(root, tmp_path, MCORE_RL_CUDA="1", CUDA_HOME=str(tmp_path))
    assert result.returncode != 0
    assert f"MCORE_RL_CUDA is 1, but there is no nvcc in {tmp_path}/bin" in result.stderr
    result = build(root, tmp_path, MCORE_RL_LANE="gpu", CUDA_HOME=str(tmp_path))
    assert result.returncode != 0
    assert f"MCORE_RL_LANE is gpu, but there is no nvcc in {tmp_path}/bin" in result.stderr
    result = build(root, tmp_path, MCORE_RL_CUDA="yes")
    assert "MCORE_RL_CUDA is 'yes'; allowed: 0, 1" in result.stderr


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"MCORE_RL_CUDA": "0"}, "without CUDA, as asked for"),
        ({"MCORE_RL_LANE": "cpu"}, "without CUDA, as asked for"),
        ({"CUDA_HOME": "/nowhere"}, "without CUDA: nvcc not found"),
    ],
)
def test_a_build_without_cuda_says_so_in_one_line(
    environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    root = a_copy(tmp_path / "root", "portable.h")  # nothing to compile
    result = build(root, tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"mcore_rl._csrc: {message}"]


USE = """
import importlib.util, sys
import numpy as np
spec = importlib.util.spec_from_file_location("_csrc", sys.argv[1])
csrc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(csrc)
assert csrc.has_cuda
source, target = np.arange(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
box = np.array([source.ctypes.data, target.ctypes.data, 1, 100, 0, 0, 0, 0])
table = csrc.Table(0, box.ctypes.data, 1)
table.run(2)
assert (source == target).all()
try:
    table.run_cuda(0, 0, 8)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.job
@pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize(
    ("variables", "architectures"),
    [
        ({"MCORE_RL_ARCHITECTURES": "80 100"}, (80, 100)),
        nightly(({}, (80, 89, 90, 100))),
    ],
    ids=["oldest and newest", "all"],
)
def test_kernels_compile_for_gpus_without_spills_and_load_without_any(
    variables: dict[str, str], architectures: tuple[int, ...], tmp_path: Path
) -> None:
    flags = {"MCORE_RL_CUDA": "1", "NVCC_APPEND_FLAGS": "-Xptxas -v"}
    result = build(ROOT, tmp_path, **flags, **variables)
    assert result.returncode == 0, result.stderr
    for architecture in architectures:
        assert result.stdout.count(f"for 'sm_{architecture}'") >= 5, result.stdout
    kernels = [fields for fields in KERNEL.findall(result.stdout) if "kernel" in fields[0]]
    # Copies and casts, quantisations, checksums.
    assert len(kernels) == len(architectures) * (3 + 2 + 3)
    assert {frame for _, frame, _ in kernels} == {"0"}
    assert {spills for _, _, spills in kernels} == {"0 bytes spill stores, 0 bytes spill loads"}

    (module,) = (tmp_path / "lib" / "mcore_rl").glob("_csrc*.so")
    command = [sys.executable, "-c", USE, str(module)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    used = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith("CUDA: ")


MODULE = """#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_csrc"};
PyMODINIT_FUNC PyInit__csrc() { return PyModule_Create(&module); }
"""


@pytest.mark.job
def test_an_editable_install_puts_the_module_into_the_tree(tmp_path: Path) -> None:
    root = a_copy(tmp_path / "root", "portable.h")
    (root / "csrc" / "module.cpp").write_text(MODULE)
    code = "from setuptools import build_meta as b; import sys; b.build_editable(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=root,
        env=os.environ | {"MCORE_RL_CUDA": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (module,) = (root / "mcore_rl").glob("_csrc*.so")
    assert module.name == f"_csrc{sysconfig.get_config_var('EXT_SUFFIX')}"


@pytest.mark.job
def test_the_benchmark_of_the_page_compares_every_kernel():
    [command] = select_commands("kernels")
    smaller = ["--device", "cpu", "--megabytes", "1"]
    done = subprocess.run(
        [sys.executable, *command.text.split()[1:], *smaller],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)["cases"]
    batches = [case for case in cases if case["case"].startswith("cudaMemcpyBatchAsync")]
    assert [case["case"].split(maxsplit=1)[1] for case in batches] == ["mixed", "64 KiB", "4 KiB"]
    assert all("not available on cpu" in case["not_available"] for case in batches)
    measured = [case for case in cases if case not in batches]
    assert all(case["s"] > 0 for case in measured)
    assert {case["case"].split()[0] for case in measured} == {"copy", "quantize", "checksum"}


RUNTIME = """#include <cstring>
#include <cstddef>
struct Attributes { int order, source[2], target[2]; unsigned flags; };
extern "C" int cudaRuntimeGetVersion(int* version) { return *version = VERSION, 0; }
extern "C" int cudaDriverGetVersion(int* version) { return *version = DRIVER, 0; }
extern "C" int cudaMemcpyBatchAsync(void** targets, void** sources, size_t* sizes, size_t count,
                                    Attributes* attributes, size_t* begins, size_t num,
#if VERSION < 13000
                                    size_t* failed,
#endif
                                    void* stream) {
  if (num != 1 || begins[0] != 0 || attributes->order != 1 || attributes->flags != 0) return 1;
  if (stream == nullptr) return 400;
  for (size_t n = 0; n < count; ++n) memcpy(targets[n], sources[n], sizes[n]);
  return 0;
}
"""


@pytest.fixture(scope="module")
def kernels_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "csrc_kernels", ROOT / "benchmarks/csrc_kernels.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "driver", "reason"),
    [
        (12_080, 12_080, ""),
        (13_000, 13_010, ""),
        (12_060, 13_000, "not available in CUDA 12.6 (its driver: 13.0); needed: 12.8"),
        (12_080, 12_040, "not available in CUDA 12.8 (its driver: 12.4); needed: 12.8"),
    ],
)
def test_the_batch_copy_of_cuda_is_called_as_its_version_has_it_or_reported_missing(
    kernels_benchmark: ModuleType, tmp_path: Path, version: int, driver: int, reason: str
) -> None:
    """The runtime is a stand-in with CUDA's prototypes, which copies on the CPU."""
    (tmp_path / "runtime.cpp").write_text(RUNTIME)
    library = tmp_path / "libcudart.so"
    command = ["g++", "-shared", "-fPIC", f"-DVERSION={version}", f"-DDRIVER={driver}"]
    subprocess.run([*command, str(tmp_path / "runtime.cpp"), "-o", str(library)], check=True)
    runtime = ctypes.CDLL(str(library))
    assert kernels_benchmark.missing_batch_copy("cuda", runtime) == reason
    if reason:
        return
    pairs = kernels_benchmark.split_range([4 << 10, 16 << 10], "cpu", 100_000)
    expected = [target.clone() for _, target in pairs]
    copy = kernels_benchmark.BatchCopy(pairs, runtime)
    with pytest.raises(RuntimeError, match="cudaMemcpyBatchAsync: error 400 of CUDA"):
        copy.run(0)
    assert all(bool((t == e).all()) for (_, t), e in zip(pairs, expected, strict=True))
    copy.run(8)
    assert all(bool((source == target).all()) for source, target in pairs)
