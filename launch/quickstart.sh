#!/usr/bin/env bash
# Set-up, then the main job: GRPO of a small Qwen3-MoE with Megatron-core, vLLM and Ray.
#
#   bash launch/quickstart.sh [key=value ...]
#   bash launch/quickstart.sh seed=7 actor.layout.ep=2 trainer.num_steps=40 output_dir=DIR
#
# On the gpu lane it takes one GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

bash "$root/launch/setup_env.sh"
recipe=quickstart
case ${MCORE_RL_LANE:-} in
    gpu) recipe=quickstart_one_gpu ;;
    '') if nvidia-smi -L >/dev/null 2>&1; then recipe=quickstart_one_gpu; fi ;;
esac
exec "$root/.venv/bin/mcore-rl" rl recipe=$recipe "$@"
