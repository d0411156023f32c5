"""Builds mcore_rl. What it is and needs is in pyproject.toml; here stands what must be compiled.

`mcore_rl._csrc`, from csrc/: C++ always, CUDA where nvcc 12.8 or newer is found (in $CUDA_HOME/bin
where that is set, else on the PATH). A missing nvcc is no error but where it is asked for; a failed
compile is.

    MCORE_RL_CUDA=0|1       without CUDA, or an error without nvcc
    MCORE_RL_LANE=cpu|gpu   the same, unless MCORE_RL_CUDA says otherwise
    MCORE_RL_ARCHITECTURES  of GPUs to compile for; unless set "80 89 90 100"
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("csrc").rglob("*") if path.is_file())
# Loops over floats are vectorised only where they neither set errno nor trap.
CPP_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-g0", "-fvisibility=hidden"]
CPP_FLAGS += ["-fno-math-errno", "-fno-trapping-math"]
CUDA_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
# A100, L4 and L40S, H100 and H200, B200; what comes later compiles the last for itself.
*OTHERS, LAST = os.environ.get("MCORE_RL_ARCHITECTURES", "80 89 90 100").split()
for arch in OTHERS:
    CUDA_FLAGS += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
CUDA_FLAGS += ["-gencode", f"arch=compute_{LAST},code=[sm_{LAST},compute_{LAST}]"]


def find_nvcc() -> str | None:
    """The compiler of CUDA, or None where CUDA is not found or not wanted."""
    wanted = os.environ.get("MCORE_RL_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"MCORE_RL_CUDA is {wanted!r}; allowed: 0, 1")
    description = "MCORE_RL_CUDA is 1"
    if not wanted and (lane := os.environ.get("MCORE_RL_LANE")) in ("cpu", "gpu"):
        wanted, description = str(int(lane == "gpu")), f"MCORE_RL_LANE is {lane}"
    if wanted == "0":
        print("mcore_rl._csrc: without CUDA, as asked for")
        return None
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if found is None and wanted:
        place = f"in {home}/bin" if home else "on the PATH"
        raise SystemExit(f"{description}, but there is no nvcc {place}; needed: CUDA 12.8 or newer")
    print(f"mcore_rl._csrc: {f'CUDA with {found}' if found else 'without CUDA: nvcc not found'}")
    return found


def run(command: list[str]) -> None:
    """Run a compiler and show what it says; a failure ends the build."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    said = result.stdout + result.stderr
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{said}")
    if said:
        print(said, end="")


class BuildExtension(build_ext):
    """Compiles *.cpp and *.cu side by side, and links them."""

    def build_extension(self, ext: Extension) -> None:
        nvcc = find_nvcc()
        unused = "no_cuda.cpp" if nvcc else ".cu"
        sources = [s for s in SOURCES if s.endswith((".cpp", ".cu")) and not s.endswith(unused)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: self.compile(source, nvcc), sources))
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        if nvcc:  # the runtime is linked in, so no GPU is needed
            # It looks into lib64 by itself; a toolkit from Python packages has lib.
            libraries = Path(nvcc).parents[1] / "lib"
            run([nvcc, "-shared", "-cudart", "static", f"-L{libraries}", *objects, "-o", target])
        else:
            self.compiler.link_shared_object(
                objects, target, libraries=["pthread"], target_lang="c++"
            )

    def compile(self, source: str, nvcc: str | None) -> str:
        """The object file of a source."""
        target = Path(self.build_temp, source).with_suffix(f"{Path(source).suffix}.o")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".cu"):
            command = [str(nvcc), *CUDA_FLAGS]
        else:
            flags = ["-O1"] if Path(source).name == "bindings.cpp" else []  # big, and no loop in it
            command = [*self.compiler.compiler_so_cxx, *CPP_FLAGS, *flags]
            command += [f"-I{folder}" for folder in (*self.include_dirs, pybind11.get_include())]
        command += ["-c", source, "-o", str(target)]
        run(command)
        return str(target)


setup(
    # All of csrc is a source, for the sdist; what is compiled, and how, is decided above.
    ext_modules=[Extension("mcore_rl._csrc", sources=[], depends=SOURCES, language="c++")],
    cmdclass={"build_ext": BuildExtension},
)
