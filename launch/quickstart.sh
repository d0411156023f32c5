#!/usr/bin/env bash
# Set-up, then the main job: GRPO of a small Qwen3-MoE with Megatron-core, vLLM and Ray.
#
#   bash launch/quickstart.sh [key=value ...]
#   bash launch/quickstart.sh seed=7 actor.layout.ep=2 trainer.num_steps=40 output_dir=DIR
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

bash "$root/launch/setup_env.sh"
exec "$root/.venv/bin/mcore-rl" rl recipe=quickstart "$@"
