#!/usr/bin/env bash
# Makes .venv in the repository root with everything mcore_rl needs, from pinned requirements.
# Needs Python 3.12 or newer and pip. Does nothing, quickly, when nothing changed. The sandbox also
# wants bubblewrap, a Debian package, which this does not install (docs/sandbox.md).
#
#   bash launch/setup_env.sh             .venv
#   bash launch/setup_env.sh verifiers   .venv-verifiers instead, for agent.loop=verifiers (docs/agents.md)
#   bash launch/setup_env.sh docs        .venv-docs instead, which builds the site of docs/
#
#   MCORE_RL_LANE=cpu|gpu   the lane; without it, gpu where `nvidia-smi -L` works, else cpu
#   PYTHON=...              the interpreter; without it, the first that fits among the usual names
#   CUDA_HOME=...           gpu lane: a CUDA 13 toolkit; without it, that of the pinned packages
#
# Packages come from wherever pip is configured to look; uv, which pip installs first, fetches them. A
# stamp is written only after a stage has succeeded, so an interrupted set-up is redone by the next.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
log=$venv/setup.log
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# stage LABEL COMMAND...: a line on the screen when it begins and its seconds when it has ended, the
# output in the log, whose end is shown on failure.
# The command has a process group of its own, so that nothing of it outlives an interrupted set-up.
child=
trap '[ -z "$child" ] || kill -- "-$child"; exit 130' INT TERM HUP
stage() {
    local label=$1 start=$SECONDS status=0
    shift
    say "$label ..."
    set -m
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    set +m
    wait "$child" || status=$?
    child=
    if [ "$status" -ne 0 ]; then
        tail -n 25 "$log" >&2
        die "$label: failed; the whole log is in $PWD/$log"
    fi
    say "$label: $((SECONDS - start)) s"
}

choose_lane() {
    case ${MCORE_RL_LANE:-} in
        cpu | gpu) lane=$MCORE_RL_LANE ;;
        '') if nvidia-smi -L >/dev/null 2>&1; then lane=gpu; else lane=cpu; fi ;;
        *) die "MCORE_RL_LANE is '$MCORE_RL_LANE'; allowed: cpu, gpu" ;;
    esac
    requirements=launch/requirements/$lane.txt
}

python_version() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

# Interpreters of a name: the one on the PATH, then those of pyenv. Its commands on the PATH, in
# shims/, run only the versions that pyenv has selected.
list_pythons() {
    local shim root
    for shim in $(type -aP "$1"); do
        # Not that of an activated environment: it goes when the environment is made anew.
        [[ $shim == "$PWD/$venv/"* ]] || echo "$shim"
    done
    shim=$(command -v "$1" || true)
    for root in "${PYENV_ROOT:-}" "${shim%/shims/*}" "${HOME:-}/.pyenv"; do
        compgen -G "$root/versions/*/bin/$1" || true
    done
}

# The versions for which every pin has a wheel, the one that is tested first.
choose_python() {
    local allowed name version
    allowed='3.12 3.13'
    if [ -n "${PYTHON:-}" ]; then
        version=$(python_version "$PYTHON") || die "PYTHON is '$PYTHON', which does not run"
        [[ " $allowed " == *" ${version%.*} "* ]] ||
            die "PYTHON is '$PYTHON', Python $version; allowed: $allowed"
        python=$PYTHON
        return
    fi
    for name in ${allowed//3./python3.} python3; do
        for python in $(list_pythons "$name"); do
            version=$(python_version "$python") || continue
            [[ " $allowed " != *" ${version%.*} "* ]] || return 0
        done
    done
    die "no Python that is allowed ($allowed) among ${allowed//3./python3.} python3;" \
        "install one (Debian and Ubuntu: apt install python3.12-venv python3.12-dev; uv: uv python" \
        "install 3.12; pyenv: pyenv install 3.12), or set PYTHON to its path"
}

# What is compiled on the gpu lane, csrc and the torch part of Transformer Engine, needs nvcc of the
# CUDA that torch is made with, and a C++20 compiler.
check_toolkit() {
    local nvcc=$CUDA_HOME/bin/nvcc version
    [ -x "$nvcc" ] || die "CUDA_HOME is '$CUDA_HOME', which has no bin/nvcc; the gpu lane compiles" \
        "with a CUDA 13 toolkit. Without CUDA_HOME it takes that of its packages"
    version=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    [[ $version == 13.* ]] || die "CUDA_HOME is '$CUDA_HOME', whose nvcc is of CUDA" \
        "${version:-of an unknown version}; the gpu lane compiles with CUDA 13, as torch is." \
        "Without CUDA_HOME it takes the toolkit of its packages"
    command -v "${CXX:-c++}" >/dev/null || die "the gpu lane compiles Transformer Engine's torch" \
        "part, and there is no C++ compiler: neither CXX nor c++"
    say "CUDA toolkit: nvcc $version in $CUDA_HOME"
}

# The toolkit of the packages, unless CUDA_HOME names another.
choose_toolkit() {
    [ -n "${CUDA_HOME:-}" ] || CUDA_HOME=$(echo "$PWD/$venv"/lib/python3*/site-packages/nvidia/cu13)
    export CUDA_HOME
    check_toolkit
}

# Copies, not links into uv's cache: who edits an installed file edits this environment only.
install() {
    "$venv/bin/python" launch/uv.py pip install --link-mode=copy --no-build-isolation "$@"
}

# What is left out is large and seldom imported, and Python compiles it when it is: tests, models of
# other families, programs beside a library, what the quickstart does not import. A file that does not
# compile is for another Python, and nothing imports it.
uncompiled='/tests/|/testing/_internal/'
uncompiled+='|/site-packages/(anthropic|fontTools|mcp|mypy|mypyc|numba|openai/resources|pip)/'
uncompiled+='|/site-packages/(IPython|debugpy|dns|jedi|narwhals|pandas|peft|plotly|prompt_toolkit)/'
uncompiled+='|/site-packages/(tensordict|tornado|verl)/'
uncompiled+='|/huggingface_hub/(cli|inference)/|/numpy/distutils/|/pygments/lexers/'
uncompiled+='|/ray/(data|llm|rllib|serve|train|tune)/|/sympy/(combinatorics|physics|stats)/'
uncompiled+='|/transformers/(exporters|pipelines)/|/vllm/benchmarks/'
uncompiled+='|/(transformers|vllm|vllm/model_executor)/models/'
uncompiled+='(?!_|adapters|auto|config|deepseek|glm|interfaces|llama|mixtral|module_mapping|qwen'
uncompiled+='|registry|utils|vision)'
compile_files() { "$venv/bin/python" -m compileall -qq -j 0 "$@" || true; }

compile_packages() { compile_files -x "$uncompiled" "$venv/lib"; }

pinned() { sed -n "s/^\($1==[^ ;]*\).*/\1/p" "$requirements"; }

make_venv() {
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$venv"
    else # some systems split ensurepip off; the pip of the interpreter then installs one
        "$python" -m venv --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install pip
    fi
    "$venv/bin/python" -m pip install --no-compile "$(pinned uv)"
}

# The local version (+cpu) is part of the request for torch, so that its CUDA build is taken only
# where there is no other for this Python: it works on a CPU, and takes 3 GB more with its libraries.
# That of torchvision works, once declare_torchvision has run.
install_torch_cpu() {
    local torch vision
    torch=$(pinned torch) vision=$(pinned torchvision)
    UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=1 install --no-deps "$torch" "$vision" && return
    PIP_INDEX_URL=$torch_cpu_index install --no-deps "$torch" "$vision" && return
    grep -E '^(torch=|cuda-(bindings|pathfinder)=|nvidia-)' launch/requirements/gpu.txt |
        grep -Ev '^nvidia-(cutlass|ml-py|cuda-(cccl|crt|nvcc)|cudnn-frontend|nvvm)' |
        install --no-deps --requirement - "$vision" && return
    echo "torch: $torch is neither where pip is configured to look nor on $torch_cpu_index."
    echo "Make one of them reachable, or download the wheel and set PIP_FIND_LINKS to its folder."
    return 1
}

# setuptools first: it builds the one requirement that has no wheel.
install_packages_cpu() {
    install --no-deps "$(pinned setuptools)"
    grep -Ev '^torch(vision)?==' "$requirements" | install --no-deps --requirement -
}

declare_torchvision() { "$venv/bin/python" launch/declare_torchvision.py; }

install_torch_gpu() { install --no-deps "$(pinned setuptools)" "$(pinned torch)"; }

install_packages_gpu() {
    grep -v '^transformer-engine-torch==' "$requirements" | install --no-deps --requirement -
}

# From its source, which is pinned, and not a wheel that its build would look for elsewhere, or one
# that was compiled beside another torch; against the headers of the packages, which are of torch's
# versions.
install_transformer_engine() {
    NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 \
        install --no-deps --no-cache "$(pinned transformer-engine-torch)"
}

# Compiles csrc into mcore_rl/_csrc*.so; with CUDA on the gpu lane (setup.py).
install_project() {
    MCORE_RL_LANE=$lane install --no-deps --reinstall --editable .
    compile_files mcore_rl models tests # for processes that are told to write no bytecode
}

# Sizes are those of the wheels that the requirements pin.
describe_work() {
    local size='1.1 GB to download, or 3.4 GB where only torch for CUDA can be had'
    if [ "$lane" = gpu ]; then size='gigabytes to download'; fi
    echo "$(grep -c '^[^#]' "$requirements") packages, $size, less what uv has cached; then bytecode" \
        "and csrc are compiled, a minute or two on two cores"
}

is_compiled() { compgen -G 'mcore_rl/_csrc.*.so' >/dev/null; }

is_fresh() { [ "$(cat "$venv/$1.stamp" 2>/dev/null)" = "$2" ]; }

lock() {
    exec 9>>.venv.lock
    flock -n 9 || { say 'waiting for another set-up of this folder'; flock 9; }
}

# An environment of its own, .venv-NAME, with the packages of launch/requirements/NAME.txt alone.
separate() {
    local key
    venv=.venv-$1 log=.venv-$1/setup.log
    requirements=launch/requirements/$1.txt
    choose_python
    lock
    key=$({ python_version "$python"; echo "$PWD"; cat "$requirements"; } | sha256sum)
    if is_fresh packages "$key" && [ -x "$venv/bin/python" ]; then return; fi
    say "making $venv: $(command -v "$python") $(python_version "$python")"
    rm -rf "$venv"
    mkdir "$venv"
    stage 'virtual environment' make_venv
    stage 'packages' install --no-deps --requirement "$requirements"
    echo "$key" >"$venv/packages.stamp"
}

main() {
    local packages_key project_key
    choose_lane
    choose_python
    lock

    # A virtual environment knows its own path: a moved or copied one is made anew.
    packages_key=$({ echo "$lane" "$(python_version "$python")" "$PWD"
        cat "$requirements" launch/declare_torchvision.py; } | sha256sum)
    project_key=$({ echo "$lane"; cat pyproject.toml setup.py
        find csrc -type f -print0 | sort -z | xargs -0 cat; } | sha256sum)

    if ! is_fresh packages "$packages_key" || ! [ -x "$venv/bin/python" ]; then
        if [ "$lane" = gpu ] && [ -n "${CUDA_HOME:-}" ]; then check_toolkit; fi
        say "making $venv: $lane lane, $(command -v "$python") $(python_version "$python")"
        say "$(describe_work)"
        rm -f "$venv"/*.stamp # first, so that a half-removed folder is not taken for a whole one
        rm -rf "$venv"
        mkdir "$venv"
        stage 'virtual environment' make_venv
        stage 'torch' "install_torch_$lane"
        stage 'packages' "install_packages_$lane"
        if [ "$lane" = cpu ]; then stage 'torchvision' declare_torchvision; fi
        if [ "$lane" = gpu ]; then
            choose_toolkit
            say "compiling Transformer Engine's torch part: minutes on many cores, longer on few"
            stage "Transformer Engine's torch part" install_transformer_engine
        fi
        stage 'bytecode' compile_packages
        echo "$packages_key" >"$venv/packages.stamp"
    fi
    if ! is_fresh project "$project_key" || ! is_compiled; then
        if [ "$lane" = gpu ]; then choose_toolkit; fi
        stage 'mcore-rl' install_project
        echo "$project_key" >"$venv/project.stamp"
    fi
}

case ${1:-} in
    '') main ;;
    verifiers | docs) separate "$1" ;; # verifiers, because its pins and ours conflict
    *) die "'$1' is no environment; allowed: verifiers, docs, or nothing for .venv" ;;
esac
