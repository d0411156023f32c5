#!/usr/bin/env bash
# Shows on a machine with a GPU, in minutes, what of the GPU lane works and how fast it is.
# Needs Python 3.12 with torch for CUDA, transformers, pybind11, psutil and pytest, and nvcc: no network, and
# of the packages of this project only wheels of megatron-core, lapx, isal and dill.
#
#   bash tests/gpu/run.sh --wheels FOLDER            all checks that fit into 12 minutes
#   bash tests/gpu/run.sh --list                     what each check shows
#   bash tests/gpu/run.sh --only 'kernels,push'      some of them
#   bash tests/gpu/run.sh --dry                      small sizes on the CPU
#
#   --minutes N    for all checks together           --output FILE   JSON lines, appended
#   PYTHON=...     the interpreter, else python3     SITE=...        a folder with further packages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
arguments=()
wheels= dry=
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=${2:?--wheels needs a folder}; shift ;;
        --dry) dry=1; arguments+=(--dry) ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
case " ${arguments[*]-} " in
    *' --list '* | *' --help '* | *' -h '*) exec "$python" tests/gpu/run_checks.py "${arguments[@]}" ;;
esac

site=${SITE:-}
if [ -n "$wheels" ]; then
    [ -n "$site" ] || site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" \
        "$wheels"/*.whl
fi
export PYTHONPATH=${site:+$site:}${PYTHONPATH:-}
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

# The kernels are compiled for this card alone, which takes a quarter of the time.
if [ -n "$dry" ]; then
    export MCORE_RL_CUDA=0
else
    capability=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
    export MCORE_RL_CUDA=1 MCORE_RL_ARCHITECTURES=$capability
fi
"$python" setup.py -q build_ext --inplace
exec "$python" tests/gpu/run_checks.py "${arguments[@]}"
